"""Tuning runs without a cluster: real plans of a real space, priced by the replay plus noise in place of the wire."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import optuna

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.documents import write_text
from lightning_autosync.measure.emulation.network import emulable
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.plan.space import BUILDER, Genome, PlanSpace
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.search import studies
from lightning_autosync.workload import Workload, catalogue
from lightning_autosync.workload.scaling import scaled

ROUNDS = 5
_NOISE = 0.01
_MIB = 2**20


class Bed:
    """A workload on a cluster whose steps take what the replay says, give or take a hundredth."""

    def __init__(self, cluster: str, model: str) -> None:
        self.cluster = emulable(resolve_cluster(cluster), 50e6)
        whole = catalogue.build(model, batch_size=32, flops_per_second=1e12)
        self.workload = scaled(whole, 4e6 / whole.bytes).model_copy(update={"name": f"{model}_like"})
        self.space = PlanSpace(self.workload, self.cluster)
        self._replay = Replay(self.workload, self.cluster, Constants(accelerated=True))
        self._prices: dict[str, float] = {}

    def price(self, plan: SyncPlan) -> float:
        """Seconds of a step."""
        if plan.fingerprint not in self._prices:
            schedule = compile_plan(plan, self.workload, self.cluster)
            self._prices[plan.fingerprint] = self._replay.predict(schedule, "fluid").step_time
        return self._prices[plan.fingerprint]


@lru_cache
def bed(cluster: str = "fat_node_star", model: str = "vgg16") -> Bed:
    return Bed(cluster, model)


def write_run(
    directory: Path,
    budget: int = 60,
    seed: int = 0,
    cluster: str = "fat_node_star",
    model: str = "vgg16",
    sampler: str = "autosync",
    journal: bool = True,
) -> dict[str, Any]:
    """A run directory of ``autosync tune`` (result.json, plan.yaml, study.journal); returns what result.json says."""
    test_bed = bed(cluster, model)
    rng = random.Random(seed)
    points = list(_search(test_bed, budget, rng))
    trials = [trial for _, trial in points]
    complete = [(genome, trial) for genome, trial in points if trial["state"] == "complete"]
    genome, best = min(complete, key=lambda pair: pair[1]["seconds"])
    builder = min((t for t in trials if t["builder"] and t["state"] == "complete"), key=lambda t: t["seconds"])
    final = _final(test_bed, (best["number"], test_bed.space.plan(genome)), builder["builder"], rng)
    if final["winner"] == builder["builder"]:
        best, genome = builder, next(genome for genome, trial in complete if trial is builder)
    plan = test_bed.space.plan(genome)
    result = {
        "format": "autosync-tuning/1",
        "settings": {"search": {"budget": budget, "seed": seed, "sampler": sampler}, "launch": {"kind": "emulated"}},
        "cluster": test_bed.cluster.to_dict(),
        "workload": {"bytes": test_bed.workload.bytes, **test_bed.workload.to_dict()},
        "semantics": "exact",
        "study": {"name": "tuning", "storage": "study.journal"},
        "best": {name: best[name] for name in ("number", "origin", "seconds", "builder")} | {"plan": plan.to_dict()},
        "opponents": {
            "ddp": {"name": "ddp_view", "seconds": final["contenders"]["ddp_view"]["median_seconds"]},
            "builder": {"name": builder["builder"], "seconds": builder["seconds"]},
        },
        "trials": trials,
        "final": final,
        "emulated": {"links": True, "compute": True},
        "drift": {"reference_by_trial": {str(number): 0.4 for number in range(12, budget, 4)}},
        "timing": {
            "trials_per_minute": 24.0,
            "sampler_seconds": 0.03 * budget,
            "sampler_seconds_by_proposal": [0.03] * budget,
            "wall_seconds": 2.5 * budget,
            "restarts": 0,
        },
        "interrupted": False,
        "environment": {"torch": "2.13.0", "cores": 2, "tcp_congestion_control": "reno"},
    }
    plan.save(directory / "plan.yaml")
    write_text(directory / "result.json", json.dumps(result))
    if journal:
        _write_study(directory / "study.journal", test_bed.space, points)
    return result


def _search(test_bed: Bed, budget: int, rng: random.Random) -> Iterator[tuple[Genome, dict[str, Any]]]:
    """Builders, random points, then mutations of the best so far."""
    space, best, least = test_bed.space, None, float("inf")
    baselines = space.baselines()
    for number in range(budget):
        if number < len(baselines):
            genome, origin = baselines[number], "baseline"
        elif number < len(baselines) + 12 or best is None:
            genome, origin = space.draw(rng), "startup"
        else:
            genome, origin = space.mutate(best, rng), "evolved"
        trial = _trial(test_bed, number, origin, genome, least, rng)
        if trial["state"] == "complete" and trial["seconds"] < least:
            least, best = trial["seconds"], genome
        yield genome, trial


def _trial(test_bed: Bed, number: int, origin: str, genome: Genome, least: float, rng: random.Random) -> dict[str, Any]:
    price = test_bed.price(test_bed.space.plan(genome))
    pruned = price > 2 * least
    steps = [[price * rng.gauss(1, _NOISE) for _ in range(2 if pruned else 6)]] * test_bed.cluster.world_size
    failed = origin == "evolved" and rng.random() < 0.04
    return {
        "number": number,
        "origin": origin,
        "state": "failed" if failed else "pruned" if pruned else "complete",
        "seconds": None if failed else statistics.median(steps[0]),
        "predicted": None if origin == "baseline" else price * rng.gauss(1, 4 * _NOISE),
        "steps": [] if failed else steps,
        "elapsed": 1.5 + 8 * price,
        "error": "rank 2 is lost: silent for 20 s" if failed else None,
        "builder": genome[BUILDER] if origin == "baseline" else None,
    }


def _final(test_bed: Bed, best: tuple[int, SyncPlan], builder: str, rng: random.Random) -> dict[str, Any]:
    """The best trial, a setting of DDP and the best builder side by side."""
    number, plan = best
    buckets = builders.all_reduce(test_bed.workload, test_bed.cluster, bucket_bytes=_MIB)
    plans = {"ddp_view": buckets, builder: builders.build(builder, test_bed.workload, test_bed.cluster)}
    if plan.fingerprint != plans[builder].fingerprint:
        plans[f"trial_{number}"] = plan
    contenders: dict[str, Any] = {}
    for name, one in plans.items():
        rounds = [test_bed.price(one) * rng.gauss(1, _NOISE) for _ in range(ROUNDS)]
        contenders[name] = {"class": "exact", "median_seconds": statistics.median(rounds), "round_seconds": rounds}
    winner = min((name for name in plans if name != "ddp_view"), key=lambda n: contenders[n]["median_seconds"])
    for name, contender in contenders.items():
        contender["kind"] = "plan" if name == winner else "ddp" if name == "ddp_view" else "builder"
        if name not in (winner, "ddp_view", builder):
            contender["kind"] = "finalist"
    return {"contenders": contenders, "winner": winner, "opponents": {"ddp": "ddp_view", "builder": builder}}


def _write_study(path: Path, space: PlanSpace, points: list[tuple[Genome, dict[str, Any]]]) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = studies.open_study(path, "tuning", space)
    states = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    study.add_trials(
        [
            optuna.trial.create_trial(
                state=optuna.trial.TrialState[states[trial["state"]]],
                value=trial["seconds"] if trial["state"] == "complete" else None,
                params=dict(genome),
                distributions=studies.distributions(space),
                user_attrs={"origin": trial["origin"]},
            )
            for genome, trial in points
        ]
    )


def cluster_of(result: dict[str, Any]) -> ClusterSpec:
    return ClusterSpec.from_dict(result["cluster"])


def workload_of(result: dict[str, Any]) -> Workload:
    return Workload.from_dict({name: value for name, value in result["workload"].items() if name != "bytes"})

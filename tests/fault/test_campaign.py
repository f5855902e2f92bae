"""A campaign of faults over all modes: nobody hangs, no number is lost, survivors agree, checkpoints load.

For each mode one job of four workers meets seeded faults one after another: workers are killed (and started again),
stopped for a moment or for so long that they are given up, slowed down, cut off. Then all average and save, something
that the job cannot survive dies, and the job goes on from the checkpoint. Ends with a table of all faults.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from campaign_calls import HEARTBEAT, RESUMED_STEPS, TIMEOUT, Heavy
from crew import DROP, KILL, SLOW, STOP, Crew, missed, struck
from test_mesh_faults import SLACK

from lightning_autosync.plan import Group, Partition, SyncPlan
from lightning_autosync.workload import describe

WORKERS = 4
HANG = "long stop"
FATAL = "fatal kill"
KINDS = (KILL, STOP, HANG, SLOW, DROP, FATAL)
BOUND = HEARTBEAT.longest + 2 * HEARTBEAT.redial + SLACK
"""Seconds within which the others go on after a fault, or end."""
RETURN = TIMEOUT + SLACK
"""Seconds within which a rank is back that was killed or given up."""

PERIODIC = {"mode": "periodic", "period": 4}
MODES: dict[str, dict[str, Any]] = {
    "partial reduce, constant": {"mode": "partial_reduce", "group_size": 3, "weighting": "constant"},
    "partial reduce, dynamic": {"mode": "partial_reduce", "group_size": 3, "weighting": "dynamic", "wait": 0.05},
    "gossip": {"mode": "partial_reduce", "group_size": 2, "weighting": "constant", "momentum": "average"},
    "local SGD": {**PERIODIC, "outer": "averaging"},
    "EASGD": {**PERIODIC, "outer": "easgd"},
    "BMUF": {**PERIODIC, "outer": "bmuf"},
    "SlowMo": {**PERIODIC, "outer": "slowmo"},
    "DiLoCo": {**PERIODIC, "outer": "diloco"},
    "streaming DiLoCo": {**PERIODIC, "outer": "diloco", "fragments": 2},
    "SSP": {"mode": "bounded_staleness", "staleness": 2},
    "ASP": {"mode": "asynchronous"},
    "synchronous, served": {"mode": "synchronous", "served": True},
}
SURVIVED = (KILL, KILL, STOP, STOP, HANG, SLOW, SLOW, DROP, DROP)
IN_STEP = (STOP, STOP, STOP, SLOW, SLOW, SLOW, DROP, DROP, DROP)
"""Where every worker is needed, none may be lost."""


def plan_for(consistency: dict[str, Any]) -> SyncPlan:
    """Servers on rank 0 and on a process of its own, where the mode has servers."""
    served = consistency["mode"] not in ("partial_reduce", "periodic")
    placed: dict[str, Any] = {
        "architecture": "parameter_server",
        "topology": "star",
        "partition": Partition(shards=2),
        "placement": (0, WORKERS),
    }
    names = tuple(variable.name for variable in describe(Heavy()).variables)
    group = Group(name="all", variables=names, **(placed if served else {}))
    return SyncPlan(world_size=WORKERS, servers=int(served), consistency=consistency, groups=(group,))


@dataclass
class Ledger:
    """For each mode and fault, the seconds until rank 0 went on."""

    pauses: dict[str, dict[str, list[float]]]

    def lines(self) -> Iterator[str]:
        """A table: how many of each, and the longest pause."""
        yield f"{'mode':<26}" + "".join(f"{kind:>16}" for kind in KINDS)
        for mode, found in self.pauses.items():
            cells = [f"{len(found[kind])} ({max(found[kind]):.1f} s)" if found[kind] else "-" for kind in KINDS]
            yield f"{mode:<26}" + "".join(f"{cell:>16}" for cell in cells)
        total = sum(len(pauses) for found in self.pauses.values() for pauses in found.values())
        yield f"{total} faults, each survived within {BOUND:g} s; in brackets the longest time until rank 0 went on"


@pytest.fixture(scope="module")
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    found = Ledger(defaultdict(lambda: defaultdict(list)))
    yield found
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *found.lines(), sep="\n")


class Campaign:
    """Faults on a running crew, one after another; what a fault brings about later happens meanwhile."""

    def __init__(self, crew: Crew, seed: int, pauses: dict[str, list[float]]) -> None:
        self.crew, self.pauses = crew, pauses
        self.drawn = random.Random(seed)
        self.away: set[int] = set()
        self._later: list[tuple[float, str, int]] = []

    def strike(self, kind: str) -> None:
        """One fault, on a rank that is well; wait until rank 0 has gone on."""
        self._pass(self.drawn.uniform(0.1, 0.7))
        # Only rank 0's process can neither die nor be given up.
        able = set(range(1, WORKERS)) if kind in (KILL, HANG) else set(range(self.crew.size))
        while not able - self.away:
            self._pass(0.1)
        rank = self.drawn.choice(sorted(able - self.away))
        assert self.crew.alive(rank), f"rank {rank} has ended before a {kind}"
        self._inflict(kind, rank)
        before, begin = self.crew.count("steps0"), time.monotonic()
        while self.crew.count("steps0") < before + 2:
            self._pass(0.01)
            assert time.monotonic() - begin < BOUND, f"rank 0 did not go on after {kind} of rank {rank}"
        self.pauses[kind].append(time.monotonic() - begin)

    def _inflict(self, kind: str, rank: int) -> None:
        if kind == KILL:
            self.crew.kill(rank)
            self._plan(self.drawn.uniform(0.0, 2.0), "restart", rank)
        elif kind in (STOP, HANG):
            self.crew.stop(rank)
            longest = HEARTBEAT.longest
            seconds = self.drawn.uniform(0.1, 0.4) * longest if kind == STOP else longest + 2 * HEARTBEAT.redial
            self._plan(seconds, "go_on", rank)
        else:
            self._hit(kind, rank)

    def _hit(self, kind: str, rank: int) -> None:
        """Once more where the rank had no connection at that moment, or was still coming back and did not listen."""
        end = time.monotonic() + RETURN
        hits, misses = struck(kind, rank), missed(kind, rank)
        before, empty = self.crew.count(hits), self.crew.count(misses)
        while self.crew.count(hits) == before:
            found = self.crew.count(misses)
            times = f"{found - empty} times no connection"
            assert time.monotonic() < end, f"a {kind} found nothing at rank {rank} ({times})"
            again = time.monotonic() + 1.0
            getattr(self.crew, kind)(rank)
            while time.monotonic() < again and (self.crew.count(hits), self.crew.count(misses)) == (before, found):
                self._pass(0.01)

    def heal(self) -> None:
        """Wait until all are back and training."""
        while self._later:
            self._pass(0.1)
        before = [self.crew.count(f"steps{rank}") for rank in range(WORKERS)]
        for rank, steps in enumerate(before):
            self.crew.wait_for(f"steps{rank}", steps + 3, timeout=60.0)

    def _plan(self, seconds: float, action: str, rank: int) -> None:
        self.away.add(rank)
        heapq.heappush(self._later, (time.monotonic() + seconds, action, rank))

    def _pass(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._later and self._later[0][0] < end:
            at, action, rank = heapq.heappop(self._later)
            time.sleep(max(0.0, at - time.monotonic()))
            self.crew.start(rank, rejoin=True) if action == "restart" else self.crew.go_on(rank)
            self.away.discard(rank)
        time.sleep(max(0.0, end - time.monotonic()))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("mode", MODES)
def test_campaign(mode: str, seed: int, ledger: Ledger, tmp_path: Path) -> None:
    plan = plan_for(MODES[mode])
    arguments = {"plan": plan.to_dict(), "folder": str(tmp_path)}
    size = WORKERS + plan.servers
    in_step = plan.consistency.mode == "synchronous"
    with Crew("campaign_calls:train", size, **arguments) as crew:
        crew.wait_for("started", size)
        campaign = Campaign(crew, seed + 100 * list(MODES).index(mode), ledger.pauses[mode])
        faults = list(IN_STEP if in_step else SURVIVED)
        campaign.drawn.shuffle(faults)
        for kind in faults:
            campaign.strike(kind)
        campaign.heal()
        met = meet(crew)
        campaign.pauses[FATAL].append(end(crew, fatal_rank(plan, campaign.drawn)))
    with Crew("campaign_calls:resume", size, **arguments) as crew:
        resumed = [crew.result(rank, BOUND + 30.0) for rank in range(WORKERS)]
    assert len({found["digest"] for found in resumed}) == 1
    assert all(found["finite"] for found in resumed)
    assert all(found["progress"] > met for found in resumed)
    if in_step:
        assert resumed[0]["progress"] == met + RESUMED_STEPS


def meet(crew: Crew) -> int:
    """All average and save; the progress of their model."""
    crew.announce("meet")
    crew.wait_for("saved", WORKERS, timeout=60.0)
    told = [crew.text(f"met{rank}").split() for rank in range(WORKERS)]
    assert len({digest for digest, _, _ in told}) == 1
    assert all(finite == "True" for _, finite, _ in told)
    crew.announce("again")
    for rank in range(WORKERS):
        crew.wait_for(f"steps{rank}", crew.count(f"steps{rank}") + 1)
    return int(told[0][2])


def fatal_rank(plan: SyncPlan, drawn: random.Random) -> int:
    """Without whom the job cannot go on: a coordinator, a server, or any at all."""
    if plan.consistency.mode == "synchronous":
        return drawn.randrange(crew_size(plan))
    return drawn.choice([0, WORKERS]) if plan.servers else 0


def crew_size(plan: SyncPlan) -> int:
    return plan.world_size + plan.servers


def end(crew: Crew, victim: int) -> float:
    """Kill; the seconds within which every other worker has ended with an error that names a lost rank."""
    begin = time.monotonic()
    crew.kill(victim)
    others = [rank for rank in range(WORKERS) if rank != victim]
    found = [crew.result(rank, BOUND) for rank in others]
    took = time.monotonic() - begin
    assert took < BOUND
    assert all("rank" in seen["error"] and ("lost" in seen["error"] or "gone" in seen["error"]) for seen in found)
    assert all(seen["finite"] for seen in found)
    return took

"""Collections without machines: what is drawn for them, and what is measured again."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from lightning_autosync.cluster import synchronization_rate
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.collection.card import card
from lightning_autosync.lab.collection.collector import Collector
from lightning_autosync.lab.collection.drawing import REFERENCE, draw_combinations, draw_plans, kinds
from lightning_autosync.lab.collection.settings import CollectionSettings, Mixture
from lightning_autosync.learned.dataset import Dataset, Writer
from lightning_autosync.measure.conditions import describe_worker
from lightning_autosync.measure.replica_calls import StepBudget
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.replay import Constants

SHIPPED = Path(__file__).parents[3] / "examples" / "datasets" / "emulated"
SMALL: dict[str, Any] = {
    "dataset": "none",
    "pairs": 50,
    "clusters": [
        "fat_node_star",
        {"name": "racks", "racks": {"racks": 2, "nodes_per_rack": 2, "bandwidth": 2e6, "uplink": 1e6}},
    ],
    "families": ["vgg16"],
    "variants": 1,
}


def parse(**changes: Any) -> CollectionSettings:
    return CollectionSettings.parse({**SMALL, **changes})


def test_every_workload_is_on_every_cluster_at_a_like_rate() -> None:
    settings = parse(pairs=41, variants=2, families=["ncf", {"family": "gpt", "layers": 1, "name": "tiny"}])
    combinations = draw_combinations(settings)
    assert [combination.plans for combination in combinations] == [6] + [5] * 7
    assert [combination.workload.name for combination in combinations[:4]] == ["ncf-0", "ncf-1", "tiny-0", "tiny-1"]
    assert combinations[0].workload is combinations[4].workload
    for combination in combinations:
        assert synchronization_rate(combination.cluster) == pytest.approx(settings.rate)
        assert all(link.latency == 0 and link.bandwidth <= settings.fastest_link for link in combination.cluster.links)


def test_no_more_pairs_are_drawn_than_asked_for() -> None:
    settings = parse(pairs=1)
    (combination,) = draw_combinations(settings)
    assert [draft.kind for draft in draw_plans(settings, Constants(), combination)] == [REFERENCE]


def test_slow_clusters_keep_their_fastest_link() -> None:
    settings = parse(clusters=["fat_node_star"], rate=50e6, fastest_link=20e6)
    (combination,) = draw_combinations(settings)
    assert max(link.bandwidth or 0 for link in combination.cluster.links) == pytest.approx(20e6)


def test_light_variables_are_left_out() -> None:
    heavy, all_of_them = (draw_combinations(parse(lightest=share))[0].workload for share in (0.01, 0.0))
    assert len(heavy.variables) < len(all_of_them.variables) == 32
    assert "classifier.0.weight" in {variable.name for variable in heavy.variables}


def test_a_seed_draws_the_same_plans_and_another_one_others() -> None:
    combination = draw_combinations(parse())[1]
    drafts = draw_plans(parse(), Constants(), combination)
    assert drafts == draw_plans(parse(), Constants(), combination)
    assert drafts[0].kind == REFERENCE
    assert len({draft.key for draft in drafts}) == len(drafts) == 25
    assert {"evolved", "drawn", "free"} <= {draft.kind for draft in drafts}
    for draft in drafts:
        plan = SyncPlan.from_dict(draft.plan)
        assert plan.semantics == "exact"
        assert compile_plan(plan, combination.workload, combination.cluster).world_size == 4
    others = draw_plans(parse(seed=1), Constants(), combination)
    assert {draft.key for draft in drafts} != {draft.key for draft in others}


def test_slow_plans_and_those_of_many_messages_are_not_drawn() -> None:
    combination = draw_combinations(parse())[0]
    drafts = draw_plans(parse(slowest=1.5, messages=6), Constants(), combination)
    best = drafts[0].replayed
    for draft in drafts[1:]:
        best = min(best, draft.replayed)  # of those drawn so far
        assert draft.replayed <= 1.5 * best
        assert len(SyncPlan.from_dict(draft.plan).groups) <= 6


def test_kinds_follow_the_mixture() -> None:
    found = kinds(Random(0), Mixture(buckets=0, built=1, free=2, drawn=1, evolved=0), 40)
    assert {kind: found.count(kind) for kind in sorted(set(found))} == {"built": 10, "drawn": 10, "free": 20}


def test_steps_fit_the_budget() -> None:
    budget = StepBudget(warm_up=1, seconds=0.2, min_steps=2, max_steps=5, single_beyond=0.6)
    assert [budget.steps(seconds) for seconds in (0.01, 0.06, 0.15, 0.5, 1.0)] == [5, 4, 2, 2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": dict.fromkeys(Mixture.model_fields, 0)}, "mixture: at least one kind must be above zero"),
        ({"bytes": [2.0, 1.0]}, r"bytes: least \(2.0\) is above most \(1.0\)"),
        ({"pair": 3}, "pair: unknown field"),
        ({"constants": "constants.yaml", "cores": 3}, "cores: the file of constants has the number of cores; leave"),
    ],
)
def test_wrong_settings_are_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clusters": ["four_equal", "four_equal"]}, "clusters: 'four_equal' occurs 2 times"),
        ({"families": ["ncf", {"family": "ncf", "factors": 8}]}, "families: 'ncf-0' occurs 2 times"),
        ({"families": [{"layers": 3}]}, "family: missing; allowed: vgg16"),
        ({"families": ["nothing"]}, "no model 'nothing' in the catalogue"),
    ],
)
def test_wrong_combinations_are_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        draw_combinations(parse(**changes))


class MadeUpSession:
    """Workers whose steps take what they are told, beside as many busy cores as they are told."""

    def __init__(self) -> None:
        self.foreign = 0.0
        self.batches = 0

    def run(self, function: Any, ranks: Any = None, **arguments: Any) -> list[Any]:
        if function is describe_worker:
            return [{"machine": "made up"}]
        self.batches += 1
        return [[[share * self.batches] for _ in arguments["plans"]] for share in (0.01, 0.005)]

    def watch_load(self) -> MadeUpSession:
        return self

    def foreign_cores(self) -> float:
        return self.foreign


def test_what_was_disturbed_is_measured_again_by_the_next_run(tmp_path: Path) -> None:
    settings = parse(clusters=["fat_node_star"], pairs=3, passes=1, mixture={"built": 0, "drawn": 0, "evolved": 0})
    (combination,) = draw_combinations(settings)
    session, counts = MadeUpSession(), []
    for foreign in (1.0, 1.0, 0.0, 0.0):
        session.foreign = foreign
        with Writer(tmp_path) as writer:
            run = Collector(settings, Constants(), writer)
            run._visit(session, combination, 0)  # type: ignore[arg-type]
            counts.append((run.progress.measured, run.progress.disturbed, len(writer.keys)))
        assert "3 pairs of a plan" in card(tmp_path)
    assert counts == [(3, 3, 0), (3, 3, 0), (3, 0, 3), (0, 0, 3)]
    assert session.batches == 3
    assert [sample.seconds for sample in Dataset.load(tmp_path)] == pytest.approx([0.0225] * 3)
    told = card(tmp_path)
    assert "(0 here)" in told
    assert "Counted steps of a sample: 1 (3 samples)." in told
    assert "No plan compresses a message." in told
    (small,) = [line for line in told.splitlines() if line.startswith("| vgg16-0 |") and "553 MB" in line]
    assert small.endswith(f"| {len(combination.workload.variables)} | 553 MB | 32 |")


@pytest.mark.slow
def test_the_card_of_the_shipped_dataset_is_up_to_date() -> None:
    assert card(SHIPPED) == (SHIPPED / "README.md").read_text()

"""Validation without machines: what is drawn, what is kept, how agreement is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_autosync.bench.validation.accuracy import Accuracy, Priced, by
from lightning_autosync.bench.validation.cases import Case, draw_cases
from lightning_autosync.bench.validation.measuring import load_measurements
from lightning_autosync.bench.validation.settings import Settings
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.workload import Variable, Workload

SMALL = Settings.parse({"cases": 14, "clusters": ["fat_node_star"], "families": ["vgg16", "ncf"], "seed": 3})
CLUSTER = ClusterSpec.uniform(nodes=2, bandwidth=1e6)
WORKLOAD = Workload(name="one", variables=(Variable(name="fc", shape=(1000,)),))
CASE = Case(CLUSTER, "one", WORKLOAD, "buckets", builders.all_reduce(WORKLOAD, CLUSTER))


def priced(measured: float, predicted: float, family: str = "one") -> Priced:
    return Priced(Case(CLUSTER, family, WORKLOAD, "buckets", CASE.plan), measured, predicted, None)


def test_a_seed_draws_the_same_exact_plans_that_compile() -> None:
    cases = draw_cases(SMALL)
    assert [case.key for case in cases] == [case.key for case in draw_cases(SMALL)]
    assert len(cases) == 14
    assert {case.kind for case in cases} >= {"buckets", "free"}
    for case in cases:
        assert case.plan.semantics == "exact"
        assert compile_plan(case.plan, case.workload, case.cluster).world_size == 4
        assert all(link.latency == 0 and link.bandwidth <= SMALL.fastest_link for link in case.cluster.links)


def test_another_seed_draws_others() -> None:
    other = draw_cases(SMALL.model_copy(update={"seed": 4}))
    assert {case.key for case in other}.isdisjoint(case.key for case in draw_cases(SMALL))


def test_accuracy_by_hand() -> None:
    accuracy = Accuracy.of([priced(1.0, 1.1), priced(2.0, 1.6), priced(4.0, 4.0)])
    assert accuracy.median == pytest.approx(0.1)
    assert accuracy.bias == pytest.approx(0.0)
    assert accuracy.p90 == pytest.approx(0.18)
    assert accuracy.tau == pytest.approx(1.0)


def test_order_is_judged_within_one_workload_on_one_cluster() -> None:
    found = [priced(1.0, 3.0), priced(2.0, 2.0), priced(3.0, 1.0), priced(9.0, 9.0, "two"), priced(8.0, 8.0, "two")]
    assert Accuracy.of(found).tau == pytest.approx(-1.0)
    assert by(found, lambda one: one.case.family)["two"].tau is None


def test_measurements_are_read_up_to_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    assert load_measurements(path) == {}
    path.write_text('{"key": "a", "steps": [[1.0, 3.0, 2.0], [1.5, 1.5, 1.5]], "foreign_cores": null}\n{"key": "b"')
    found = load_measurements(path)
    assert list(found) == ["a"]
    assert found["a"].seconds == 2.0
    path.write_text("not a measurement\n")
    with pytest.raises(DocumentError, match=r"measurements.jsonl:1: not a measurement"):
        load_measurements(path)

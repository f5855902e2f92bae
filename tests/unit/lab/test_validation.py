"""Validation without machines: what is drawn, what is kept, how agreement is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from locks import held_elsewhere

from lightning_autosync.cli.validate import order_lines, price
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.validation.accuracy import Priced, ReplayAccuracy, by
from lightning_autosync.lab.validation.cases import Case, draw_cases
from lightning_autosync.lab.validation.measuring import load_measurements, measure_cases
from lightning_autosync.lab.validation.settings import ValidationSettings
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.workload import Variable, Workload

SMALL = ValidationSettings.parse({"cases": 14, "clusters": ["fat_node_star"], "families": ["vgg16", "ncf"], "seed": 3})
CLUSTER = ClusterSpec.uniform(nodes=2, bandwidth=1e6)
WORKLOAD = Workload(name="one", variables=(Variable(name="fc", shape=(1000,)),))
CASE = Case(CLUSTER, "one", WORKLOAD, "buckets", builders.all_reduce(WORKLOAD, CLUSTER))


def priced(measured: float, predicted: float, family: str = "one", noise: float = 0.0) -> Priced:
    return Priced(Case(CLUSTER, family, WORKLOAD, "buckets", CASE.plan), measured, predicted, None, noise)


def test_a_seed_draws_the_same_exact_plans_that_compile() -> None:
    cases = draw_cases(SMALL)
    assert [case.key for case in cases] == [case.key for case in draw_cases(SMALL)]
    assert len(cases) == 14
    assert {case.kind for case in cases} >= {"buckets", "free"}
    for case in cases:
        assert case.plan.semantics == "exact"
        assert compile_plan(case.plan, case.workload, case.cluster).world_size == 4
        assert all(link.latency == 0 and link.bandwidth <= SMALL.fastest_link for link in case.cluster.links)


def test_no_plan_is_drawn_twice() -> None:
    cases = draw_cases(SMALL.model_copy(update={"cases": 60, "families": ("vgg16",)}))
    assert len({case.key for case in cases}) == len(cases) == 60


def test_plans_whose_steps_would_take_too_long_are_drawn_again() -> None:
    usual = draw_cases(SMALL)
    longest = max(price(usual, lambda _: emulated_hosts()).values())
    hurried = SMALL.model_copy(update={"timeout": 8 * 0.9 * longest})
    short = draw_cases(hurried)
    assert len(short) == len(usual)
    assert {case.key for case in short} != {case.key for case in usual}
    assert max(price(short, lambda _: emulated_hosts()).values()) < 0.95 * longest


def test_another_seed_draws_others() -> None:
    other = draw_cases(SMALL.model_copy(update={"seed": 4}))
    assert {case.key for case in other}.isdisjoint(case.key for case in draw_cases(SMALL))


def test_accuracy_by_hand() -> None:
    accuracy = ReplayAccuracy.of([priced(1.0, 1.1), priced(2.0, 1.6), priced(4.0, 4.0)])
    assert accuracy.median == pytest.approx(0.1)
    assert accuracy.bias == pytest.approx(0.0)
    assert accuracy.p90 == pytest.approx(0.18)
    assert accuracy.tau == pytest.approx(1.0)


def test_order_is_judged_within_one_workload_on_one_cluster() -> None:
    found = [priced(1.0, 3.0), priced(2.0, 2.0), priced(3.0, 1.0), priced(9.0, 9.0, "two"), priced(8.0, 8.0, "two")]
    assert ReplayAccuracy.of(found).tau == pytest.approx(-1.0)
    assert by(found, lambda one: one.case.family)["two"].tau is None


def test_plans_that_noise_hides_have_no_order_to_predict() -> None:
    # Of six pairs one differs by 1%, where the error of the difference is 1.4%; it is the only one in the wrong order.
    found = [priced(m, p, noise=0.01) for m, p in ((1.0, 1.0), (1.01, 0.99), (2.0, 2.0), (4.0, 4.0))]
    accuracy = ReplayAccuracy.of(found)
    assert accuracy.tau == pytest.approx(4 / 6)
    assert accuracy.tau_apart == pytest.approx(1.0)
    assert accuracy.within_noise == pytest.approx(1 / 6)
    # Where noise does not hide it, a wrong order counts; equal predictions are half right.
    sharp = ReplayAccuracy.of([priced(1.0, 1.0), priced(1.01, 0.99), priced(2.0, 2.0), priced(4.0, 2.0)])
    assert (sharp.tau_apart, sharp.within_noise) == (pytest.approx((4 - 1 + 0) / 6), 0.0)


def test_nothing_is_said_of_the_order_of_plans_all_alike() -> None:
    accuracy = ReplayAccuracy.of(
        [priced(1.0, 1.0, noise=0.5), priced(1.1, 1.2, noise=0.5), priced(1.2, 1.3, noise=0.5)]
    )
    assert (accuracy.tau, accuracy.tau_apart, accuracy.within_noise) == (pytest.approx(1.0), None, 1.0)
    alone = ReplayAccuracy.of([priced(1.0, 1.0)])
    assert (alone.tau, alone.tau_apart, alone.within_noise) == (None, None, None)


def test_the_least_tau_of_a_workload_on_a_cluster_is_told() -> None:
    right = [priced(1.0, 1.0), priced(2.0, 2.0), priced(3.0, 3.0)]
    wrong = [priced(1.0, 2.0, "two"), priced(2.0, 1.0, "two"), priced(3.0, 3.0, "two")]
    pairs = by([*right, *wrong, priced(1.0, 1.0, "three")], lambda one: one.case.pair)
    assert {name: accuracy.tau for name, accuracy in pairs.items()} == {
        f"{CLUSTER.name}, one": pytest.approx(1.0),
        f"{CLUSTER.name}, two": pytest.approx(1 / 3),
        f"{CLUSTER.name}, three": None,
    }
    both, apart = order_lines(pairs)
    assert both == f"Kendall tau, by cluster and workload: lowest 0.33 ({CLUSTER.name}, two), 1 of 2 below 0.8"
    assert apart.endswith(f"lowest 0.33 ({CLUSTER.name}, two), 1 of 2 below 0.8")
    assert order_lines(by([priced(1.0, 1.0)], lambda one: one.case.pair))[0].endswith("same workload and cluster")


def test_measurements_are_read_up_to_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    assert load_measurements(path) == {}
    path.write_text(
        '{"key": "a", "steps": [[1.0, 3.0, 2.0], [1.5, 1.5, 1.5]], "foreign_cores": null, '
        '"scheduling": "batch", "warm_up": 2}\n{"key": "b"'
    )
    found = load_measurements(path)
    assert list(found) == ["a"]
    assert found["a"].seconds == 1.75
    # The means of the ranks are 1.25, 1.75 and 2.25 s, a deviation of 0.5 s from their median.
    assert found["a"].noise == pytest.approx(1.4826 * 1.2533 * 0.5 / 3**0.5 / 1.75)
    with pytest.raises(DocumentError, match="made with scheduling=batch warm_up=2, but"):
        measure_cases([], ValidationSettings.parse({"scheduling": "none"}), path)
    path.write_text("not a measurement\n")
    with pytest.raises(DocumentError, match=r"measurements.jsonl:1: not a measurement"):
        load_measurements(path)


def test_two_processes_do_not_measure_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    with (
        held_elsewhere(tmp_path / ".measurements.jsonl.lock"),
        pytest.raises(DocumentError, match=r"measurements\.jsonl: another process is adding runs to it"),
    ):
        measure_cases([], SMALL, path)
    assert measure_cases([], SMALL, path) == {}

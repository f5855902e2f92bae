"""`autosync converge` for real: three workers, short trainings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.group_averages import compare as compare_groups

from lightning_autosync.cli.converge import converge
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.lab.convergence.comparison import compare
from lightning_autosync.lab.convergence.result import ConvergenceResult
from lightning_autosync.lab.convergence.settings import ConvergenceSettings
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.workers import LaunchError

WORKERS = 3
METHODS: dict[str, Any] = {
    "all_reduce": {},
    "ddp": {"kind": "ddp"},
    "zero": {"kind": "zero"},
    "synchronous_ps": {"builder": "byteps", "consistency": {"mode": "synchronous", "served": True}},
    "central": {"builder": "ps", "consistency": {"mode": "synchronous", "served": True}},
    "ssp": {"builder": "ps", "consistency": {"mode": "bounded_staleness", "staleness": 2}},
    "whole_groups": {"consistency": {"mode": "partial_reduce", "group_size": 3, "weighting": "constant"}},
    "pairs": {"builder": "partial_reduce"},
    "local_sgd": {"builder": "periodic", "arguments": {"period": 4}},
}
STEPS = 8


TOLD: list[tuple[int, int]] = []
"""What was reported of the progress."""


@pytest.fixture(scope="module")
def fixed() -> ConvergenceResult:
    """The same few steps by every method."""
    speeds: dict[str, Any] = {"equal": []}
    common = {"workers": WORKERS, "speeds": speeds, "seeds": 1, "interval": 0.01}
    return compare(
        ConvergenceSettings.parse(
            {"task": {"kind": "digits"}, "methods": METHODS, "rates": [0.05], "steps": STEPS, "momentum": 0.0, **common}
        ),
        lambda done, total, text: TOLD.append((done, total)),
    )


def test_all_take_their_steps_and_are_judged(fixed):
    for name in METHODS:
        (run,) = fixed.of(name, "equal")
        assert run.steps == [STEPS] * WORKERS
        assert run.moments == sorted(run.moments)
        assert len(run.moments) == len(run.scores)
        assert all(0 <= score <= 100 for score in run.scores)
    assert [done for done, _ in TOLD] == list(range(1, len(METHODS) + 1))
    assert {total for _, total in TOLD} == {len(METHODS)}


def test_methods_that_are_the_same_find_the_same(fixed):
    """With plain SGD, averaging the models of all after each step is averaging gradients."""
    finals = {name: fixed.of(name, "equal")[0].final for name in METHODS}
    for name in ("ddp", "zero", "synchronous_ps", "central", "whole_groups"):
        assert finals[name] == pytest.approx(finals["all_reduce"], abs=0.6), name
    assert fixed.of("all_reduce", "equal")[0].scores[0] == fixed.of("pairs", "equal")[0].scores[0]


def test_traffic(fixed):
    found = {name: fixed.summary(name, "equal") for name in METHODS}
    sent = {name: summary.sent for name, summary in found.items()}
    if None in sent.values():
        pytest.skip("the kernel does not count bytes here")
    for name in ("all_reduce", "ddp", "whole_groups"):
        for size in fixed.of(name, "equal")[0].sent:
            assert size == pytest.approx(fixed.ring_bytes, rel=0.35), name
    assert sent["local_sgd"] < 0.4 * sent["all_reduce"]
    # The one server sends the model to both others, and they a gradient each.
    assert found["central"].sent_most == pytest.approx(2 * sent["central"], rel=0.35)


def test_groups_are_kept(fixed):
    (run,) = fixed.of("whole_groups", "equal")
    assert run.groups.formed == STEPS
    (run,) = fixed.of("pairs", "equal")
    assert run.groups.formed > STEPS  # each has two of three ranks
    assert fixed.of("all_reduce", "equal")[0].groups is None
    assert fixed.summary("pairs", "equal").bridging == run.groups.bridging / run.groups.formed


@pytest.mark.parametrize("size", [2, 3])
def test_the_mesh_and_cached_groups_average_alike(pool, size: int):
    """What the measurement of both checks as it goes."""
    assert all(mesh > 0 and gloo > 0 for mesh, gloo in compare_groups(pool, size, 0.1, 4, f"groups-of-{size}"))


@pytest.mark.slow
@pytest.mark.root
def test_behind_emulated_links():
    try:
        netns.require_namespaces()
    except LaunchError as error:
        pytest.skip(str(error))
    cluster = ClusterSpec.star(["200 Mbit/s", "100 Mbit/s", "100 Mbit/s"])
    methods = {name: METHODS[name] for name in ("all_reduce", "ddp", "central", "pairs")}
    settings = {
        "task": {"kind": "digits"},
        "launch": {"kind": "emulated"},
        "cluster": cluster.to_dict(),
        "workers": 3,
        "methods": methods,
        "speeds": {"slow": [{"ranks": [2], "factor": 2.0}]},
        "pace": 0.01,
        "rates": [0.05],
        "steps": 4,
        "momentum": 0.0,
        "seeds": 1,
    }
    found = compare(ConvergenceSettings.parse(settings))
    assert found.document().emulated == {"compute": True, "links": True}
    for name in methods:
        (run,) = found.of(name, "slow")
        assert run.steps == [4, 4, 4]
    assert found.of("ddp", "slow")[0].final == pytest.approx(found.of("all_reduce", "slow")[0].final, abs=0.6)


@pytest.fixture(scope="module")
def stragglers(tmp_path_factory) -> dict[str, Any]:
    """What a comparison with one slow worker left."""
    directory = tmp_path_factory.mktemp("converge")
    methods = {name: METHODS[name] for name in ("all_reduce", "zero", "synchronous_ps", "pairs")}
    converge(
        {
            "task": {"kind": "digits"},
            "workers": WORKERS,
            "methods": methods,
            "speeds": {"slow": [{"ranks": [2], "factor": 5.0}]},
            "pace": 0.02,
            "limit": 2.0,
            "target": 30.0,
            "patience": 2,
            "rates": [0.05, 0.1],
            "seeds": 1,
        },
        directory,
    )
    assert (directory / "result.png").stat().st_size > 1000
    document: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return document


@pytest.mark.slow
def test_only_those_that_march_in_step_wait_for_the_slow_one(stragglers):
    steps = {run["method"]: run["steps"] for run in stragglers["runs"]}
    assert len(set(steps["all_reduce"])) == 1
    assert max(steps["pairs"][:2]) > 1.5 * steps["pairs"][2]
    sums = stragglers["summaries"]["slow"]
    assert sums["pairs"]["steps"] > 1.2 * sums["all_reduce"]["steps"]


@pytest.mark.slow
def test_rates_are_chosen_from_the_grid_by_other_seeds(stragglers):
    assert set(stragglers["rates"].values()) <= {0.05, 0.1}
    assert {run["rate"] for run in stragglers["tuning"]} == {0.05, 0.1}
    assert not {run["seed"] for run in stragglers["tuning"]} & {run["seed"] for run in stragglers["runs"]}
    for run in stragglers["runs"]:
        assert run["rate"] == stragglers["rates"][run["method"]]


@pytest.mark.slow
def test_optimizer_state_is_whole_or_dealt_out(stragglers):
    state = {name: summary["state_most"] for name, summary in stragglers["summaries"]["slow"].items()}
    model = stragglers["model_bytes"]
    assert state["all_reduce"] == state["pairs"] == model
    assert state["zero"] < model
    assert state["synchronous_ps"] < 0.4 * model

"""The costs of a job's hosts, scaled by the speed of small work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_autosync.measure.conditions import usable_cores
from lightning_autosync.measure.probe import hosts
from lightning_autosync.replay import Constants

Rank = tuple[str, list[int], list[float] | None]
"""A rank's machine, its cores, and its seconds of small work and rates of memory."""
USUAL = hosts.REFERENCE


def constants(*ranks: Rank, restarts: Sequence[bool] = ()) -> Constants:
    """The constants if ranks measure this, and their kernels' windows restart."""
    found = [(*rank, restart) for rank, restart in zip(ranks, restarts or [True] * len(ranks), strict=True)]
    with mock.patch.object(hosts, "gather_json", return_value=found), mock.patch.object(hosts.dist, "barrier"):
        return hosts.host_constants()


@pytest.mark.parametrize("work", [[USUAL, 1e9, 1e9], None])
@pytest.mark.parametrize("restarts", [(False, False), (False, True)])
def test_windows_restart_if_those_of_one_rank_do(restarts: tuple[bool, bool], work: list[float] | None) -> None:
    assert constants(("a", [0], work), ("b", [0], work), restarts=restarts).restarts is any(restarts)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_costs_grow_with_the_time_of_small_work(factor: float) -> None:
    found, known = constants(("a", [0], [factor * USUAL, 1e9, 2e9])), Constants()
    for name, cost in hosts.COSTS.items():
        assert getattr(found, name) == pytest.approx(factor * cost)
    assert found.scan_rate == pytest.approx(known.scan_rate / factor)
    assert found.merge_cost == pytest.approx(factor * known.merge_cost)
    assert found.encode.int8 / known.encode.int8 == pytest.approx(found.decode.fp16 / known.decode.fp16)
    assert found.encode.int8 < known.encode.int8 or factor < 1
    assert (found.copy_rate, found.reduce_rate) == (1e9, 2e9)


def test_the_slowest_machine_counts_with_the_mean_of_its_ranks() -> None:
    slow = ("slow", [0], [2 * USUAL, 1e9, 1e9]), ("slow", [0], [4 * USUAL, 3e9, 1e9])
    found = constants(("fast", [0], [USUAL, 9e9, 9e9]), *slow)
    assert found.gradient_cost == pytest.approx(3 * hosts.COSTS["gradient_cost"])
    assert (found.copy_rate, found.reduce_rate) == (2e9, 1e9)


def test_cores_are_shared_by_the_ranks_of_one_machine_only() -> None:
    work = [USUAL, 1e9, 1e9]
    assert constants(("a", [0, 1], work), ("a", [0, 1], work)).cores == 2
    assert constants(("a", [0], work), ("a", [1], work), ("a", [2], work)).cores == 3  # each rank has its own core
    assert constants(("a", [0, 1], work), ("b", [0, 1], work)).cores is None
    assert constants(("a", [0, 1], work)).cores is None


@pytest.mark.parametrize("measured", [None, [0.0, 1e9, 1e9]], ids=["a fault", "a clock that ticks coarsely"])
def test_a_rank_that_cannot_measure_gives_all_the_defaults(measured: list[float] | None) -> None:
    found = constants(("a", [0, 1], [USUAL, 1e9, 1e9]), ("a", [0, 1], measured))
    assert found == Constants(cores=2)


@pytest.mark.parametrize(
    ("ranks", "cores"),
    [
        ([("a", [0, 1])], None),
        ([("a", [0, 1]), ("b", [0, 1])], None),
        ([("a", [0, 1]), ("a", [0, 1])], 2),
        ([("a", [0]), ("a", [1])], 2),
        ([("a", [0, 1]), ("a", [1, 2])], 3),
    ],
)
def test_ranks_of_one_machine_share_its_cores(ranks: list[tuple[str, list[int]]], cores: int | None) -> None:
    with mock.patch.object(hosts, "gather_json", return_value=ranks):
        assert hosts.shared_cores() == cores


@pytest.mark.parametrize("fault", [OSError("no file"), MemoryError(), ZeroDivisionError()], ids=repr)
def test_a_fault_is_no_measurement(fault: Exception) -> None:
    with mock.patch.object(hosts, "_small_work", side_effect=fault):
        assert hosts._measured() is None


def test_one_thread_is_measured() -> None:
    before, seen = torch.get_num_threads(), list[int]()

    def rates(*_: Any) -> Sequence[float]:
        seen.append(torch.get_num_threads())
        return 1e9, 1e9

    torch.set_num_threads(3)
    try:
        with mock.patch.object(hosts, "_memory_rates", rates):
            found = hosts._measured()
        assert seen == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert 1e-6 < found[0] < 0.1


def test_memory_has_a_rate_and_this_rank_has_cores() -> None:
    assert all(1e7 < rate < 1e13 for rate in hosts._memory_rates())
    assert len(hosts._cores()) == usable_cores()

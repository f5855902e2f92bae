"""The costs of a job's hosts, scaled by the speed of small work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from lightning_autosync.measure.conditions import usable_cores
from lightning_autosync.measure.probe import hosts
from lightning_autosync.replay import Constants

MACHINE = "one machine"


def constants(work: float, others: Sequence[Sequence[Any]] = ()) -> Constants:
    """The constants if this rank needs ``work`` core-seconds, beside other ranks' machine, work and memory rates."""
    with (
        mock.patch.object(hosts, "boot_id", return_value=MACHINE),
        mock.patch.object(hosts, "_small_work", return_value=work),
        mock.patch.object(hosts, "gather_json", lambda own: [own, *others]),
        mock.patch.object(hosts.dist, "get_world_size", return_value=1 + len(others)),
    ):
        return hosts.host_constants()


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_costs_grow_with_the_time_of_small_work(factor: float) -> None:
    found = constants(factor * hosts.REFERENCE)
    for name, cost in hosts.COSTS.items():
        assert getattr(found, name) == pytest.approx(factor * cost)


def test_ranks_count_alike() -> None:
    found = constants(hosts.REFERENCE, [[MACHINE, 3 * hosts.REFERENCE, 1e9, 3e9]])
    assert found.gradient_cost == pytest.approx(2 * hosts.COSTS["gradient_cost"])


def test_cores_are_shared_by_the_ranks_of_one_machine_only() -> None:
    other = [hosts.REFERENCE, 1e9, 1e9]
    assert constants(hosts.REFERENCE, [[MACHINE, *other]]).cores == usable_cores()
    assert constants(hosts.REFERENCE, [["another machine", *other]]).cores is None
    assert constants(hosts.REFERENCE).cores is None


def test_each_cost_is_a_field_whose_default_is_of_the_same_order() -> None:
    for name, cost in hosts.COSTS.items():
        default = getattr(Constants(), name)
        assert default == 0 or name == "message_delay" or 1 / 10 < cost / default < 10


def test_the_work_takes_time_and_memory_has_a_rate() -> None:
    assert 1e-6 < hosts._small_work() < 0.1
    assert all(1e7 < rate < 1e13 for rate in hosts._memory_rates())

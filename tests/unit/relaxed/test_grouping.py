"""Which workers average together, how often sets of them are connected, and how much each counts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import crossed, examples

from lightning_autosync.lab.convergence.isolation import SimulatedGroups, simulate
from lightning_autosync.relaxed.grouping import (
    BOUND,
    Grouping,
    IsolationGuard,
    constant_weights,
    dynamic_weights,
    sample_weights,
    unconnected_windows,
)

GROUPS = 1000
EXCHANGE = 0.05


def _steady(rng: random.Random, mean: float) -> Callable[[], float]:
    return lambda: mean * rng.uniform(0.98, 1.02)


def _pausing(rng: random.Random, mean: float) -> Callable[[], float]:
    return lambda: mean * rng.uniform(0.98, 1.02) + (rng.expovariate(1 / 3) if rng.random() < 0.1 else 0.0)


def _workers(setting: str, count: int, seed: int = 0) -> list[Callable[[], float]]:
    rng = random.Random(seed)
    match setting:
        case "equal":
            return [_steady(rng, 1.0) for _ in range(count)]
        case "identical":
            return [lambda: 1.0 for _ in range(count)]
        case "one 4x slower":
            return [_steady(rng, 4.0 if rank == 0 else 1.0) for rank in range(count)]
        case "random pauses":
            return [_pausing(rng, 1.0) for _ in range(count)]
        case "half 2x slower":
            return [_steady(rng, 2.0 if rank < count // 2 else 1.0) for rank in range(count)]
    raise AssertionError(setting)


def _unconnected_windows(found: SimulatedGroups, count: int) -> int:
    """How many windows of twice the bound leave workers unconnected."""
    window = 2 * BOUND * count
    members = [group.members for group in found.groups]
    unconnected, end, models = 0, 0, 0
    for begin in range(len(members)):
        while end < len(members) and models < window:
            models += len(members[end])
            end += 1
        if models < window:
            break
        graph = networkx.Graph()
        graph.add_nodes_from(range(count))
        for group in members[begin:end]:
            networkx.add_path(graph, group)
        unconnected += not networkx.is_connected(graph)
        models -= len(members[begin])
    return unconnected


SETTINGS = ["equal", "identical", "one 4x slower", "random pauses", "half 2x slower"]


@pytest.mark.parametrize(("setting", "size", "count"), crossed(SETTINGS, [*itertools.product([2, 3, 4], [4, 8])]))
def test_every_window_of_twice_the_bound_connects_all_workers(setting: str, size: int, count: int) -> None:
    found = simulate(Grouping(size), _workers(setting, count), GROUPS, EXCHANGE)
    assert _unconnected_windows(found, count) == 0
    assert found.bridging < 0.05


@pytest.mark.parametrize("setting", ["equal", "half 2x slower"])
def test_without_the_guard_workers_stay_apart(setting: str) -> None:
    found = simulate(Grouping(2, isolation=IsolationGuard(None)), _workers(setting, 4), GROUPS, EXCHANGE)
    assert _unconnected_windows(found, 4) > 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_guard_costs_little_time(setting: str) -> None:
    guarded = simulate(Grouping(2), _workers(setting, 8), GROUPS, EXCHANGE)
    free = simulate(Grouping(2, isolation=IsolationGuard(None)), _workers(setting, 8), GROUPS, EXCHANGE)
    assert guarded.idle - free.idle < 0.08


def test_a_wait_spares_a_size_that_does_not_divide_the_number_of_workers() -> None:
    full = simulate(Grouping(3), _workers("equal", 4), GROUPS, EXCHANGE)
    elastic = simulate(Grouping(3, wait=0.05), _workers("equal", 4), GROUPS, EXCHANGE)
    assert full.idle > 0.15
    assert elastic.idle < full.idle / 2
    assert _unconnected_windows(elastic, 4) == 0


@examples()
@given(
    count=st.integers(2, 9),
    size=st.integers(2, 6),
    wait=st.sampled_from([None, 0.0, 0.3, 2.0]),
    speeds=st.lists(st.floats(0.5, 8), min_size=9, max_size=9),
    seed=st.integers(0, 99),
)
def test_any_mix_of_speeds_stays_connected(
    count: int, size: int, wait: float | None, speeds: list[float], seed: int
) -> None:
    rng = random.Random(seed)
    workers = [_steady(rng, speeds[rank]) for rank in range(count)]
    found = simulate(Grouping(min(size, count), wait), workers, 40 * count, EXCHANGE)
    assert _unconnected_windows(found, count) == 0
    assert all(len(set(group.members)) == len(group.members) for group in found.groups)


def test_first_come_first_served() -> None:
    grouping = Grouping(2)
    for moment, rank in enumerate([3, 1, 0]):
        grouping.add(rank, moment)
    group = grouping.take(range(4), 3.0)
    assert group is not None
    assert group.members == (3, 1)
    assert grouping.take(range(4), 3.0) is None
    assert grouping.waiting == (0,)


def test_a_lone_active_worker_goes_on_at_once() -> None:
    grouping = Grouping(3)
    grouping.add(2, 0.0)
    assert grouping.take([1, 2], 0.0) is None
    group = grouping.take([2], 0.0)
    assert group is not None
    assert group.members == (2,)


def test_a_deadline_closes_a_group_that_is_not_full() -> None:
    grouping = Grouping(3, wait=0.5)
    grouping.add(0, 1.0)
    grouping.add(2, 1.2)
    assert grouping.deadline(1.2) == 1.5
    assert grouping.take(range(4), 1.4) is None
    group = grouping.take(range(4), 1.5)
    assert group is not None
    assert group.members == (0, 2)


def test_a_bridging_group_waits_and_may_be_larger() -> None:
    grouping = Grouping(2, wait=0.1, isolation=IsolationGuard(1))
    for rank in (0, 1):
        grouping.add(rank, 0.0)
    assert grouping.take(range(6), 0.0) is not None
    for rank in (2, 3):
        grouping.add(rank, 1.0)
    assert grouping.take(range(6), 1.0) is not None
    for moment, rank in enumerate([3, 2, 1, 5], start=2):
        grouping.add(rank, moment)
        assert grouping.take(range(6), moment + 50.0) is None
    grouping.add(4, 9.0)
    group = grouping.take(range(6), 9.0)
    assert group is not None
    assert group.bridging
    assert group.members == (3, 1, 5, 4)


@examples()
@given(data=st.data())
def test_the_guard_continues_from_its_state(data: st.DataObject) -> None:
    guard, again = IsolationGuard(3), IsolationGuard(3)
    groups = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), max_size=12))
    for number, members in enumerate(groups):
        guard.record(number, members, range(6))
        again.restore(**guard.state())  # type: ignore[arg-type]
    apart = {(a, b) for a in range(6) for b in range(6) if guard.component(a) != guard.component(b)}
    assert apart == {(a, b) for a in range(6) for b in range(6) if again.component(a) != again.component(b)}
    assert again.state() == guard.state()


@examples()
@given(
    groups=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), max_size=12),
    broken=st.lists(st.integers(0, 12), max_size=6),
)
def test_groups_that_broke_have_joined_nobody(groups: list[list[int]], broken: list[int]) -> None:
    """Whenever that becomes known, and however often it is told."""
    guard, expected = IsolationGuard(100), IsolationGuard(100)
    for number, members in enumerate(groups):
        guard.record(number, members, range(6))
        if number not in broken:
            expected.record(number, members, range(6))
    for number in broken:
        guard.retract(number)
    assert _parts(guard) == _parts(expected)
    assert guard.state()["models"] == expected.state()["models"]


def _parts(guard: IsolationGuard) -> set[frozenset[int]]:
    return {
        frozenset(other for other in range(6) if guard.component(other) == guard.component(rank)) for rank in range(6)
    }


def test_a_window_goes_on_if_a_group_of_it_broke_after_its_end() -> None:
    guard, workers = IsolationGuard(2), range(3)
    for number, members in enumerate([(0, 1), (0, 1), (1, 2)]):
        guard.record(number, members, workers)
    assert not guard.must_bridge(workers, 2)
    guard.record(3, (0, 1), workers)
    guard.retract(2)
    assert guard.must_bridge(workers, 2)
    assert guard.component(0) == guard.component(1) != guard.component(2)
    guard.record(4, (0, 2), workers)
    assert not guard.must_bridge(workers, 2)


@pytest.mark.parametrize("bound", [BOUND, None])
@pytest.mark.parametrize("setting", SETTINGS)
def test_windows_apart_are_found_as_networkx_finds_them(setting: str, bound: int | None) -> None:
    found = simulate(Grouping(2, isolation=IsolationGuard(bound)), _workers(setting, 4), GROUPS, EXCHANGE)
    unconnected, windows = unconnected_windows([group.members for group in found.groups], 4)
    assert unconnected == _unconnected_windows(found, 4)
    if bound is None:  # all groups are pairs
        assert windows == GROUPS - BOUND * 4 + 1


ITERATIONS = st.lists(st.integers(0, 400), min_size=1, max_size=12)


@given(iterations=ITERATIONS, decay=st.floats(0.05, 0.99))
def test_dynamic_weights_sum_to_one_and_never_grow_with_age(iterations: list[int], decay: float) -> None:
    weights = dynamic_weights(iterations, decay)
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)
    assert all(weight >= 0 for weight in weights)
    by_age = sorted(zip(iterations, weights, strict=True), reverse=True)
    for (newer, heavy), (older, light) in itertools.pairwise(by_age):
        assert light == heavy if newer == older else light <= heavy + 1e-15


@given(lag=st.integers(0, 300), more=st.integers(1, 30))
def test_in_a_pair_falling_further_behind_costs_weight(lag: int, more: int) -> None:
    assert dynamic_weights([400, 400 - lag - more])[1] < dynamic_weights([400, 400 - lag])[1] + 1e-15


@given(shift=st.integers(0, 1000), iterations=ITERATIONS)
def test_only_differences_count(shift: int, iterations: list[int]) -> None:
    assert dynamic_weights([k + shift for k in iterations]) == dynamic_weights(iterations)


def test_ages_in_order_follow_the_moving_average() -> None:
    # One member an age: masses 0.1, 0.09, 0.081 over 1 - 0.9 ** 3.
    assert dynamic_weights([5, 4, 3]) == pytest.approx([0.1 / 0.271, 0.09 / 0.271, 0.081 / 0.271])
    # Nobody is two iterations behind: that mass goes to the newest.
    assert dynamic_weights([5, 3]) == pytest.approx([0.19 / 0.271, 0.081 / 0.271])


def test_a_lone_stale_member_does_not_outweigh_fresh_ones() -> None:
    # Left as published, 0.263, 0.263, 0.474.
    assert dynamic_weights([8, 8, 7]) == pytest.approx([1 / 3] * 3)


def test_equal_iterations_are_constant_weights() -> None:
    assert dynamic_weights([7] * 4) == constant_weights(4) == [0.25] * 4


def test_samples_count_in_proportion() -> None:
    assert sample_weights([30, 10, 0]) == [0.75, 0.25, 0.0]
    assert sample_weights([0, 0]) == [0.5, 0.5]

"""A pass over the data is dealt out once, whoever asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.strategy.shared_data import SharedSampler, SharedWork


def all_sides(workers: int) -> list[SharedWork]:
    """Each rank's side; the dealer is asked without a message."""
    mesh: Any = SimpleNamespace(rank=0, subscribe=lambda kind, handler: lambda: None)
    sides = [SharedWork(cast(Mesh, mesh), workers, timeout=1.0)]
    for rank in range(1, workers):
        sides.append(SharedWork(cast(Mesh, SimpleNamespace(rank=rank)), workers, timeout=1.0))
        sides[rank].take = sides[0].take  # type: ignore[method-assign]
    return sides


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9), st.integers(0, 80))
def test_every_position_is_dealt_at_most_once_and_in_order(length: int, workers: int, count: int, asked: int) -> None:
    sides = all_sides(workers)
    dealt = [position for side in sides for position in side.first(length, count)]
    dealt += [position for _ in range(asked) for position in sides[0].take(0, length, count)]
    assert dealt == list(range(min(length, (workers + asked) * count)))


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_who_comes_last_still_gets_its_first_portion(length: int, workers: int, count: int) -> None:
    sides = all_sides(workers)
    while sides[0].take(0, length, count):
        pass
    got = [len(side.first(length, count)) for side in sides]
    assert sum(got) == min(length, workers * count)
    assert all(got) is (length > (workers - 1) * count)


def test_passes_are_apart_and_old_ones_forgotten() -> None:
    (work,) = all_sides(1)
    assert work.take(0, 8, 3) == range(3, 6)
    assert work.take(1, 8, 3) == range(3, 6)
    assert work.take(0, 8, 3) == range(6, 8)
    work.take(2, 8, 1)
    assert work._next.keys() == {1, 2}


def test_two_samplers_make_one_pass_in_a_common_order() -> None:
    samplers = [SharedSampler(side, 20, 3, shuffle=True, seed=4) for side in all_sides(2)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        iterators = [iter(sampler) for sampler in samplers]
        seen = [index for _ in range(10) for iterator in iterators for index in [next(iterator, None)]]
        seen += [index for iterator in iterators for index in iterator]
        assert sorted(index for index in seen if index is not None) == list(range(20))
    assert seen[:20] != sorted(seen[:20], key=str)

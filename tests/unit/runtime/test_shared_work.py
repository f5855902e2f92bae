"""A pass over the data is dealt out once, whoever asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from lightning_autosync.runtime.relaxed.mesh import Mesh
from lightning_autosync.runtime.relaxed.work import SharedWork
from lightning_autosync.strategy.shared_data import SharedSampler


def dealer() -> SharedWork:
    """The dealing rank's own side, which needs no messages."""
    mesh: Any = SimpleNamespace(rank=0, subscribe=lambda kind, handler: lambda: None)
    return SharedWork(cast(Mesh, mesh), timeout=1.0)


@given(st.integers(1, 60), st.lists(st.integers(1, 9), min_size=1, max_size=80))
def test_every_position_is_dealt_at_most_once_and_in_order(length: int, wishes: list[int]) -> None:
    work = dealer()
    dealt = [position for wish in wishes for position in work.take(0, length, wish)]
    assert dealt == list(range(min(length, sum(wishes))))


def test_passes_are_apart_and_old_ones_forgotten() -> None:
    work = dealer()
    assert work.take(0, 5, 3) == range(3)
    assert work.take(1, 5, 3) == range(3)
    assert work.take(0, 5, 3) == range(3, 5)
    work.take(2, 5, 1)
    assert work._next.keys() == {1, 2}


def test_two_samplers_make_one_pass_in_a_common_order() -> None:
    work = dealer()
    samplers = [SharedSampler(work, 20, 3, shuffle=True, seed=4) for _ in range(2)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        iterators = [iter(sampler) for sampler in samplers]
        seen = [index for _ in range(10) for iterator in iterators for index in [next(iterator, None)]]
        seen += [index for iterator in iterators for index in iterator]
        assert sorted(index for index in seen if index is not None) == list(range(20))
    assert seen[:20] != sorted(seen[:20], key=str)

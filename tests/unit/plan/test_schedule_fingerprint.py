"""The fingerprint by which ranks tell that they compiled the same schedule."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from clusters import shared_nodes
from hypothesis import given
from hypothesis import strategies as st
from plans import plans
from sweeps import examples
from test_plans import WORKLOAD

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import digest
from lightning_autosync.plan import Schedule, builders, compile_plan
from lightning_autosync.plan.schedule import Transfer

DENSE = WORKLOAD.model_copy(update={"variables": WORKLOAD.variables[:5]})


def by_fields(schedule: Schedule) -> str:
    """The digest of every field of every part."""
    return digest([asdict(message) | {"compressor": message.compressor.model_dump()} for message in schedule.messages])


@examples(40)
@given(st.data())
def test_it_is_the_digest_of_all_fields(data: st.DataObject) -> None:
    workload, lossy = data.draw(st.sampled_from([(WORKLOAD, False), (DENSE, True)]))
    size = data.draw(st.integers(2, 6))
    schedule = compile_plan(data.draw(plans(workload, size, lossy=lossy)), workload, shared_nodes(size))
    assert schedule.fingerprint == by_fields(schedule)


@pytest.mark.parametrize("builder", ["all_reduce", "byteps", "hierarchical", "packed_trees", "shared_memory"])
def test_no_kind_of_transfer_is_left_out(builder: str) -> None:
    cluster = ClusterSpec.uniform(nodes=1, devices=4) if builder == "shared_memory" else shared_nodes(4)
    schedule = compile_plan(builders.build(builder, DENSE, cluster), DENSE, cluster)
    assert schedule.fingerprint == by_fields(schedule)


def test_a_change_in_a_tree_is_seen() -> None:
    schedule = compile_plan(builders.packed_trees(DENSE, shared_nodes(4)), DENSE, shared_nodes(4))
    first = replace(schedule.messages[0].rounds[0].transfers[0], second_root=-1)
    changed = replace(first, broadcast=replace(first.broadcast, parents=_other(first.broadcast.parents)))
    assert len({_with(schedule, transfer).fingerprint for transfer in (first, changed)}) == 2


def test_a_second_root_is_seen() -> None:
    schedule = compile_plan(builders.packed_trees(DENSE, shared_nodes(4)), DENSE, shared_nodes(4))
    first = schedule.messages[0].rounds[0].transfers[0]
    assert first.second_root >= 0
    assert _with(schedule, replace(first, second_root=-1)).fingerprint != schedule.fingerprint


def _with(schedule: Schedule, transfer: Transfer) -> Schedule:
    """The schedule with another first transfer of its first message."""
    message = schedule.messages[0]
    first, *others = message.rounds
    rounds = replace(first, transfers=(transfer, *first.transfers[1:])), *others
    return replace(schedule, messages=(replace(message, rounds=rounds), *schedule.messages[1:]))


def _other(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Another tree with the same root: a chain, or, of a chain, a star."""
    root = parents.index(-1)
    ranks = [root, *(rank for rank in range(len(parents)) if rank != root)]
    chain = [-1] * len(parents)
    for parent, rank in pairwise(ranks):
        chain[rank] = parent
    star = tuple(-1 if rank == root else root for rank in range(len(parents)))
    return star if tuple(chain) == parents else tuple(chain)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying every rank of every tree took longer than everything else at the start of a job."""
    schedule = compile_plan(builders.packed_trees(DENSE, shared_nodes(4)), DENSE, shared_nodes(4))
    expected = by_fields(schedule)

    def refuse(value: Any, *_: Any) -> Any:
        raise AssertionError(f"copied: {value!r}")

    monkeypatch.setattr(copy, "deepcopy", refuse)
    assert schedule.fingerprint == expected

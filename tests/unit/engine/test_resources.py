"""The resources of an engine: they are opened in pieces, and notes have a place behind one message."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from collective_traffic import pretended_job
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import collectives, resources
from lightning_autosync.engine.resources import Resources
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.workload import Variable, Workload

PAIR = ClusterSpec.uniform(2, name="pair")
NAMES = ("a", "b", "c")


def resources_of(dtype: torch.dtype = torch.float32, numel: int = 100, **options: Any) -> Resources:
    """Resources for three parameters, each with a message of its own."""
    name = str(dtype).removeprefix("torch.")
    workload = Workload(name="three", variables=tuple(Variable(name=one, shape=(numel,), dtype=name) for one in NAMES))
    schedule = compile_plan(builders.all_reduce(workload, PAIR, bucket_bytes=8, first_bucket_bytes=8), workload, PAIR)
    parameters = {one: nn.Parameter(torch.ones(numel, dtype=dtype)) for one in NAMES}
    alike = mock.Mock(side_effect=lambda own, group: [own, own])
    with (
        pretended_job(2, rank=1),
        mock.patch.object(resources, "gather_json", alike),
        mock.patch.object(collectives, "gather_json", alike),
    ):
        return Resources(parameters, schedule, None, PAIR, 10.0, watched=True, **options)


def test_work_on_each_message_is_followed_by_a_rest() -> None:
    rests = list[int]()
    made = resources_of(rest=lambda: rests.append(1))
    assert len(made.gradients) == len(NAMES)
    assert len(rests) >= len(NAMES)


@pytest.mark.parametrize("notes", [0, 5])
def test_large_memory_is_taken_in_pieces_with_rests_between(notes: int) -> None:
    rests = list[int]()
    made = resources_of(numel=1 << 20, notes=notes, rest=lambda: rests.append(1))
    assert len(rests) >= 4 * len(NAMES)  # 4 MiB each
    assert all(not one._buffer.any() for one in made.gradients)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dtype", "notes", "carried"), [(torch.float32, 5, True), (torch.bfloat16, 5, False), (torch.float32, 0, False)]
)
def test_notes_travel_behind_the_first_message_that_can_carry_them(
    dtype: torch.dtype, notes: int, carried: bool
) -> None:
    made = resources_of(dtype, notes=notes)
    assert (made.notes is not None) == carried
    sizes = [sum(part.numel() for part in one.exchange._ranges) for one in made.gradients]  # type: ignore[union-attr]
    own = 100 + 1  # with the count of gradients
    assert sizes == [own + 2 * notes * carried, own, own]
    assert all(one._buffer.numel() == own for one in made.gradients)  # type: ignore[attr-defined]

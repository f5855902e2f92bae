"""Calls in workers: values of all ranks, or of the first one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

from lightning_autosync.engine.collectives import broadcast_json, gather_json, new_group


def exchange(sizes: list[int]) -> list[Any]:
    """What this rank gathers, and what the first rank broadcasts, if texts have so many characters by rank."""
    own = {"rank": dist.get_rank(), "text": "ü" * sizes[dist.get_rank()]}
    return [gather_json(own), broadcast_json(own)]


def exchange_in_group(first: int) -> list[Any] | None:
    """The same in a group that begins with rank ``first``, of which the ranks before have no part."""
    ranks = list(range(first, dist.get_world_size()))
    group = new_group(timedelta(seconds=60), ranks)
    try:
        own = dist.get_rank()
        return [gather_json(own, group), broadcast_json(own, group)] if own in ranks else None
    finally:
        if dist.get_rank() in ranks:
            dist.destroy_process_group(group)


def count_collectives(size: int) -> list[int]:
    """Numbers of gathers to one rank and of broadcasts for a text of so many characters on each rank."""
    with (
        mock.patch.object(dist, "gather", wraps=dist.gather) as gathers,
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcasts,
        mock.patch.object(dist, "all_gather", side_effect=AssertionError("it goes around all ranks")),
    ):
        gather_json("x" * size)
    return [gathers.call_count, broadcasts.call_count]

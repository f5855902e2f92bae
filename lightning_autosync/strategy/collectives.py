"""Collective calls that do not go through the strategy, where no other rank would answer them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

NAMES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
)
"""Functions of ``torch.distributed`` that wait for every rank."""


@contextmanager
def refused_collectives(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, this thread's calls of `NAMES` raise ``refusal`` of the call's name; other threads' are made as ever.

    Another rank's next collective call, at any later step, would be taken for the answer.
    """
    own = {name: getattr(dist, name) for name in NAMES}
    thread = threading.get_ident()

    def guarded(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                raise refusal(f"torch.distributed.{name}")
            return own[name](*args, **kwargs)

        return call

    for name in NAMES:
        setattr(dist, name, guarded(name))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(dist, name, function)

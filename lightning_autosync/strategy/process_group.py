"""Torch's default process group, where ranks may be lost and come back: it holds those who met last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_autosync.engine.waiting import Monitor, monitored_by
from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.averaging_worker import Meeting


class Others(NamedTuple):
    """What a rank knows of those with whom it makes collective calls.

    Attributes:
        rank: its own.
        lost: tells which of them are lost, and why.
        tell: lets them know that this rank ends.
        timeout: seconds that they wait for each other.
    """

    rank: int
    lost: Callable[[], Mapping[int, str]]
    tell: Callable[[ExchangeError], None]
    timeout: float


class World:
    """Forms the group anew whenever others meet than did before.

    So what Lightning, metrics and the user ask all ranks at a meeting, all who are there answer, and nobody waits for
    one that is lost.

    Args:
        store: all ranks'; needed as long as the job lasts.
        size: ranks of the job, which the group holds at first, unless this process came back: see `begin_alone`.
        lost: ranks that are lost now, and why; it changes on another thread.
        others: those of the group; their ranks in the job, which are other ones in a group without all.
    """

    def __init__(self, store: dist.Store, size: int, lost: dict[int, str], others: Others) -> None:
        self._lost, self._others = lost, others
        complete = dist.get_world_size() == size
        self._visits = dict.fromkeys(range(size), 1) if complete else {}
        # Each training counts its meetings from one; who comes back takes part in that which its predecessor counted.
        training = store.add(f"world/trainings/{others.rank}", int(complete))
        self._store = dist.PrefixStore(f"world/{training}", store)

    def lost(self) -> dict[int, str]:
        """Ranks of the group that are lost, and why."""
        return {rank: why for rank, why in self._lost.copy().items() if rank in self._visits}

    def follow(self, meeting: Meeting) -> None:
        """Let the group be those who met; all of them call this.

        Raises:
            ExchangeError: one of them did not come in time, for it was lost in this very moment.
        """
        if meeting.visits == self._visits:
            return
        self._visits = meeting.visits
        backend, there = dist.get_backend(), sorted(meeting.visits)
        with told_of_loss("the new process group of those who are there", self._others):
            dist.destroy_process_group()
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(str(meeting.number), self._store),
                rank=there.index(self._others.rank),
                world_size=len(there),
                timeout=timedelta(seconds=self._others.timeout),
            )


def begin_alone(backend: str) -> None:
    """A group of this process alone, for one that came back: until it meets the others, nobody else answers it."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class LossWatch(Monitor):
    """Ends what all who met do together, once one of them is lost.

    Args:
        what: that which errors name.
        others: those who met.
    """

    def __init__(self, what: str, others: Others) -> None:
        self.timeout = others.timeout
        self._what, self._others = what, others

    def check(self) -> None:
        if self._others.lost():
            raise self.explain("")

    def explain(self, cause: str, late: bool = False) -> ExchangeError:
        if not self._await_loss():  # the backend may notice it first
            # Nobody is lost, but a connection is, and who has noticed it ends.
            self._others.tell(ExchangeError(cause))
            cause += f"; the first whose connection failed is rank {self._others.rank}"
            self._await_loss()
        told = "; ".join(f"rank {rank} is lost ({why})" for rank, why in sorted(self._others.lost().items()))
        return ExchangeError(
            f"{self._what} was interrupted ({told or cause}): a rank that is lost while all wait for each other ends "
            "the job; go on from the last checkpoint"
        )

    def _await_loss(self) -> bool:
        deadline = time.monotonic() + self.answer_timeout
        while not self._others.lost() and time.monotonic() < deadline:
            time.sleep(self.answer_timeout / 50)
        return bool(self._others.lost())


@contextmanager
def told_of_loss(what: str, others: Others) -> Iterator[None]:
    """Around a collective call: if a rank is lost, an error that names it and says what to do.

    Args:
        what: that which errors name.
        others: those who make the call.
    """
    watch = LossWatch(what, others)
    try:
        with monitored_by(watch):
            yield
    except ExchangeError:
        raise
    except RuntimeError as cause:
        if not isinstance(cause, dist.DistError) and "gloo" not in str(cause).lower():
            raise
        raise watch.explain(str(cause).splitlines()[0]) from cause


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

"""Torch's default process group, where ranks may be lost and come back: it holds those who met last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lightning_autosync.errors import ExchangeError
from lightning_autosync.runtime.lifeline import Watch, watching
from lightning_autosync.runtime.relaxed.averaging_worker import Meeting


class World:
    """Forms the group anew whenever others meet than did before.

    So what Lightning, metrics and the user ask all ranks at a meeting, all who are there answer, and nobody waits for
    one that is lost.

    Args:
        store: all ranks'; needed as long as the job lasts.
        rank: this process's in the job; in a group without all, it has another.
        size: ranks of the job, which the group holds at first, unless this process came back: see `begin_alone`.
        timeout: seconds that the others may take to form the group, or to answer in it.
        lost: ranks that are lost now, and why; it changes on another thread.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, lost: dict[int, str]) -> None:
        self._rank, self._timeout, self._lost = rank, timedelta(seconds=timeout), lost
        complete = dist.get_world_size() == size
        self._visits = dict.fromkeys(range(size), 1) if complete else {}
        # Each training counts its meetings from one; who comes back takes part in that which its predecessor counted.
        training = store.add(f"world/trainings/{rank}", int(complete))
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
        with told_of_loss("the new process group of those who are there", self.lost, self._timeout.total_seconds()):
            dist.destroy_process_group()
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(str(meeting.number), self._store),
                rank=there.index(self._rank),
                world_size=len(there),
                timeout=self._timeout,
            )


def begin_alone(backend: str) -> None:
    """A group of this process alone, for one that came back: until it meets the others, nobody else answers it."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class LossWatch(Watch):
    """Ends what all who met do together, once one of them is lost.

    Args:
        what: that which errors name.
        lost: tells which of those who met are lost, and why.
        timeout: seconds that they wait for each other.
    """

    def __init__(self, what: str, lost: Callable[[], Mapping[int, str]], timeout: float) -> None:
        self.timeout = timeout
        self._what, self._lost = what, lost

    def look(self) -> None:
        if self._lost():
            raise self.explain("")

    def explain(self, cause: str, late: bool = False) -> ExchangeError:
        deadline = time.monotonic() + self.patience
        while not self._lost() and time.monotonic() < deadline:  # the backend may notice it first
            time.sleep(self.patience / 50)
        told = "; ".join(f"rank {rank} is lost ({why})" for rank, why in sorted(self._lost().items()))
        return ExchangeError(
            f"{self._what} was interrupted ({told or cause}): a rank that is lost while all wait for each other ends "
            "the job; go on from the last checkpoint"
        )


@contextmanager
def told_of_loss(what: str, lost: Callable[[], Mapping[int, str]], timeout: float) -> Iterator[None]:
    """Around a collective call: if a rank is lost, an error that names it and says what to do.

    Args:
        what: that which errors name.
        lost: tells which of those who make the call are lost, and why.
        timeout: seconds that they wait for each other.
    """
    watch = LossWatch(what, lost, timeout)
    try:
        with watching(watch):
            yield
    except ExchangeError:
        raise
    except RuntimeError as cause:
        if not isinstance(cause, dist.DistError) and "gloo" not in str(cause).lower():
            raise
        raise watch.explain(str(cause).splitlines()[0]) from cause

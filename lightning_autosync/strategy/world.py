"""Torch's default process group, where ranks may be lost and come back: it holds those who met last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lightning_autosync.errors import ExchangeError
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
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timedelta(seconds=timeout)
        complete = dist.get_world_size() == size
        self._visits = dict.fromkeys(range(size), 1) if complete else {}
        # Each training counts its meetings from one; who comes back takes part in that which its predecessor counted.
        training = store.add(f"world/trainings/{rank}", int(complete))
        self._store = dist.PrefixStore(f"world/{training}", store)

    def follow(self, meeting: Meeting) -> None:
        """Let the group be those who met; all of them call this.

        Raises:
            ExchangeError: one of them did not come in time, for it was lost in this very moment.
        """
        if meeting.visits == self._visits:
            return
        self._visits = meeting.visits
        backend, there = dist.get_backend(), sorted(meeting.visits)
        with told_of_loss("the new process group of those who are there"):
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


@contextmanager
def told_of_loss(what: str) -> Iterator[None]:
    """Around a collective call: what its backend says of a lost rank becomes an error that says what to do."""
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as cause:
        if not isinstance(cause, dist.DistError) and "gloo" not in str(cause).lower():
            raise
        raise ExchangeError(
            f"{what} was interrupted ({str(cause).splitlines()[0]}): a rank that is lost while all wait for each other "
            "ends the job; go on from the last checkpoint"
        ) from cause

"""Torch's default process group in relaxed jobs, where ranks may be lost and return: it has the present ranks only.

Collective calls that other ranks would not answer, or that a lost rank interrupts, become clear errors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_autosync.engine.waiting import Monitor, monitored_by
from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.base import Drain
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Mail

_FAILED = "rank failed"
"""Kind of the message from a rank that ends with an error."""
_LONGEST_REASON = 4096
"""Largest number of characters of an error in that message."""


class GroupMembers(NamedTuple):
    """A rank's view of the members of its process group.

    Attributes:
        lost: returns lost members, with the reasons.
        announce: tells the other members that this rank ends with an error.
        timeout: seconds that members wait for each other.
    """

    rank: int
    lost: Callable[[], Mapping[int, str]]
    announce: Callable[[ExchangeError], None]
    timeout: float


class JobMembers:
    """Tracks the present ranks of a relaxed job, and keeps the process group in line with them.

    If training continues without lost ranks, the default process group is formed again after each drain with other
    ranks than at the drain before. Collective calls of Lightning, metrics and the user then involve all present ranks.

    Args:
        mesh: the mesh of the job's ranks, followed by servers.
        store: the store of all ranks; needed during the whole job.
        size: number of ranks that train.
        needs_all: whether collective calls need all ranks, as with servers.
        timeout: seconds that ranks wait for each other.
    """

    def __init__(self, mesh: Mesh, store: dist.Store, size: int, needs_all: bool, timeout: float) -> None:
        self._mesh, self._size, self._needs_all = mesh, size, needs_all
        self._group = GroupMembers(mesh.rank, self.lost, self.announce, timeout)
        self._lost: dict[int, str] = {}
        self._absent: set[int] = set()
        """Ranks that did not come to the last drain."""
        complete = dist.get_world_size() == size
        self._starts = dict.fromkeys(range(size), 1) if complete else {}
        """Number of starts of each rank in the process group."""
        if not needs_all:
            # Each training counts its drains from one, so keys need the number of the training too. A returning rank
            # takes part in the training that its predecessor counted.
            training = store.add(f"world/trainings/{mesh.rank}", int(complete))
            self._store = dist.PrefixStore(f"world/{training}", store)
        mesh.on_loss(self._lost.__setitem__)
        mesh.on_join(self._forget_loss)
        mesh.subscribe(_FAILED, self._note_failure)

    def lost(self) -> dict[int, str]:
        """Lost ranks for which collective calls wait, with the reasons."""
        lost = self._lost.copy()  # another thread changes it
        return lost if self._needs_all else {rank: why for rank, why in lost.items() if rank in self._starts}

    def announce(self, error: BaseException) -> None:
        """Tell the other ranks that this rank ends with an error, unless a lost rank is the cause."""
        if self._mesh.closed or (self.lost() and isinstance(error, ExchangeError)):
            return
        why = f"it ended with {type(error).__name__}: {error}"[:_LONGEST_REASON]
        for peer in self._mesh.live - {self._mesh.rank}:
            with suppress(ExchangeError):  # the peer is lost too
                self._mesh.send(peer, _FAILED, {"why": why})

    def follow(self, drain: Drain) -> None:
        """Warn about ranks that did not come to a drain, and form the process group of those that did; collective.

        Raises:
            ExchangeError: a rank did not come in time, because it was lost after the drain.
        """
        absent = set(range(self._size)) - drain.starts.keys()
        # Servers may know of a loss before this rank does, and a rank that closes without an error never counts as one.
        for rank in absent if self._needs_all else ():
            self._lost.setdefault(rank, "it did not join the other ranks in time")
        if absent != self._absent:
            self._absent = absent
            ranks = ", ".join(map(str, sorted(absent)))
            gone = f"{'rank' if len(absent) == 1 else 'ranks'} {ranks} did not join; the other ranks continue"
            rank_zero_warn(gone if absent else "all ranks joined again")
        if not self._needs_all and drain.starts != self._starts:
            self._starts = drain.starts
            self._form_group(drain)

    def check(self, what: str) -> None:
        """Check before a collective call during training, named ``what`` in errors, that it can succeed.

        Raises:
            ExchangeError: this rank was expelled, or a rank that the call needs is lost.
        """
        if self._mesh.error is not None:
            raise self._mesh.error
        if self._lost and self._needs_all:
            # Lightning's checkpoint callback makes a collective call before it writes, so a checkpoint may be missing.
            raise ExchangeError(
                f"{what} needs all ranks, but {_listed(self._lost)}. The checkpoint that was due now may be missing: "
                "resume from the last one that exists"
            )

    def collective(self, what: str) -> AbstractContextManager[None]:
        """The context of a collective call; see `naming_lost_ranks`."""
        return naming_lost_ranks(what, self._group)

    def _form_group(self, drain: Drain) -> None:
        backend, present = dist.get_backend(), sorted(drain.starts)
        with naming_lost_ranks("the new process group of the remaining ranks", self._group):
            dist.destroy_process_group()
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(str(drain.number), self._store),
                rank=present.index(self._mesh.rank),
                world_size=len(present),
                timeout=timedelta(seconds=self._group.timeout),
            )

    def _forget_loss(self, rank: int) -> None:
        self._lost.pop(rank, None)

    def _note_failure(self, mail: Mail) -> None:
        self._lost.setdefault(mail.sender, str(mail.header.get("why")))


def _listed(lost: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} is lost ({why})" for rank, why in sorted(lost.items()))


def begin_alone(backend: str) -> None:
    """Form a process group of this process only. A returning rank needs it until its first drain with the others."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class LossMonitor(Monitor):
    """Ends a collective call when one of its members is lost.

    Args:
        what: name of the call in errors.
    """

    def __init__(self, what: str, members: GroupMembers) -> None:
        self.timeout = members.timeout
        self._what, self._members = what, members

    def check(self) -> None:
        if self._members.lost():
            raise self.explain("")

    def explain(self, cause: str, late: bool = False) -> ExchangeError:
        if not self._await_loss():  # the backend may notice the loss before the mesh does
            # No rank is lost, but a connection of the backend is, and the rank that noticed it ends.
            self._members.announce(ExchangeError(cause))
            cause += f"; the connection of rank {self._members.rank} failed first"
            self._await_loss()
        why = _listed(self._members.lost()) or cause
        return ExchangeError(
            f"{self._what} was interrupted ({why}). A job ends if a rank is lost during a collective call: resume "
            "from the last checkpoint"
        )

    def _await_loss(self) -> bool:
        deadline = time.monotonic() + self.answer_timeout
        while not self._members.lost() and time.monotonic() < deadline:
            time.sleep(self.answer_timeout / 50)
        return bool(self._members.lost())


@contextmanager
def naming_lost_ranks(what: str, members: GroupMembers) -> Iterator[None]:
    """The context of a collective call: if a rank is lost, the error names it and says what to do.

    Args:
        what: name of the call in errors.

    Raises:
        ExchangeError: a rank is lost, or the call failed.
    """
    monitor = LossMonitor(what, members)
    try:
        with monitored_by(monitor):
            yield
    except ExchangeError:
        raise
    except RuntimeError as cause:
        if not isinstance(cause, dist.DistError) and "gloo" not in str(cause).lower():
            raise
        raise monitor.explain(str(cause).splitlines()[0]) from cause


NAMES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *(name for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name)),  # since torch 2.13
)
"""Functions of ``torch.distributed`` that wait for every rank."""


@contextmanager
def refused_collectives(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """A context in which calls of `NAMES` by this thread raise ``refusal(name)``; other threads are not affected.

    Calls within a backward pass raise, too: the passes of models on accelerators run on autograd's own threads. Without
    this, the backend would match such a call with another rank's next collective call, at any later step.
    """
    own = {name: getattr(dist, name) for name in NAMES}
    thread = threading.get_ident()

    def guarded(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread or torch._C._current_graph_task_id() != -1:
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

"""A worker's letters to servers and to the workers of its node, and its waits for answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from lightning_autosync.errors import ExchangeError, MeshTimeout, PeerLost
from lightning_autosync.plan.servers import ServerLayout
from lightning_autosync.relaxed.mesh import Mail, Mesh
from lightning_autosync.relaxed.server.protocol import TO_NODE, TO_WORKER, Absence, Deadline, Post

Handlers = Mapping[str, Callable[[Mail], None]]


class Correspondence:
    """Sends, waits, and turns what others' absence means into errors.

    Args:
        layout: who serves.
        in_step: whether every worker is needed.
        timeout: seconds to wait for answers.

    Attributes:
        answered: the steps that each server has answered with since the last `collect` began.
        always: handlers of messages that may come at any time.
        absent: told of each process that is gone and may be.
    """

    def __init__(self, mesh: Mesh, layout: ServerLayout, in_step: bool, timeout: float) -> None:
        self.answered: dict[int, int] = {}
        self.always: dict[str, Callable[[Mail], None]] = {}
        self.absent: Callable[[int], None] = lambda rank: None
        self._owners, self._workers = frozenset(layout.owners), layout.workers
        self._in_step, self._timeout = in_step, timeout
        self._post = Post(mesh, {"worker": TO_WORKER, "node": TO_NODE})

    def send(
        self,
        peer: int,
        kind: str,
        header: Mapping[str, object] | None = None,
        parts: Sequence[memoryview | Tensor] = (),
    ) -> None:
        """Queue a message.

        Raises:
            ExchangeError: the peer is a server, and gone.
            PeerLost: the peer is another worker, and gone.
        """
        try:
            self._post.send(peer, kind, header, parts)
        except PeerLost as error:
            if peer in self._owners:
                raise _server_gone(peer, error.why) from None
            raise

    def collect(self, handlers: Handlers, known: Mapping[int, int] | None = None) -> None:
        """Handle messages until every server has answered, but for those whose answers are ``known``.

        Raises:
            ExchangeError: as `react`.
        """
        self.answered = dict(known or {})
        deadline = Deadline(self._timeout)
        while self.answered.keys() != self._owners:
            self.react(handlers, deadline)

    def react(self, handlers: Handlers, deadline: Deadline) -> None:
        """Handle one event; ``deadline`` begins anew where a server says that others still move.

        Raises:
            ExchangeError: a server is lost or failed, a worker is lost where all are needed, or time is over.
        """
        try:
            event = self._post.next(deadline.remaining)
        except MeshTimeout:
            silent = ", ".join(str(owner) for owner in sorted(self._owners) if owner not in self.answered)
            raise ExchangeError(
                f"no answer from the parameter servers on ranks {silent} in {deadline.seconds:g} s; one of them is "
                "stuck, or workers do not run the same steps"
            ) from None
        if event is None:
            return
        if isinstance(event, Absence):
            self._note_absence(event)
        elif event.kind == "worker.patience":
            deadline.renew()
        elif event.kind == "worker.failed":
            raise ExchangeError(f"the parameter server on rank {event.sender} cannot go on: {event.header['error']}")
        elif handler := self.always.get(event.kind) or handlers.get(event.kind):
            handler(event)

    def deadline(self) -> Deadline:
        """A time-out that begins now."""
        return Deadline(self._timeout)

    def close(self) -> None:
        """Take nothing more."""
        self._post.close()

    def _note_absence(self, absence: Absence) -> None:
        rank, why = absence.rank, absence.why
        if rank in self._owners:
            raise _server_gone(rank, why)
        if absence.lost and rank < self._workers and self._in_step:
            raise ExchangeError(f"rank {rank} is lost ({why}), and synchronous steps need every worker")
        self.absent(rank)


def _server_gone(rank: int, why: str) -> ExchangeError:
    return ExchangeError(
        f"the parameter server on rank {rank} is gone ({why}), and with it its part of the parameters and of the "
        "optimizer's state: start again from a checkpoint"
    )

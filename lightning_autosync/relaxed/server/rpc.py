"""Messages between workers and servers: ordered events, waits for answers, and losses as errors."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_autosync.errors import ExchangeError, MeshTimeout, PeerLost
from lightning_autosync.plan.servers import ServerLayout, Shard
from lightning_autosync.relaxed.server.protocol import TO_NODE, TO_WORKER
from lightning_autosync.relaxed.server.shards import ShardedModel
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.relaxed.transport.payload import Unpacked, unpack

_ROUNDING = 1e-4
"""Largest rounding error of a sum of steps. Sums of millions of thirds err by less; one step of 1,000 ranks is more."""


class Absence(NamedTuple):
    """A process is gone: it was lost, or, if ``lost`` is False, it closed its mesh without an error."""

    rank: int
    why: str
    lost: bool


Event = Mail | Absence


class EventQueue:
    """Messages and absences for one server or one worker, in the order in which they occurred.

    Args:
        kinds: kinds of messages to receive, by prefix.
    """

    def __init__(self, mesh: Mesh, kinds: Mapping[str, Sequence[str]]) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._subscriptions = ExitStack()
        for prefix, names in kinds.items():
            for name in names:
                self._subscriptions.callback(mesh.subscribe(f"{prefix}.{name}", self._events.put))
        self._subscriptions.callback(mesh.on_loss(lambda rank, why: self._events.put(Absence(rank, why, True))))
        closed = mesh.on_leave(lambda rank: self._events.put(Absence(rank, "it closed its connection", False)))
        self._subscriptions.callback(closed)
        # Processes that were gone before the subscription cause no event of the mesh.
        for rank in set(range(mesh.size)) - mesh.live:
            self._events.put(Absence(rank, "it was lost before the exchange began", rank not in mesh.left))

    def next(self, timeout: float | None = None) -> Event | None:
        """The next event; None after `wake`.

        Raises:
            MeshTimeout: nothing happened in ``timeout`` seconds.
        """
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            raise MeshTimeout(f"nothing arrived within {timeout:g} s") from None

    def close(self) -> None:
        """Take no more events; a second call has no effect."""
        self._subscriptions.close()

    def wake(self) -> None:
        """Let the thread that waits in `next` return."""
        self._events.put(None)


class Deadline:
    """A timeout that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Restart the timeout."""
        self._end = time.monotonic() + self.seconds

    @property
    def remaining(self) -> float:
        return max(0.0, self._end - time.monotonic())


class BadMessageError(ExchangeError):
    """A worker sent a message that the server cannot use."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} sent an invalid message: {why}")
        self.rank = rank

    def __reduce__(self) -> tuple[type[ExchangeError], tuple[str]]:
        return ExchangeError, (str(self),)


@contextmanager
def attributed_to(rank: int) -> Iterator[None]:
    """Within the context, which reads a message of ``rank``, turn errors into a `BadMessageError`."""
    try:
        yield
    except (ExchangeError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as cause:
        raise BadMessageError(rank, str(cause) or type(cause).__name__) from cause


Handlers = Mapping[str, Callable[[Mail], None]]


class ServerRpc:
    """Sends messages, waits for answers, and turns losses of processes into errors.

    Args:
        in_step: whether the loss of a worker is an error.
        timeout: seconds to wait for answers.

    Attributes:
        answers: the step in each server's answer since the last `collect` began, by the server's rank.
        handlers: handlers of messages that may come at any time, by kind.
        on_absence: called with the rank of each process that is gone, if that is no error.
    """

    def __init__(self, mesh: Mesh, layout: ServerLayout, in_step: bool, timeout: float) -> None:
        self.answers: dict[int, int] = {}
        self.handlers: dict[str, Callable[[Mail], None]] = {}
        self.on_absence: Callable[[int], None] = lambda rank: None
        self._mesh, self._owners, self._workers = mesh, frozenset(layout.owners), layout.workers
        self._in_step, self._timeout = in_step, timeout
        self._events = EventQueue(mesh, {"worker": TO_WORKER, "node": TO_NODE})

    def send(
        self,
        peer: int,
        kind: str,
        header: Mapping[str, object] | None = None,
        parts: Sequence[memoryview | Tensor] = (),
    ) -> None:
        """Queue a message; ``parts`` must not change until the peer answers or is gone.

        Raises:
            ExchangeError: the peer is a server that is gone.
            PeerLost: the peer is another worker that is gone.
        """
        try:
            self._mesh.send(peer, kind, header or {}, parts)
        except PeerLost as error:
            if peer in self._owners:
                raise _server_gone(peer, error.why) from None
            raise

    def collect(self, handlers: Handlers, known: Mapping[int, int] | None = None) -> None:
        """Handle messages until every server has answered, except those whose answers are ``known``.

        Raises:
            ExchangeError: see `handle_next`.
        """
        self.answers = dict(known or {})
        deadline = Deadline(self._timeout)
        while self.answers.keys() != self._owners:
            self.handle_next(handlers, deadline)

    def handle_next(self, handlers: Handlers, deadline: Deadline) -> None:
        """Handle one event; ``deadline`` restarts if a server reports that other workers still make progress.

        Raises:
            ExchangeError: a server is lost or failed, a needed worker is lost, or ``deadline`` is over.
        """
        try:
            event = self._events.next(deadline.remaining)
        except MeshTimeout:
            silent = ", ".join(str(owner) for owner in sorted(self._owners) if owner not in self.answers)
            raise ExchangeError(
                f"no answer from the parameter servers on ranks {silent} in {deadline.seconds:g} s; one of them is "
                "stuck, or the workers do not run the same steps"
            ) from None
        if event is None:
            return
        if isinstance(event, Absence):
            self._handle_absence(event)
        elif event.kind == "worker.extend":
            deadline.renew()
        elif event.kind == "worker.failed":
            raise ExchangeError(f"the parameter server on rank {event.sender} failed: {event.header['error']}")
        elif handler := self.handlers.get(event.kind) or handlers.get(event.kind):
            handler(event)

    def deadline(self) -> Deadline:
        """A new timeout that begins now."""
        return Deadline(self._timeout)

    def close(self) -> None:
        """Take no more events."""
        self._events.close()

    def _handle_absence(self, absence: Absence) -> None:
        rank, why = absence.rank, absence.why
        if rank in self._owners:
            raise _server_gone(rank, why)
        if absence.lost and rank < self._workers and self._in_step:
            raise ExchangeError(f"rank {rank} is lost ({why}), and synchronous steps need every worker")
        self.on_absence(rank)


def _server_gone(rank: int, why: str) -> ExchangeError:
    return ExchangeError(
        f"the parameter server on rank {rank} is lost ({why}), with its shards of the parameters and of the "
        "optimizer's state: resume from a checkpoint"
    )


def whole_steps(progress: float) -> int:
    """The number of complete steps; ``progress`` is a sum of fractions, so it may lie just below a whole number."""
    return int(progress + _ROUNDING)


class PulledParameters:
    """Installs the answers of servers in the model, and tracks steps and versions.

    Attributes:
        steps: this worker's step in the clock of each server; they may differ for a worker that returns.
        versions: the last version of each server's parameters that this worker has completely.
        epochs: number of barriers that each server had passed at its last answer.
        progress: number of steps that the parameters represent.
    """

    def __init__(
        self, layout: ServerLayout, model: ShardedModel, buffers: Mapping[str, Tensor], rpc: ServerRpc
    ) -> None:
        self.steps = dict.fromkeys(layout.owners, 0)
        self.versions = dict.fromkeys(layout.owners, 0)
        self.epochs = dict.fromkeys(layout.owners, 0)
        self.progress = 0
        self.coordinator = layout.owners[0]
        self._model, self._buffers, self._rpc = model, buffers, rpc
        self._shards: dict[int, Sequence[Shard]] = {owner: layout.of(owner) for owner in layout.owners}

    @property
    def step(self) -> int:
        """This worker's step in the clock of the first server."""
        return self.steps[self.coordinator]

    def install(self, mail: Mail) -> None:
        """Install one server's answer, which another worker may have passed on."""
        owner = mail.header.get("owner", mail.sender)
        message = unpack(mail.payload)
        self._model.install(message, self._shards[owner])
        self._install_buffers(message)
        self.versions[owner] = mail.header["version"]
        if owner == self.coordinator:
            self.progress = max(self.progress, whole_steps(mail.header["progress"]))
        self.epochs[owner] = mail.header["epoch"]
        self.note(owner, mail.header["step"])

    def note(self, owner: int, step: int) -> None:
        """Note the answer of a server."""
        answers = self._rpc.answers
        answers[owner] = step
        if answers.keys() == self._shards.keys():
            # Only now: a worker that repeats a lost leader's push must name the step to which the push belongs.
            self.steps.update(answers)

    @torch.no_grad()
    def _install_buffers(self, message: Unpacked) -> None:
        for name, tensor in message.tensors.items():
            if name.startswith("buffer."):
                self._buffers[name.removeprefix("buffer.")].copy_(tensor)

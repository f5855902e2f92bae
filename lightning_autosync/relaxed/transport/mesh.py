"""Any-to-any messages between live processes: a lost peer is reported, and the other processes continue."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.connections import listen, own_address
from lightning_autosync.errors import ExchangeError, MeshTimeout, PeerLost
from lightning_autosync.relaxed.transport.event_loop import EventLoop
from lightning_autosync.relaxed.transport.handshake import exchange_addresses
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.membership import Membership, Status
from lightning_autosync.relaxed.transport.messages import (
    Mail,
    OutgoingMessage,
    Sent,
    as_bytes,
    encode_head,
    payload_size,
)
from lightning_autosync.relaxed.transport.stream import ProtocolError


class Inbox:
    """Queues of messages by kind; one thread fills them, and any thread may empty them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[str, deque[Mail]] = {}

    def put(self, mail: Mail) -> None:
        with self._changed:
            self._queues.setdefault(mail.kind, deque()).append(mail)
            self._changed.notify_all()

    def drain(self, kind: str) -> list[Mail]:
        """Remove and return all messages of a kind."""
        with self._changed:
            return list(self._queues.pop(kind, ()))

    def notify(self) -> None:
        """Let waiting threads check again whether a message can still come."""
        with self._changed:
            self._changed.notify_all()

    def take(
        self, kinds: tuple[str, ...], sender: int | None, timeout: float, failure: Callable[[], ExchangeError | None]
    ) -> Mail:
        """Wait for the first message of one of the kinds (from ``sender``, if given).

        Raises:
            MeshTimeout: no such message came in ``timeout`` seconds.
            ExchangeError: ``failure`` returned this error, and no such message is left.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while (mail := self._find(kinds, sender)) is None:
                error = failure()
                if error is not None:
                    raise error
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    source = "" if sender is None else f" from rank {sender}"
                    raise MeshTimeout(f"no message of kind {' or '.join(kinds)}{source} in {timeout:g} s")
            return mail

    def _find(self, kinds: tuple[str, ...], sender: int | None) -> Mail | None:
        for kind in kinds:
            queue = self._queues.get(kind, ())
            for index, mail in enumerate(queue):
                if sender is None or mail.sender == sender:
                    del self._queues[kind][index]
                    return mail
        return None


__all__ = ["HeartbeatSettings", "Mail", "Mesh", "Sent"]

LARGEST_PAYLOAD = 64 * 1024**3
"""Default limit on the size of a payload in bytes."""

Handler = Callable[[Mail], None]
Cancel = Callable[[], None]
Placer = Callable[[int, dict[str, Any], int], memoryview | None]

_NO_HEADER: Mapping[str, Any] = MappingProxyType({})


class Mesh:
    """One process's end of the mesh, made by `open`. All methods are thread-safe.

    Messages of up to 64 KiB overtake larger ones to the same peer. Otherwise, messages to a peer keep their order. No
    message is lost or repeated while the peer lives, even if a connection drops.
    """

    def __init__(self, rank: int, size: int, incarnation: int) -> None:
        self.rank, self.size, self.incarnation = rank, size, incarnation
        self._members = Membership(rank, size, incarnation)
        self._loop: EventLoop
        self._inbox = Inbox()
        self._handlers: dict[str, Handler] = {}
        self._placers: dict[str, Placer] = {}
        self._on_loss: list[Callable[[int, str], None]] = []
        self._on_leave: list[Callable[[int], None]] = []
        self._on_join: list[Callable[[int], None]] = []
        self._changed = threading.Condition()
        self._closed = False

    @classmethod
    def open(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        secret: bytes,
        address: str | None = None,
        timeout: float = 60.0,
        heartbeat: HeartbeatSettings | None = None,
        largest: int = LARGEST_PAYLOAD,
        rejoin: bool = False,
    ) -> Mesh:
        """Connect to the other processes.

        Args:
            store: a torch store that all processes share; needed only while opening.
            size: number of processes.
            secret: the secret that all processes share; see `secret.common_secret`.
            address: address of this process in the cluster's network; by default the one that faces ``MASTER_ADDR``.
            timeout: seconds in which all processes must meet.
            heartbeat: settings for the loss of silent peers.
            largest: limit on the payload of a message in bytes.
            rejoin: whether this rank returns after a loss. It then needs one live peer and all peers that this peer
                counts as live; otherwise it needs all peers.

        Raises:
            ExchangeError: a needed peer could not be met in time.
        """
        deadline = time.monotonic() + timeout
        listener = listen(address or own_address())
        try:
            place = listener.getsockname()[:2]
            entry = exchange_addresses(store, secret, rank, size, place, rejoin=rejoin, timeout=timeout)
        except ExchangeError:
            listener.close()
            raise
        mesh = cls(rank, size, entry.incarnation)
        mesh._loop = EventLoop(mesh._members, listener, secret, heartbeat or HeartbeatSettings(), mesh, largest)
        # A script may end without closing its mesh; peers must not take that for a loss.
        atexit.register(mesh.close)
        for peer, target in entry.addresses.items():
            # Of each pair, the lower rank connects. A returning rank connects to all, because no peer expects it.
            if rejoin or rank < peer:
                mesh._loop.join(peer, target, entry.incarnations[peer], deadline - time.monotonic())
        try:
            mesh._meet(deadline, rejoin)
        except ExchangeError:
            mesh.close()
            raise
        return mesh

    @property
    def live(self) -> frozenset[int]:
        """Ranks of the live processes, this one included."""
        return self._members.live

    @property
    def left(self) -> frozenset[int]:
        """Ranks of the processes that closed their mesh without an error."""
        return frozenset(
            peer for peer in range(self.size) if peer != self.rank and self._members.status(peer) is Status.LEFT
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def error(self) -> ExchangeError | None:
        """The error that ended this mesh (`Expelled`, or a defect); None while it works."""
        return self._loop.error

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the kernel so far, heartbeats and headers included."""
        return self._loop.bytes_sent

    def send(
        self,
        peer: int,
        kind: str,
        header: Mapping[str, Any] = _NO_HEADER,
        payload: Sequence[memoryview | Tensor] = (),
    ) -> Sent:
        """Queue a message and return at once; the payload must not change until ``Sent.done``.

        Raises:
            PeerLost: the peer is not live. A later loss is raised by `Sent.wait`.
            Expelled: the other processes have given this one up.
            ExchangeError: the header is not JSON data, or a tensor is not contiguous in main memory.
        """
        error = self._unreachable(peer)
        if error is not None:
            raise error
        message = OutgoingMessage(encode_head(kind, header), as_bytes(payload), Sent())
        if peer == self.rank:
            self._send_self(kind, header, message)
        else:
            self._loop.post(peer, message)
        return message.sent

    def receive(self, *kinds: str, sender: int | None = None, timeout: float) -> Mail:
        """Wait for the next message of one of the kinds; messages that a peer sent before its loss are still delivered.

        Raises:
            PeerLost: ``sender`` is not live, and none of its messages is left.
            MeshTimeout: no message came in ``timeout`` seconds.
            Expelled: the other processes have given this one up.
        """
        return self._inbox.take(kinds, sender, timeout, lambda: self._unreachable(sender))

    def subscribe(self, kind: str, handler: Handler, place: Placer | None = None) -> Cancel:
        """Pass messages of a kind to ``handler`` instead of `receive`, earlier ones first.

        Args:
            handler: runs on the mesh's thread, so it must be quick. If it raises, the sender counts as lost.
            place: ``place(sender, header, size)`` may return memory of ``size`` bytes, into which a payload of more
                than 64 KiB is received without a copy. If it returns None, the mesh allocates the memory.

        Returns:
            A function that ends the subscription; later messages wait for `receive` or for the next subscriber.
        """

        def begin() -> None:
            if place is not None:
                self._placers[kind] = place
            self._handlers[kind] = handler
            for mail in self._inbox.drain(kind):
                try:
                    self.delivered(mail)
                except ProtocolError as cause:
                    self._loop.refuse(mail.sender, str(cause))

        def end() -> None:
            if self._handlers.get(kind) is handler:
                del self._handlers[kind]
                self._placers.pop(kind, None)

        # On the thread that delivers messages, so that none is missed and the order is kept.
        self._loop.perform(begin)
        return lambda: self._loop.perform(end)

    def on_loss(self, handler: Callable[[int, str], None]) -> Cancel:
        """Call ``handler(peer, why)`` on the mesh's thread for each peer that is lost from now on; until cancelled."""
        return self._listen(self._on_loss, handler)

    def on_leave(self, handler: Callable[[int], None]) -> Cancel:
        """Call ``handler(peer)`` on the mesh's thread for each peer that closes its mesh from now on."""
        return self._listen(self._on_leave, handler)

    def on_join(self, handler: Callable[[int], None]) -> Cancel:
        """Call ``handler(peer)`` on the mesh's thread for each peer that joins or returns from now on."""
        return self._listen(self._on_join, handler)

    @staticmethod
    def _listen(listeners: list[Any], handler: Any) -> Cancel:
        listeners.append(handler)
        return lambda: listeners.remove(handler) if handler in listeners else None

    def close(self) -> None:
        """Send queued messages, take leave, and stop; peers do not count this process as lost."""
        atexit.unregister(self.close)
        if not self._closed:
            self._closed = True
            self._loop.close()
            self._inbox.notify()

    def _unreachable(self, peer: int | None) -> ExchangeError | None:
        """The error for messages to or from ``peer`` (None: any peer); None if there is none."""
        if self._closed:
            return ExchangeError("the mesh is closed")
        if self._loop.error is not None:
            return self._loop.error
        if peer is None or peer == self.rank:
            return None
        if not 0 <= peer < self.size:
            return ExchangeError(f"rank {peer} is not in the range 0 to {self.size - 1}")
        return None if self._members.is_live(peer) else PeerLost(peer, self._members.reason(peer))

    def _send_self(self, kind: str, header: Mapping[str, Any], message: OutgoingMessage) -> None:
        # A copy, because the receiver owns the payload of its mail.
        copy = memoryview(bytearray(b"".join(message.payload)))
        placer = self._placers.get(kind)
        place = placer(self.rank, dict(header), payload_size(message.payload)) if placer and copy.nbytes else None
        if place is not None:
            place[:] = copy
        mail = Mail(self.rank, kind, dict(header), copy if place is None else place)
        self._loop.submit(lambda: self.delivered(mail))
        message.sent.settle()

    def _meet(self, deadline: float, rejoin: bool) -> None:
        awaited = self._awaited_again if rejoin else lambda: self._members.missing
        with self._changed:
            while awaited() and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
                if self._loop.error is not None:
                    raise self._loop.error
            absent = set(awaited())
        if not rejoin or self._members.live == {self.rank}:
            absent.update(peer for peer in self._others() if self._members.status(peer) is Status.LOST)
        if absent:
            reasons = "; ".join(f"rank {peer}: {self._members.reason(peer)}" for peer in sorted(absent))
            raise ExchangeError(f"rank {self.rank} could not connect to its peers: {reasons}")

    def _awaited_again(self) -> list[int]:
        """Peers that a returning process must still meet: first any peer, then all that this peer counts as live."""
        return self._members.unmet if self._members.live != {self.rank} else self._members.missing

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _notice(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._inbox.notify()

    # Methods of `MeshEvents`, called on the loop's thread

    def delivered(self, mail: Mail) -> None:
        handler = self._handlers.get(mail.kind)
        if handler is None:
            self._inbox.put(mail)
            return
        try:
            handler(mail)
        except Exception as cause:
            if mail.sender == self.rank:
                raise
            # A message that cannot be used must cost its sender the connection, and not this process its mesh.
            why = f"{type(cause).__name__}: {cause}"
            raise ProtocolError(f"rank {mail.sender} sent an invalid message of kind {mail.kind!r}: {why}") from cause

    def place(self, sender: int, kind: str, header: dict[str, Any], size: int) -> memoryview | None:
        placer = self._placers.get(kind)
        return None if placer is None else placer(sender, header, size)

    def joined(self, peer: int) -> None:
        self._notice()
        for handler in list(self._on_join):
            handler(peer)

    def lost(self, peer: int, why: str) -> None:
        self._notice()
        for handler in list(self._on_loss):
            handler(peer, why)

    def departed(self, peer: int) -> None:
        self._notice()
        for handler in list(self._on_leave):
            handler(peer)

    def changed(self) -> None:
        self._notice()

    def failed(self, error: ExchangeError) -> None:
        self._notice()
        for peer in self._others():
            for handler in list(self._on_loss):
                handler(peer, str(error))

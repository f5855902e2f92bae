"""The thread on rank 0 that runs the coordinator, and the workers' client for it."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import Any

from lightning_autosync.errors import ExchangeError, PeerLost
from lightning_autosync.relaxed.coordinator import Command, Coordinator
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Mail

RANK = 0
"""Rank of the coordinating process."""

_REQUESTS = ("start", "ready", "progress", "arrive", "done", "complete", "broken", "leave")


class Controller:
    """Passes events to a coordinator and sends its commands, until closed. Rank 0 only.

    Args:
        coordinator: a new coordinator, owned by the controller.
    """

    def __init__(self, mesh: Mesh, coordinator: Coordinator) -> None:
        self._mesh, self._coordinator = mesh, coordinator
        self._lock = threading.Lock()
        self._events: SimpleQueue[Mail | int | None] = SimpleQueue()
        self._subscriptions = ExitStack()
        for kind in _REQUESTS:
            self._subscriptions.callback(mesh.subscribe(f"controller.{kind}", self._events.put))
        self._subscriptions.callback(mesh.on_loss(lambda peer, why: self._events.put(peer)))
        self._subscriptions.callback(mesh.on_leave(self._events.put))
        for peer in sorted(set(range(mesh.size)) - mesh.live):
            self._events.put(peer)  # lost before the subscription
        self._thread = threading.Thread(target=self._serve, name="autosync-controller", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """The coordinator's part of a checkpoint."""
        with self._lock:
            return self._coordinator.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Load the state that :meth:`state` returned; call this before any worker starts."""
        with self._lock:
            self._coordinator.restore(state)

    def close(self) -> None:
        """Stop the thread; later requests of workers fail. A second call has no effect."""
        self._subscriptions.close()
        self._events.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            while (event := self._next_event()) is not None:
                self._send(self._answer(event))
            reason = f"the coordinator on rank {RANK} has finished"
        except Exception as cause:
            reason = f"the coordinator on rank {RANK} failed: {cause}\n{traceback.format_exc()}"
        with self._lock:
            self._send(self._coordinator.stop(reason))

    def _next_event(self) -> Mail | int | float | None:
        """A message, the rank of a peer that is gone, the time (float) if a deadline has passed, or None at the end."""
        with self._lock:
            deadline = self._coordinator.deadline(time.monotonic())
        try:
            return self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Empty:
            return time.monotonic()

    def _answer(self, event: Mail | int | float) -> list[Command]:
        now = time.monotonic()
        with self._lock:
            if isinstance(event, Mail):
                return self._coordinator.handle(event.sender, event.kind.removeprefix("controller."), event.header, now)
            if isinstance(event, int):
                return self._coordinator.lose(event, now)
            return self._coordinator.tick(now)

    def _send(self, commands: Iterable[Command]) -> None:
        for command in commands:
            with suppress(ExchangeError):  # the mesh reports losses as events of their own
                self._mesh.send(command.rank, f"worker.{command.kind}", command.header)


class ControllerClient:
    """A worker's messages to and from the controller; each answer may take ``timeout`` seconds."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self._mesh, self._timeout = mesh, timeout

    def send(self, kind: str, **header: Any) -> None:
        """Send a request.

        Raises:
            ExchangeError: the controller has stopped the job or is lost.
        """
        try:
            self._mesh.send(RANK, f"controller.{kind}", header)
        except PeerLost:
            # Prefer the reason that the controller sent before it left, if it did.
            why = self._mesh.receive("worker.stop", sender=RANK, timeout=self._timeout).header["reason"]
            raise ExchangeError(why) from None

    def receive(self, *kinds: str) -> tuple[str, dict[str, Any]]:
        """The kind and header of the next command of these kinds; if several are there, of the kind listed first.

        Raises:
            ExchangeError: the controller has stopped the job, is lost, or did not answer in time.
        """
        # The mesh searches kinds in this order, so commands that came before a stop still count.
        wanted = (*(f"worker.{kind}" for kind in kinds), "worker.stop", "worker.extend")
        mail = self._mesh.receive(*wanted, sender=RANK, timeout=self._timeout)
        while mail.kind == "worker.extend":
            mail = self._mesh.receive(*wanted, sender=RANK, timeout=self._timeout)
        if mail.kind == "worker.stop":
            raise ExchangeError(mail.header["reason"])
        return mail.kind.removeprefix("worker."), mail.header

"""What an exchange is: one round of one message, from this rank's contribution to the sum over ranks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_autosync.engine.codecs import encode_with_feedback, make_codec
from lightning_autosync.engine.waiting import explained, wait_for_ranks
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Message
from lightning_autosync.plan.spec import Compressor


class Exchange(ABC):
    """Sums a buffer over all ranks, in place unless ``result`` says otherwise.

    The engine calls ``start`` when this rank's contribution is in the buffer, then ``resume`` and ``wait`` at the end
    of backward, each for all messages in schedule order. So every rank launches collectives in the same order.

    Attributes:
        result: where the sum appears, if not in the buffer itself. It belongs to the exchange: read it until the next
            ``start``, never write to it.
        residual: with error feedback, [numel + tail]: what encoding has lost.
    """

    result: Tensor | None = None
    residual: Tensor | None = None

    @abstractmethod
    def start(self) -> None:
        """Begin; the buffer belongs to the exchange until ``wait`` returns."""

    def resume(self) -> None:  # noqa: B027 - most exchanges have nothing left to launch
        """Launch what depends on the first part."""

    def watch(self, completed: Callable[[], None] | None) -> None:  # noqa: B027 - not all know it before `wait`
        """Call ``completed``, on any thread, whenever this rank has a step's sum; None ends that."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the buffer holds the sum.

        Raises:
            ExchangeError: a peer was lost, disagreed, or did not answer in time.
        """


class Completion:
    """Lets the main thread wait, once a step, for what the transport's thread completes."""

    def __init__(self, what: str, timeout: float) -> None:
        self._what = what
        self._timeout = timeout
        self._done = threading.Event()
        self._error: ExchangeError | None = None
        self.watcher: Callable[[], None] | None = None

    def begin(self) -> None:
        self._done.clear()

    def done(self) -> None:
        if self.watcher is not None:
            self.watcher()
        self._done.set()

    def fail(self, error: ExchangeError) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        if self._error is None:
            wait_for_ranks(self._done.wait, self._what, self._timeout)
        if self._error is not None:
            raise explained(self._error) from self._error


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def new_residual(message: Message, buffer: Tensor) -> Tensor | None:
    """Memory for error feedback, of the size of ``buffer``; None if the message's compressor needs none."""
    lossy = make_codec(message.compressor, 1, 0) is not None
    return torch.zeros_like(buffer) if lossy and message.compressor.error_feedback else None


class CodedRange:
    """A range of a message's buffer, and what travels in its place.

    Args:
        buffer: [numel + tail].
        start, stop: the range.
        tail_start: elements from here on are counts.
        compressor: of the message.
        residual: of the whole buffer, where there is error feedback.

    Attributes:
        values: view of the buffer, [stop - start].
        wire: what travels: ``values`` itself where nothing encodes them, else uint8. It is a tensor of its own, and so
            aligned for every element type.
    """

    __slots__ = ("_codec", "_decoded", "_residual", "values", "wire")

    def __init__(
        self, buffer: Tensor, start: int, stop: int, tail_start: int, compressor: Compressor, residual: Tensor | None
    ) -> None:
        self.values = buffer[start:stop]
        self._codec = make_codec(compressor, stop - start, min(stop - start, max(0, stop - tail_start)))
        self._residual = residual[start:stop] if residual is not None else None
        self._decoded: Tensor | None = None
        self.wire = self.values if self._codec is None else self.new_wire()

    @property
    def encoded(self) -> bool:
        return self._codec is not None

    def new_wire(self) -> Tensor:
        """Memory for a contribution of another rank."""
        if self._codec is None:
            return torch.empty_like(self.values)
        return torch.empty(self._codec.size, dtype=torch.uint8, device=self.values.device)

    def encode(self, overwrite: bool = False) -> None:
        """Fill ``wire``; with ``overwrite``, ``values`` become what everybody will decode."""
        if self._codec is None:
            return
        if self._residual is not None:
            encode_with_feedback(self._codec, self.values, self._residual, self.wire)
            return
        self._codec.encode(self.values, self.wire)
        if overwrite:
            self.decode()

    def decode(self) -> None:
        """Fill ``values`` from ``wire``."""
        if self._codec is not None:
            self._codec.decode(self.wire, self.values)

    def aligned(self, wire: Tensor) -> Tensor:
        """What another rank sent, which may start at any byte: if it is encoded, moved to `wire`, which is aligned."""
        return wire if self._codec is None else self.wire.copy_(wire)

    def add(self, contribution: Tensor) -> None:
        """Add what another rank's wire holds to ``values``."""
        if self._codec is not None:
            if self._decoded is None:  # once, and only where contributions come
                self._decoded = torch.empty_like(self.values)
            self._codec.decode(contribution, self._decoded)
            contribution = self._decoded
        self.values.add_(contribution)

"""The interface of exchanges: one round of one message, from this rank's contribution to the sum over ranks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    of backward. It calls each of them for all messages in schedule order, so every rank launches collectives in the
    same order.

    Attributes:
        result: tensor with the sum, if it is not the buffer itself. The exchange owns it: callers may read it until the
            next ``start``, but must not write to it.
        residual: [numel + tail], the loss of encoding; None without error feedback.
        root_ranges: ranges of the buffer (first element, end) of which this rank is the root (of two, the first one):
            their sum is here first; see `wait_at_root`. None if ranks have no sum before `wait` returns.
        root_buffer: tensor on the host that has these sums first; None without ``root_ranges``.
    """

    result: Tensor | None = None
    residual: Tensor | None = None
    root_ranges: Sequence[tuple[int, int]] | None = None
    root_buffer: Tensor | None = None

    @abstractmethod
    def start(self) -> None:
        """Begin the exchange, which owns the buffer until ``wait`` returns."""

    def resume(self) -> None:  # noqa: B027 - most exchanges have nothing left to launch
        """Launch the parts that depend on the first one; may block for it."""

    def watch(self, completed: Callable[[], None] | None) -> None:  # noqa: B027 - not all know it before `wait`
        """Call ``completed``, on any thread, whenever this rank has the sum of a step; None stops that."""

    def wait_at_root(self) -> None:
        """Block until `root_buffer` has the sum in `root_ranges`; raises like `wait`."""
        raise NotImplementedError("this exchange has no root ranges")

    def send_sums_first(self) -> None:
        """Let contributions to sums, from now on, leave before all sums that are complete."""
        raise NotImplementedError("this exchange has no root ranges")

    @property
    def has_come(self) -> bool:
        """Whether ``wait`` would not block; False if the exchange cannot tell."""
        return False

    @abstractmethod
    def wait(self) -> None:
        """Block until the sum is complete.

        Raises:
            ExchangeError: a peer was lost, ran another step, or did not answer in time.
        """


class Completion:
    """Lets the main thread wait, once per step, until the transport's thread has completed an exchange."""

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

    @property
    def over(self) -> bool:
        """Whether ``wait`` would not block."""
        return self._done.is_set()

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
    """Zeros like ``buffer`` for error feedback; None if the message's compressor has none."""
    lossy = make_codec(message.compressor, 1, 0) is not None
    return torch.zeros_like(buffer) if lossy and message.compressor.error_feedback else None


class CodedRange:
    """A range of a message's buffer, and its encoded form.

    Args:
        buffer: [numel + tail].
        start: first element of the range.
        stop: end of the range (exclusive).
        tail_start: first element of the buffer that is a count.
        compressor: the message's compressor.
        residual: [numel + tail], the residual of the whole buffer; None without error feedback.

    Attributes:
        values: [stop - start], view of the buffer.
        wire: the data to send: ``values`` itself without a codec, otherwise uint8 [size of the encoded range] in memory
            of its own, which is aligned for every dtype.
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
        """Memory for another rank's contribution."""
        # Zeros make the system provide the memory now. Else the first step would wait for it, some 0.5 ms for a MiB.
        if self._codec is None:
            return torch.zeros_like(self.values)
        return torch.zeros(self._codec.size, dtype=torch.uint8, device=self.values.device)

    def encode(self, overwrite: bool = False) -> None:
        """Encode ``values`` into ``wire``.

        With ``overwrite``, also replace ``values`` with the decoded wire, so that this rank has the same result as all
        receivers. Error feedback always does so.
        """
        if self._codec is None:
            return
        if self._residual is not None:
            encode_with_feedback(self._codec, self.values, self._residual, self.wire)
            return
        self._codec.encode(self.values, self.wire)
        if overwrite:
            self.decode()

    def decode(self) -> None:
        """Decode ``wire`` into ``values``."""
        if self._codec is not None:
            self._codec.decode(self.wire, self.values)

    def aligned(self, wire: Tensor) -> Tensor:
        """Another rank's contribution, aligned: encoded ones may start at any byte, so they are copied to `wire`."""
        return wire if self._codec is None else self.wire.copy_(wire)

    def add(self, contribution: Tensor) -> None:
        """Decode another rank's contribution and add it to ``values``."""
        if self._codec is not None:
            if self._decoded is None:  # allocated only on ranks that receive contributions
                self._decoded = torch.empty_like(self.values)
            self._codec.decode(contribution, self._decoded)
            contribution = self._decoded
        self.values.add_(contribution)

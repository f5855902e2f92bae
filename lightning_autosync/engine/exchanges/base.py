"""What an exchange is: one round of one message, from own contribution to the sum over ranks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_autosync.engine.waiting import explained, wait_for_ranks
from lightning_autosync.errors import ExchangeError


class Exchange(ABC):
    """Sums a buffer over all ranks, in place unless ``result`` says otherwise.

    The engine calls ``start`` when the own contribution is in the buffer, then ``resume`` and ``wait`` at the end of
    backward, each for all messages in schedule order: so whatever a step launches on the backend is launched in the
    same order on every rank.

    Attributes:
        result: where the sum appears, if not in the buffer itself. It is the exchange's own, to be read until the
            next ``start`` and never written to.
    """

    result: Tensor | None = None

    @abstractmethod
    def start(self) -> None:
        """Begin; the buffer belongs to the exchange until ``wait`` returns."""

    def resume(self) -> None:  # noqa: B027 - most exchanges have nothing left to launch
        """Launch what depends on the first part."""

    def watch(self, completed: Callable[[], None] | None) -> None:  # noqa: B027 - not all know it before `wait`
        """Call ``completed`` whenever this rank has a step's sum, on whatever thread that happens; None ends that."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the buffer holds the sum.

        Raises:
            ExchangeError: a peer was lost, disagreed, or did not answer in time.
        """


class Completion:
    """Lets the main thread wait for the transport's thread, once a step."""

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

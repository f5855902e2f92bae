"""The order of deferred steps on a GPU: one stream for all of them, and the streams of readers wait for it.

A deferred step is made when a module reads a parameter, on whatever stream that module runs. Other parameters of its
message may be read on another stream, which does not wait for the first by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_autosync.errors import ExchangeError

_REFUSED = (
    "overlap='step': a CUDA graph would record a model whose optimizer's steps may be due when it is replayed; train "
    "without overlap, or without CUDA graphs"
)


class StepStream:
    """The stream on which the deferred steps of a module are made; it does nothing for a module on the CPU.

    Args:
        module: the module whose parameters are stepped, on one device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)  # hooks of all modules know this object, and would keep the module
        self._device = next((each.device for each in module.parameters() if each.device.type == "cuda"), None)
        self._stream: torch.cuda.Stream | None = None
        self._made: torch.cuda.Event | None = None

    @property
    def on_device(self) -> bool:
        return self._device is not None

    def follow(self) -> None:
        """Make later steps on the caller's current stream, after those that were made on another one."""
        if self._device is not None:
            self.wait()
            self._stream = torch.cuda.current_stream(self._device)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context whose work goes to the stream of the steps; the caller's stream waits for it afterwards.

        Raises:
            ExchangeError: a CUDA graph records the caller's stream.
        """
        if self._device is None:
            yield
            return
        if torch.cuda.is_current_stream_capturing():
            raise ExchangeError(_REFUSED)
        with torch.cuda.stream(self._stream):
            yield
            self._made = torch.cuda.Event()
            self._made.record()
        self.wait()

    def wait(self) -> None:
        """Let the caller's current stream wait for the steps that were made so far."""
        if self._made is not None:
            current = torch.cuda.current_stream(self._device)
            if current != self._stream:
                current.wait_event(self._made)

    def before_forward(self, module: nn.Module, _: Any = None) -> None:
        """A pre-hook of all modules' forward passes.

        Raises:
            ExchangeError: a CUDA graph records the pass of a part of the module. Its replays would read parameters
                whose steps are due, and no hook would run.
        """
        # In a process of a DataLoader, which was forked, CUDA is not initialized and must not be.
        if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
            return
        if not torch.cuda.is_current_stream_capturing():
            self.wait()
        elif (whole := self._module()) is not None:
            own = {*map(id, whole.parameters())}
            if any(id(parameter) in own for parameter in module.parameters()):
                raise ExchangeError(_REFUSED)


def keep(tensor: Tensor) -> None:
    """Let a tensor on a GPU keep its memory until the current stream has used it; another stream may have made it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

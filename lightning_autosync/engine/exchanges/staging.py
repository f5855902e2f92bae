"""Tree exchanges of gradients on an accelerator: copied through pinned host memory, on a stream beside backward."""

from __future__ import annotations

from concurrent.futures import Executor, Future

import torch
from torch import Tensor

from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.engine.exchanges.rows import RowExchange, Rows


class StagedExchange(Exchange):
    """Runs an exchange over the transport on a host copy of a device buffer.

    Args:
        inner: the exchange over ``host``.
        waiter: an executor with a single thread, which waits for copies in the order of backward. The transport's
            thread must not block on them.
        buffer: tensor on the device.
        host: pinned tensor of the same shape.
    """

    def __init__(self, inner: Exchange, waiter: Executor, buffer: Tensor, host: Tensor) -> None:
        self._inner = inner
        self._waiter = waiter
        self._begun: Future[None] | None = None
        self._buffer = buffer
        self._host = host
        self.root_ranges, self.root_buffer = inner.root_ranges, inner.root_buffer
        self._stream = torch.cuda.Stream(buffer.device)
        self._copied = torch.cuda.Event()
        self._returned = torch.cuda.Event()

    def start(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._buffer.device))
        # Backward may use another stream than the copy of the last step's sum out of `host`, which must be over first.
        self._stream.wait_event(self._returned)
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._buffer, non_blocking=True)
            self._copied.record(self._stream)
        self._begun = self._waiter.submit(self._begin)

    def wait_at_root(self) -> None:
        self._wait_for_begin()
        self._inner.wait_at_root()

    def send_sums_first(self) -> None:
        self._inner.send_sums_first()

    def wait(self) -> None:
        self._wait_for_begin()
        self._inner.wait()
        self._buffer.copy_(self._host, non_blocking=True)
        self._returned.record(torch.cuda.current_stream(self._buffer.device))

    def _wait_for_begin(self) -> None:
        assert self._begun is not None, "start() was not called"
        self._begun.result()

    def _begin(self) -> None:
        # The current device of a new thread is device 0. Without this block, the call would create a context there.
        with torch.cuda.device(self._buffer.device):
            self._copied.synchronize()
        self._inner.start()


class StagedRowExchange(RowExchange):
    """Runs a row exchange on the host for rows on a device.

    ``start`` blocks until the rows are computed, because their number is not known before.
    """

    def __init__(self, inner: RowExchange, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def start(self, rows: Rows) -> None:
        self._inner.start(Rows(rows.indices.cpu(), rows.values.cpu(), rows.gradients))

    def wait(self) -> Rows:
        rows = self._inner.wait()
        return Rows(rows.indices.to(self._device), rows.values.to(self._device), rows.gradients)

"""A message's place in memory: where gradients are packed, and where the result appears."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn

from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.plan.schedule import Message
from lightning_autosync.runtime.exchanges import Exchange, RowExchange, Rows
from lightning_autosync.runtime.layout import variable_views


class Bucket(ABC):
    """The parameters of one message, and what a step does with their gradients.

    Attributes:
        message: the message.
        parameters: its parameters, in message order.
        active: whether it takes part in this backward pass; the same on every rank.
        missing: gradients still to come in this backward pass.
        started: whether the exchange has begun in this backward pass.
    """

    def __init__(self, message: Message, parameters: list[nn.Parameter]) -> None:
        self.message = message
        self.parameters = parameters
        self.active = False
        self.missing = 0
        self.started = False

    def arm(self) -> None:
        """Begin a backward pass: every parameter that can get a gradient is waited for."""
        self.missing = sum(parameter.requires_grad for parameter in self.parameters)
        self.active = self.missing > 0
        self.started = False

    def _refuse_second(self, place: int) -> NoReturn:
        raise ExchangeError(
            f"the gradient of parameter '{self.message.variables[place]}' arrived twice before it was synchronized: "
            "activation checkpointing needs use_reentrant=False, and a backward pass that ended with an error cannot "
            "be followed by another"
        )

    @abstractmethod
    def watch(self, completed: Callable[[], None] | None) -> None:
        """As of `Exchange.watch`."""

    @abstractmethod
    def packer(self, place: int) -> Callable[[], None]:
        """What takes the gradient of the parameter at ``place``, divided by the number of ranks.

        It runs once a parameter and step while backward waits, so all that a plan fixes is bound beforehand.
        """

    @abstractmethod
    def start(self) -> None:
        """Begin the exchange; parameters that got no gradient count as zero."""

    @abstractmethod
    def resume(self) -> None:
        """Launch what is left of the exchange."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the sum and make it the parameters' gradients."""

    @abstractmethod
    def finite(self) -> bool:
        """Whether the sum has neither infinities nor NaNs; the same on every rank. Call after `finish`."""


class DenseBucket(Bucket):
    """Gradients side by side in one flat buffer; after a step they are views of it.

    Args:
        message: a dense message.
        parameters: in message order.
        buffer: [numel + tail] on the parameters' device.
        exchange: sums the buffer.
        world_size: number of ranks.
    """

    def __init__(
        self,
        message: Message,
        parameters: list[nn.Parameter],
        buffer: Tensor,
        exchange: Exchange,
        world_size: int,
    ) -> None:
        super().__init__(message, parameters)
        self.exchange = exchange
        # Multiplying by a tensor saves a microsecond a parameter; a narrow type would round the share itself.
        exact = buffer.device.type == "cpu" and buffer.dtype.itemsize >= 4
        self._share = torch.tensor(1.0 / world_size, dtype=buffer.dtype) if exact else 1.0 / world_size
        self._buffer = buffer
        self._counts = buffer[message.numel :]
        self._views = variable_views(parameters, buffer, message.axis)
        self._filled = [False] * len(parameters)
        self._packers = [self.packer(place) for place in range(len(parameters))]

    def arm(self) -> None:
        super().arm()
        self._filled[:] = [False] * len(self.parameters)

    def packer(self, place: int) -> Callable[[], None]:
        parameter, view = self.parameters[place], self._views[place]
        filled, share, multiply = self._filled, self._share, torch.mul

        def pack() -> None:
            if filled[place]:
                self._refuse_second(place)
            gradient = parameter.grad
            assert gradient is not None
            if gradient is view:
                view.mul_(share)
            else:
                if gradient.is_sparse:
                    self._refuse_sparse(place)
                multiply(gradient.detach() if gradient.requires_grad else gradient, share, out=view)
                parameter.grad = view
            filled[place] = True

        return pack

    def watch(self, completed: Callable[[], None] | None) -> None:
        self.exchange.watch(completed)

    def _refuse_sparse(self, place: int) -> NoReturn:
        raise PlanError(
            f"parameter '{self.message.variables[place]}' got a sparse gradient, but its message is dense; "
            "describe the variable as 'sparse' in the workload"
        )

    def start(self) -> None:
        self.started = True
        self._counts.fill_(1.0)
        if not all(self._filled):
            self._fill_rest()
        self.exchange.start()

    def resume(self) -> None:
        self.exchange.resume()

    def finish(self) -> None:
        self.exchange.wait()
        if not all(self._filled):
            for place, parameter in enumerate(self.parameters):
                used_somewhere = self._filled[place] or float(self._counts[place]) > 0
                if parameter.requires_grad and used_somewhere:
                    parameter.grad = self._views[place]

    def finite(self) -> bool:
        return _finite(self._buffer)

    def _fill_rest(self) -> None:
        for place, parameter in enumerate(self.parameters):
            if self._filled[place]:
                continue
            if parameter.requires_grad and parameter.grad is not None:
                # Accumulated before, untouched in this pass: it counts as it stands, as with DDP.
                self._packers[place]()
                continue
            if parameter.grad is self._views[place]:
                # Frozen since its last step: its gradient stays what it is, elsewhere.
                parameter.grad = parameter.grad.clone()
            self._views[place].zero_()
            self._counts[place] = 0.0


class RowBucket(Bucket):
    """One table of which only touched rows travel.

    Args:
        message: a row-wise message.
        parameter: [rows, ...].
        exchange: sums rows.
        world_size: number of ranks.
    """

    def __init__(self, message: Message, parameter: nn.Parameter, exchange: RowExchange, world_size: int) -> None:
        super().__init__(message, [parameter])
        self.exchange = exchange
        self._share = 1.0 / world_size
        self._parameter = parameter
        self._width = message.numel // message.rows
        self._own: Rows | None = None
        self._total: Rows | None = None
        self._sparse_layout = message.sparse

    def arm(self) -> None:
        super().arm()
        self._own = self._total = None
        self._sparse_layout = self.message.sparse

    def watch(self, completed: Callable[[], None] | None) -> None:
        self.exchange.watch(completed)

    def packer(self, place: int) -> Callable[[], None]:
        return self._pack

    def _pack(self) -> None:
        if self._own is not None:
            self._refuse_second(0)
        gradient = self._parameter.grad
        assert gradient is not None
        gradient = gradient.detach()
        self._sparse_layout = gradient.is_sparse
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            indices = gradient.indices()[0]
            values = gradient.values().view(-1, self._width)
        else:
            table = gradient.reshape(self.message.rows, self._width)
            indices = touched_rows(table)
            values = table[indices]
        self._own = Rows(indices, values * self._share, gradients=1)

    def start(self) -> None:
        self.started = True
        if self._own is None and self._parameter.requires_grad and self._parameter.grad is not None:
            self._pack()
        if self._own is None:
            none = self._parameter.new_empty(0, self._width)
            self.exchange.start(Rows(none.new_empty(0, dtype=torch.int64), none, gradients=0))
        else:
            self.exchange.start(self._own)

    def resume(self) -> None:
        self.exchange.resume()

    def finish(self) -> None:
        self._total = total = self.exchange.wait()
        parameter = self._parameter
        if total.gradients and parameter.requires_grad:
            if self._sparse_layout:
                parameter.grad = self._sparse(total)
            else:
                # Rows that this rank touched are among the total's, so none of its own values stays behind.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad[total.indices] = total.values.view(-1, *parameter.shape[1:])

    def finite(self) -> bool:
        return self._total is None or _finite(self._total.values)

    def _sparse(self, total: Rows) -> Tensor:
        shape = self._parameter.shape
        values = total.values.view(-1, *shape[1:])
        return torch.sparse_coo_tensor(total.indices[None], values, shape, is_coalesced=True, check_invariants=False)


def touched_rows(table: Tensor) -> Tensor:
    """Indices, ascending, of the rows of ``table`` [rows, width] that are not all zero."""
    return table.any(dim=1).nonzero().view(-1)


def _finite(values: Tensor) -> bool:
    """Whether all are finite; one pass, nothing of their size allocated."""
    return not values.numel() or all(math.isfinite(float(extreme)) for extreme in values.aminmax())

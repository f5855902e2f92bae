"""The gradients of a message: packed for the exchange, then replaced with their mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor, nn

from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.engine.exchanges.rows import RowExchange
from lightning_autosync.engine.notes import Notes
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.plan.schedule import Message


class MessageGradients(ABC):
    """The parameters of one message and their gradients in a step. DDP calls this a bucket.

    Attributes:
        message: the message.
        parameters: its parameters, in message order.
        active: whether the message takes part in this backward pass; the same on every rank.
        missing: number of gradients that have not arrived in this backward pass. After a change it never becomes 0,
            because other gradients may come than the ranks agreed on: the message then starts at the end of the pass.
        started: whether the exchange has begun in this backward pass.
        arrivals: accumulations per backward pass before a gradient is packed, by parameter. More than one occurs only
            in a static graph whose modules run several times under reentrant checkpointing.
    """

    exchange: Exchange | RowExchange

    def __init__(self, message: Message, parameters: list[nn.Parameter], world_size: int) -> None:
        self.message = message
        self.parameters = parameters
        self.active = False
        self.missing = 0
        self.started = False
        self.arrivals = [1] * len(parameters)
        self._world_size = world_size
        self._trainable = [True] * len(parameters)
        self._changed = False

    def arm(self, changed: bool = False) -> None:
        """Begin a backward pass: expect the gradient of every trainable parameter.

        Args:
            changed: whether this rank's parameters are no longer those that the ranks agreed on. The rank then takes
                part as last agreed, and the exchange tells the other ranks: see `change_seen`.
        """
        self._changed = changed
        if not changed:
            self._trainable = [parameter.requires_grad for parameter in self.parameters]
        self.active = any(self._trainable)
        expected = (trainable and times > 0 for trainable, times in zip(self._trainable, self.arrivals, strict=True))
        self.missing = len(self.parameters) + 1 if changed else sum(expected)
        self.started = False

    def _refuse_second(self, place: int) -> NoReturn:
        raise ExchangeError(
            f"parameter '{self.message.variables[place]}' got a second gradient before the first was synchronized. A "
            "module that runs several times under activation checkpointing needs use_reentrant=False or "
            "static_graph=True. LightningModule.backward may make one backward pass only: add up the losses, or use "
            "manual optimization. After a backward pass that raised an error, resume from a checkpoint"
        )

    @property
    @abstractmethod
    def change_seen(self) -> bool:
        """Whether some rank's parameters had changed in this pass; equal on all ranks. Read it after `finish`."""

    def watch(self, completed: Callable[[], None] | None) -> None:
        """See `Exchange.watch`."""
        self.exchange.watch(completed)

    @abstractmethod
    def on_arrival(self, place: int) -> Callable[[], None]:
        """A function to call when the gradient of the parameter at ``place`` is complete.

        It runs within backward, once per parameter and step, so implementations bind beforehand all that is constant.
        """

    @abstractmethod
    def start(self) -> None:
        """Begin the exchange; missing gradients count as zero."""

    def resume(self) -> None:
        """Launch the remaining parts of the exchange."""
        self.exchange.resume()

    @abstractmethod
    def finish(self) -> None:
        """Wait for the sum, and write it to the parameters' gradients."""

    @property
    def has_roots(self) -> bool:
        """Whether ranks have sums before `finish`; see `root_squares`."""
        return False

    def root_squares(self) -> Tensor:
        """For each parameter, the sum of squares of that part of its summed gradient of which this rank is a root.

        It waits until this rank has that part. The sum over ranks is the square of the gradient's norm.

        Returns:
            float64 [number of parameters].

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        raise NotImplementedError("the exchange of this message has no roots")

    @abstractmethod
    def finite(self) -> bool:
        """Whether the sum has no infinities and no NaNs; the same on every rank. Call it after `finish`."""


class DenseGradients(MessageGradients):
    """Gradients in one flat buffer.

    As in DDP, the mean is copied into ``parameter.grad``, which stays the user's own tensor. With ``as_views``, it is a
    view of the buffer after each step.

    Args:
        message: a dense message.
        parameters: its parameters, in message order.
        buffer: [numel + tail], on the parameters' device. The tail counts the ranks with a gradient, by parameter.
        exchange: the exchange that sums the buffer over ranks.
        world_size: number of ranks.
        as_views: whether gradients become views of the buffer, if it holds them in their parameter's memory layout.
        notes: numbers that travel behind the buffer; None without.
    """

    exchange: Exchange

    def __init__(
        self,
        message: Message,
        parameters: list[nn.Parameter],
        buffer: Tensor,
        exchange: Exchange,
        world_size: int,
        as_views: bool = False,
        notes: Notes | None = None,
    ) -> None:
        super().__init__(message, parameters, world_size)
        self.exchange = exchange
        self._notes = notes
        # A tensor as factor saves a microsecond per parameter. In a 16-bit dtype it would round the share itself.
        exact = buffer.device.type == "cpu" and buffer.dtype.itemsize >= 4
        self._share = torch.tensor(1.0 / world_size, dtype=buffer.dtype, device="cpu") if exact else 1.0 / world_size
        self._buffer = buffer
        self._result = buffer if exchange.result is None else exchange.result
        # Compressors need row-major matrices. Other messages keep the parameters' memory order: copies are straight.
        keep = message.axis == 0 and message.compressor.kind == "none"
        self._views = variable_views(parameters, buffer, message.axis, keep)
        self._sums = self._views
        if self._result is not buffer:
            self._sums = variable_views(parameters, self._result, message.axis, keep)
        self._as_view = [
            as_views and not parameter.is_complex() and same_layout(parameter, view)
            for parameter, view in zip(parameters, self._views, strict=True)
        ]
        # Bound beforehand, because each step goes through all parameters.
        self._targets = [(one, view, view.data_ptr()) for one, view in zip(parameters, self._views, strict=True)]
        self._counts = buffer[message.numel :]
        self._filled = [False] * len(parameters)

    def arm(self, changed: bool = False) -> None:
        super().arm(changed)
        self._filled[:] = [False] * len(self.parameters)

    def on_arrival(self, place: int) -> Callable[[], None]:
        parameter, view, pointer = self._targets[place]
        filled, share, name = self._filled, self._share, self.message.name
        shows, is_complex = self._as_view[place], parameter.is_complex()

        def pack() -> None:
            if filled[place]:
                self._refuse_second(place)
            filled[place] = True
            if not self.active:  # the gradient, perhaps a view of the buffer, is not exchanged in this pass
                return
            with profiled(name, "pack"):
                gradient = parameter.grad
                if gradient is None:
                    # An autograd function returned None: the parameter was used, and its gradient is zero.
                    view.zero_()
                elif gradient.is_sparse:
                    self._refuse_sparse(place)
                elif gradient.data_ptr() == pointer:
                    view.mul_(share)
                else:
                    if gradient.requires_grad:
                        gradient = gradient.detach()
                    torch.mul(real_view(gradient) if is_complex else gradient, share, out=view)
                    if shows and view.dtype == parameter.dtype:  # otherwise the parameter's dtype has just changed
                        # Now, so that the next gradient can use the memory. A new alias, because the user may assign
                        # other data to the gradient.
                        parameter.grad = view.detach()

        return pack

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
        if self._changed:
            # Unchanged ranks add at most 1 each, so any changed rank makes the sum negative.
            self._counts.fill_(-self._world_size)
        if self._notes is not None:
            self._notes.fill()
        self.exchange.start()

    def finish(self) -> None:
        with profiled(self.message.name, "wait"):
            self.exchange.wait()
        with profiled(self.message.name, "unpack"):
            self._unpack()

    def _unpack(self) -> None:
        if self._result is not self._buffer and any(self._as_view):
            self._buffer.copy_(self._result)
        targets, sums = [], []
        counts = self._read_counts()
        with torch.no_grad():
            for place, (filled, as_view, target) in enumerate(
                zip(self._filled, self._as_view, self._targets, strict=True)
            ):
                if not filled and not self._used_elsewhere(place, counts):
                    continue
                parameter, view, pointer = target
                gradient = parameter.grad
                if as_view:
                    if gradient is not None and gradient.data_ptr() == pointer:
                        continue
                    if self._buffer.dtype == parameter.dtype:  # otherwise the parameter's dtype has just changed
                        # A new alias, because the user may assign other data to the gradient.
                        parameter.grad = view.detach()
                        continue
                if gradient is None:
                    gradient = parameter.grad = torch.empty_like(parameter)
                targets.append(gradient.detach())
                sums.append(_like(gradient, self._sums[place]))
            if targets:
                torch._foreach_copy_(targets, sums)

    @property
    def change_seen(self) -> bool:
        return float(self._result[-1]) < 0

    @property
    def has_roots(self) -> bool:
        return self.exchange.root_ranges is not None

    def root_squares(self) -> Tensor:
        self.exchange.wait_at_root()
        squares = torch.zeros(len(self.parameters), dtype=torch.float64, device="cpu")
        places, parts = self._root_parts
        if parts:
            wide = torch.promote_types(parts[0].dtype, torch.float32)
            norms = torch.stack(torch._foreach_norm(parts, 2, wide))
            squares.index_add_(0, places, norms.double().square())
        return squares

    @cached_property
    def _root_parts(self) -> tuple[Tensor, list[Tensor]]:
        """The parts of the sum of which this rank is a root, and the place of the parameter of each."""
        sums = self.exchange.root_buffer
        assert sums is not None
        places, parts, end = [], [], 0
        for place, view in enumerate(self._views):
            start, end = end, end + view.numel()
            for first, last in self.exchange.root_ranges or ():
                if max(start, first) < min(end, last):
                    places.append(place)
                    parts.append(sums[max(start, first) : min(end, last)])
        return torch.tensor(places, device="cpu"), parts

    def finite(self) -> bool:
        return all_finite(self._result)

    def _read_counts(self) -> list[float]:
        """The sums of the ranks' counts by parameter, read together: each reading waits for an accelerator.

        It is empty if each parameter that trains has a gradient on this rank.
        """
        if all(self._filled):
            return []
        lacks = any(one.requires_grad for one, filled in zip(self.parameters, self._filled, strict=True) if not filled)
        return self._result[self.message.numel :].tolist() if lacks else []

    def _used_elsewhere(self, place: int, counts: Sequence[float]) -> bool:
        """Whether a parameter that got no gradient on this rank got one on another."""
        if not self.parameters[place].requires_grad:
            return False
        count = counts[place]
        # After a change nothing is counted. Then a sum of zeros may be left out: ranks synchronize it again.
        return count > 0 or (count < 0 and bool(self._sums[place].any()))

    def _fill_rest(self) -> None:
        for place, parameter in enumerate(self.parameters):
            if self._filled[place]:
                continue
            if parameter.requires_grad and parameter.grad is not None:
                # An earlier pass accumulated this gradient, and this pass did not. It counts as it is, as in DDP.
                self.on_arrival(place)()
                continue
            if parameter.grad is not None and parameter.grad.data_ptr() == self._views[place].data_ptr():
                # The parameter was frozen after its last step. Its gradient keeps its value, so it leaves the buffer.
                parameter.grad = parameter.grad.clone()
            self._views[place].zero_()
            self._counts[place] = 0.0


def real_view(tensor: Tensor) -> Tensor:
    """The tensor itself; for a complex one a real view with a last axis of size 2 (real and imaginary part)."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def variable_views(
    parameters: Sequence[nn.Parameter], buffer: Tensor, axis: int, keep_strides: bool = False
) -> list[Tensor]:
    """Views of a message's buffer, one per parameter, in the parameter's shape (for complex ones that of `real_view`).

    Args:
        parameters: the message's parameters, in message order.
        buffer: [numel + tail].
        axis: the message's axis, which is the first one in the buffer.
        keep_strides: whether dense parameters (also ``channels_last`` or transposed ones) keep their memory order in
            the buffer, so that copies are straight; needs ``axis`` 0.
    """
    views, offset = [], 0
    for parameter in map(real_view, parameters):
        part = buffer[offset : offset + parameter.numel()]
        if axis:
            shape = (parameter.shape[axis], *parameter.shape[:axis], *parameter.shape[axis + 1 :])
            views.append(part.view(shape).movedim(0, axis))
        elif keep_strides and is_dense(parameter):
            views.append(part.as_strided(parameter.shape, parameter.stride(), part.storage_offset()))
        else:
            views.append(part.view(parameter.shape))
        offset += parameter.numel()
    return views


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of equal shape have the same strides, except on axes of size 1."""
    return all(
        mine == theirs for mine, theirs, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size > 1
    )


def _like(gradient: Tensor, values: Tensor) -> Tensor:
    """``values`` of a buffer, as complex numbers if the gradient is complex (see `real_view`)."""
    return torch.complex(values[..., 0], values[..., 1]) if gradient.is_complex() else values


def all_finite(values: Tensor) -> bool:
    """Whether all ``values`` are finite; in one pass, without a temporary tensor of their size."""
    return not values.numel() or all(math.isfinite(float(extreme)) for extreme in values.aminmax())

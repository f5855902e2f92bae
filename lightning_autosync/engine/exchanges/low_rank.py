"""PowerSGD: matrices are sent as two factors, each summed like any message (Vogels et al., 2019, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.plan.codecs.powersgd import Factor, low_rank_layout
from lightning_autosync.plan.schedule import Message

MakeExchange = Callable[[int, Tensor], Exchange]


class LowRankExchange(Exchange):
    """Sums one message in two rounds, one per factor.

    Each rank orthogonalizes the first factor itself, because sharing the result would need a third round. The factor is
    the same on all ranks, so replicas on equal processors stay equal bit by bit. On different processors the basis may
    differ in its last bits, as the optimizer's arithmetic does.

    Args:
        message: a message with two rounds.
        shapes: shapes of its variables, in message order.
        buffer: [numel + tail], values divided by the number of ranks; overwritten with their low-rank sum.
        world_size: number of ranks.
        make: makes the exchange of a round, from the round's index and its buffer.
    """

    def __init__(
        self,
        message: Message,
        shapes: Sequence[tuple[int, ...]],
        buffer: Tensor,
        world_size: int,
        make: MakeExchange,
    ) -> None:
        self._name = message.name
        self._factors, _ = low_rank_layout(shapes, message.compressor.rank)
        self._world_size = world_size
        self._first_buffer = buffer.new_zeros(message.rounds[0].length)
        self._second_buffer = buffer.new_zeros(message.rounds[1].length)
        self._first = make(0, self._first_buffer)
        self._second = make(1, self._second_buffer)
        self._tail = buffer[message.numel :]
        self._first_tail = self._first_buffer[self._first_buffer.numel() - message.tail :]
        offsets = [0]
        for shape in shapes:
            offsets.append(offsets[-1] + prod(shape))
        self._values = [buffer[start:stop] for start, stop in pairwise(offsets)]
        self.residual = torch.zeros_like(buffer) if message.compressor.error_feedback else None
        self._lost = [
            self.residual[start:stop] if self.residual is not None else None for start, stop in pairwise(offsets)
        ]
        self._draw_factors()

    def start(self) -> None:
        for factor, values, lost in zip(self._factors, self._values, self._lost, strict=True):
            if not factor.rank:
                self._first_of(factor).copy_(values)
                continue
            if lost is not None:
                values += lost
            torch.mm(_matrix(values, factor), self._second_of(factor), out=self._first_of(factor))
        self._first_tail.copy_(self._tail)
        self._first.start()

    def resume(self) -> None:
        with profiled(self._name, "wait"):
            self._first.resume()
            self._first.wait()
        with profiled(self._name, "launch"):
            self._start_second()

    def _start_second(self) -> None:
        for factor, values in zip(self._factors, self._values, strict=True):
            if factor.rank:
                basis = self._first_of(factor)
                # QR does not support 16-bit dtypes.
                basis.copy_(_orthonormal(basis.float() if basis.dtype.itemsize < 4 else basis))
                torch.mm(_matrix(values, factor).t(), basis, out=self._second_of(factor))
        self._second.start()

    def wait(self) -> None:
        self._second.resume()
        self._second.wait()
        for factor, values, lost in zip(self._factors, self._values, self._lost, strict=True):
            if not factor.rank:
                values.copy_(self._first_of(factor))
                continue
            product = torch.mm(self._first_of(factor), self._second_of(factor).t()).view(-1)
            if lost is not None:
                # `product` approximates the sum of all ranks' values, so each rank's share in it is 1 / world_size.
                torch.sub(values, product, alpha=1 / self._world_size, out=lost).nan_to_num_(0.0, 0.0, 0.0)
            values.copy_(product)
        # The factors start the next step's power iteration, which could never get rid of infinities or NaNs.
        if not bool(torch.isfinite(self._second_buffer).all()):
            self._draw_factors()
        self._tail.copy_(self._first_tail)

    @property
    def warm_start(self) -> Tensor:
        """The second factors, which start the next step's power iteration; equal on all ranks."""
        return self._second_buffer

    def _draw_factors(self) -> None:
        # A fixed seed makes the factors equal on all ranks, and leaves torch's global generator alone.
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = torch.randn(self._second_buffer.numel(), generator=generator, dtype=torch.float32, device="cpu")
        self._second_buffer.copy_(drawn)

    def _first_of(self, factor: Factor) -> Tensor:
        part = self._first_buffer[factor.first : factor.first + factor.first_numel]
        return part.view(factor.rows, factor.rank) if factor.rank else part

    def _second_of(self, factor: Factor) -> Tensor:
        part = self._second_buffer[factor.second : factor.second + factor.second_numel]
        return part.view(factor.columns, factor.rank)


def _matrix(values: Tensor, factor: Factor) -> Tensor:
    return values.view(factor.rows, factor.columns)


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of ``columns`` [rows, rank], equal for all linear algebra libraries up to rounding.

    Libraries differ in the signs of the vectors, so the signs are chosen here: the diagonal of R is not negative.
    """
    basis, coefficients = torch.linalg.qr(columns)
    return basis * torch.where(coefficients.diagonal() < 0, -1.0, 1.0)

"""Paced compute: a module with a workload's parameters whose passes take the profiled times but occupy no core.

Forward, backward and the optimizer's step sleep. Each gradient appears at its ready time, counted from the start of the
backward pass, so that errors of single sleeps do not add up. While the module waits for the next gradient, the
communication of earlier gradients continues, as beside an accelerator.
"""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload import Variable, Workload

_IN_ORDER = 2
"""Gradients of one autograd function that autograd accumulates in the function's order; it shuffles more of them."""


class PacedModule(nn.Module):
    """A module built from a workload. Called with a seed, it returns a loss of zero.

    Parameters have the workload's names, shapes and dtypes, and are zero. Gradients appear in the workload's
    `Workload.ready_order`, also those that are ready at the same time. They are random. Those of dense
    variables are drawn once, from the first seed. For ``row_sparse`` and ``sparse`` variables each step draws the
    touched rows from its seed. Gradients are not copied to ``parameter.grad`` but share their memory with it. So DDP's
    mean overwrites the gradient that the next step returns. Then all ranks have the same gradient, and its mean does
    not change any more.

    Args:
        workload: variables and times; an unknown time is 0. The gradient of a variable without ready time appears at
            the end of backward.
        speed: relative speed of this rank's node; the workload's times are divided by it.

    Raises:
        WorkloadError: a variable's name is not valid for a parameter, or a table's number of touched rows is unknown.
    """

    def __init__(self, workload: Workload, speed: float = 1.0) -> None:
        super().__init__()
        for variable in workload.variables:
            _place(self, variable)
        parameters = dict(self.named_parameters())
        self._forward_time = workload.forward_time / speed
        self._backward_time = workload.backward_time / speed
        self._optimizer_time = workload.optimizer_time / speed
        self._pace = _Pace()
        in_order = [workload.variable(name) for name in workload.ready_order]
        self._stages = [
            _Stage(
                ready / speed, [(parameters[variable.name], _KINDS[variable.kind](variable)) for variable in members]
            )
            for ready, members in groupby(in_order, lambda v: workload.backward_time if v.ready is None else v.ready)
        ]
        self._chain: Tensor | None = None

    def forward(self, seed: Tensor) -> Tensor:
        """A forward pass for the batch that the integer ``seed`` represents."""
        self._pace.restart()
        self._pace.seed = int(seed)
        # The chain does not depend on the pass and saves no tensors, so all passes share it. Building it in each pass
        # would occupy a core for 20 us per gradient, which a job on an accelerator does not need.
        if self._chain is None:
            self._chain = self._make_chain()
        self._pace.until(self._forward_time)
        return _Restart.apply(self._chain, self._pace)

    def step_optimizer(self) -> None:
        """The optimizer's step: waits for its time; parameters stay zero."""
        self._pace.restart()
        self._pace.until(self._optimizer_time)

    def _make_chain(self) -> Tensor:
        """The graph whose backward pass is: start, first stage, ..., last stage, end."""
        value = _Until.apply(torch.zeros((), requires_grad=True), self._pace, self._backward_time)
        for stage in reversed(self._stages):
            for start in reversed(range(0, len(stage.parameters), _IN_ORDER)):
                value = _Gradients.apply(value, self._pace, stage, start, *stage.parameters[start : start + _IN_ORDER])
        return value


class _Pace:
    """Deadlines relative to a common start, and the seed of the current pass."""

    seed = 0

    def restart(self) -> None:
        self._origin = time.monotonic()

    def until(self, seconds: float) -> None:
        """Sleep until ``seconds`` after the start."""
        left = self._origin + seconds - time.monotonic()
        if left > 0:
            time.sleep(left)


class _Dense:
    """A dense gradient in a buffer that is drawn once."""

    def __init__(self, variable: Variable) -> None:
        self._shape = variable.shape
        self._dtype = getattr(torch, variable.dtype)
        self._buffer: Tensor | None = None

    def draw(self, seed: int) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self._shape, dtype=self._dtype)
            self._buffer.uniform_(-1, 1, generator=_generator(seed))
        return self._buffer.detach()  # a new tensor on the same memory, which autograd takes over without a copy


class _Rows:
    """The touched rows and their values for each seed, cached because drawing takes longer than using them."""

    def __init__(self, variable: Variable) -> None:
        if variable.rows is None:
            raise WorkloadError(
                f"variable '{variable.name}': kind '{variable.kind}' needs `rows`, the number of rows that a step "
                "touches"
            )
        self._shape = variable.shape
        self._dtype = getattr(torch, variable.dtype)
        self._count = max(1, round(variable.rows))
        self._drawn: dict[int, tuple[Tensor, Tensor]] = {}

    def rows(self, seed: int) -> tuple[Tensor, Tensor]:
        if seed not in self._drawn:
            generator = _generator(seed)
            chosen = torch.randperm(self._shape[0], generator=generator)[: self._count]
            values = torch.empty(self._count, *self._shape[1:], dtype=self._dtype)
            self._drawn[seed] = chosen, values.uniform_(-1, 1, generator=generator)
        return self._drawn[seed]


class _DenseRows(_Rows):
    """A dense table that is zero except in the touched rows."""

    def __init__(self, variable: Variable) -> None:
        super().__init__(variable)
        self._table = torch.zeros(self._shape, dtype=self._dtype)

    def draw(self, seed: int) -> Tensor:
        chosen, values = self.rows(seed)
        self._table.zero_()  # the whole table, since the mean written to it also has the rows of other ranks
        self._table[chosen] = values
        return self._table.detach()


class _SparseRows(_Rows):
    """A sparse tensor of the touched rows, as from ``nn.Embedding(sparse=True)``."""

    def draw(self, seed: int) -> Tensor:
        chosen, values = self.rows(seed)
        return torch.sparse_coo_tensor(chosen[None].clone(), values.clone(), self._shape, check_invariants=False)


_KINDS: dict[str, type[_Dense | _DenseRows | _SparseRows]] = {
    "dense": _Dense,
    "row_sparse": _DenseRows,
    "sparse": _SparseRows,
}


class _Stage:
    """Variables whose gradients become ready at the same time, one after the other."""

    def __init__(self, ready: float, members: list[tuple[nn.Parameter, _Dense | _DenseRows | _SparseRows]]) -> None:
        self.ready = ready
        self.parameters = [parameter for parameter, _ in members]
        self._gradients = [gradient for _, gradient in members]
        self._drawn: list[Tensor] = []

    def draw(self, seed: int) -> None:
        """Draw all gradients before the stage's time, so that drawing delays none of them."""
        self._drawn = [gradient.draw(seed) for gradient in self._gradients]

    def take(self, count: int) -> list[Tensor]:
        """The next gradients. None stays here: autograd would copy a gradient that somebody else holds."""
        taken, self._drawn = self._drawn[:count], self._drawn[count:]
        return taken


class _Gradients(torch.autograd.Function):
    """An identity whose backward waits for the stage's time and returns gradients of the stage from ``start`` on."""

    @staticmethod
    def forward(
        context: Any, value: Tensor, pace: _Pace, stage: _Stage, start: int, *parameters: nn.Parameter
    ) -> Tensor:
        context.pace, context.stage, context.start, context.count = pace, stage, start, len(parameters)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, output: Tensor) -> tuple[Tensor | None, ...]:
        if context.start == 0:
            context.stage.draw(context.pace.seed)
        context.pace.until(context.stage.ready)
        return output, None, None, None, *context.stage.take(context.count)


class _Until(torch.autograd.Function):
    """An identity whose backward waits for a time."""

    @staticmethod
    def forward(context: Any, value: Tensor, pace: _Pace, seconds: float) -> Tensor:
        context.pace, context.seconds = pace, seconds
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, output: Tensor) -> tuple[Tensor, None, None]:
        context.pace.until(context.seconds)
        return output, None, None


class _Restart(torch.autograd.Function):
    """An identity whose backward restarts the clock."""

    @staticmethod
    def forward(context: Any, value: Tensor, pace: _Pace) -> Tensor:
        context.pace = pace
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, output: Tensor) -> tuple[Tensor, None]:
        context.pace.restart()
        return output, None


def _place(root: nn.Module, variable: Variable) -> None:
    """Register a parameter under its dotted name, and create the modules on the path."""
    *path, leaf = variable.name.split(".")
    owner = root
    try:
        for index, part in enumerate(path):
            last = index == len(path) - 1
            if part not in owner._modules:
                owner.add_module(part, _holder(variable, leaf) if last else nn.Module())
            owner = owner.get_submodule(part)
        if leaf not in owner._parameters:
            value = torch.zeros(variable.shape, dtype=getattr(torch, variable.dtype))
            owner.register_parameter(leaf, nn.Parameter(value))
    except KeyError as error:
        raise WorkloadError(f"variable '{variable.name}': no module has a parameter with this name: {error}") from None


def _holder(variable: Variable, leaf: str) -> nn.Module:
    """The module of a parameter; an embedding for sparse gradients, since DDP accepts them of embeddings only."""
    if variable.kind != "sparse":
        return nn.Module()
    if leaf != "weight" or len(variable.shape) != 2:
        raise WorkloadError(f"variable '{variable.name}': kind 'sparse' is allowed for the weight of an embedding only")
    rows, width = variable.shape
    table = torch.zeros(rows, width, dtype=getattr(torch, variable.dtype))
    return nn.Embedding(rows, width, sparse=True, _weight=table)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

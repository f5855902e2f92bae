"""What ranks do in tests of who owns gradients: the same steps under DDP and under the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import Net, batches, engine

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders
from lightning_autosync.workload import describe

STEPS = 4


class Strided(nn.Module):
    """Parameters whose elements lie in memory in another order than their shape says."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5 * 6 * 6, 7)
        self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, images: Tensor) -> Tensor:
        images = images.expand(-1, 3, -1, -1)
        return self.head(torch.relu(self.conv(images)).flatten(1)) * self.scale


class Waves(nn.Module):
    """Complex parameters beside real ones, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.filter = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))
        self.head = nn.Linear(5, 5)

    def forward(self, images: Tensor) -> Tensor:
        spectrum = torch.fft.fft(images.mean(dim=(1, 2)))
        return self.head((spectrum @ self.filter).abs() + self.bias)


class Twice(nn.Module):
    """One layer that runs twice under checkpointing that differentiates within backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.again = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        for _ in range(2):
            hidden = torch.tanh(checkpoint(self.again, hidden, use_reentrant=True))
        return self.head(hidden)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, parameter: Tensor) -> Tensor:
        return values + parameter

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Withheld(Net):
    """A parameter in the graph for which backward returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.withheld = nn.Parameter(torch.ones(5))

    def forward(self, images: Tensor) -> Tensor:
        return _NoGradient.apply(super().forward(images), self.withheld)


Job = Callable[[nn.Module, Callable[..., Tensor], int], list[Tensor]]


def _loss(forward: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(forward(batch[0]), batch[1])


def _steps(
    module: nn.Module, forward: Callable[..., Tensor], rank: int, optimizer: torch.optim.Optimizer, edit: Any = None
) -> list[Tensor]:
    """Weights after some steps; ``edit`` runs between backward and the optimizer."""
    for batch in batches(rank, STEPS, torch.float32):
        _loss(forward, batch).backward()
        if edit is not None:
            edit(module)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in module.parameters()]


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain(module: nn.Module, forward: Callable[..., Tensor], rank: int) -> list[Tensor]:
    return _steps(module, forward, rank, _sgd(module))


def other_data(module: nn.Module, forward: Callable[..., Tensor], rank: int) -> list[Tensor]:
    """Gradients get other data: masks, clamps, filters."""

    def edit(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)

    optimizer = _sgd(module)
    for batch in batches(rank, STEPS, torch.float32):
        _loss(forward, batch).backward()
        edit(module)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [parameter.detach().clone() for parameter in module.parameters()]


def fused(module: nn.Module, forward: Callable[..., Tensor], rank: int) -> list[Tensor]:
    return _steps(module, forward, rank, torch.optim.Adam(module.parameters(), lr=0.01, fused=True))


def kept(module: nn.Module, forward: Callable[..., Tensor], rank: int) -> list[Tensor]:
    """Gradients that a user keeps stay what they are when the next ones come."""
    found: list[Tensor] = []
    for batch in batches(rank, 2, torch.float32):
        for parameter in module.parameters():
            parameter.grad = None
        _loss(forward, batch).backward()
        found += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return found


def flat(module: nn.Module, forward: Callable[..., Tensor], rank: int) -> list[Tensor]:
    """Gradients are views of the user's own buffer, and stay so."""
    buffer = torch.zeros(sum(parameter.numel() for parameter in module.parameters()))
    offset = 0
    for parameter in module.parameters():
        parameter.grad = buffer[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    for batch in batches(rank, 2, torch.float32):
        buffer.zero_()
        _loss(forward, batch).backward()
    return [buffer]


def detached(module: nn.Module, forward: Callable[..., Tensor], rank: int) -> list[Tensor]:
    return _steps(
        module,
        forward,
        rank,
        _sgd(module),
        lambda module: [parameter.grad.detach_() for parameter in module.parameters()],
    )


def late_hooks(module: nn.Module, forward: Callable[..., Tensor], rank: int) -> list[Tensor]:
    """Hooks registered after synchronization was set up see and change each rank's own gradient."""

    def edit(parameter: Tensor) -> None:
        parameter.grad.mul_(rank + 1.0).clamp_(-0.02, 0.02)

    handles = [parameter.register_post_accumulate_grad_hook(edit) for parameter in module.parameters()]
    found = plain(module, forward, rank)
    for handle in handles:
        handle.remove()
    return found


def strides(module: nn.Module, forward: Callable[..., Tensor], rank: int) -> list[Tensor]:
    """The strides of gradients, for those of DDP."""
    _loss(forward, next(batches(rank, 1, torch.float32))).backward()
    return [torch.tensor(parameter.grad.stride()) for parameter in module.parameters() if parameter.grad is not None]


def gap(model: str, job: str, topology: str, gradient_as_bucket_view: bool = False) -> float:
    """The largest difference between what a job returns under DDP and under the engine, relative to the largest value.

    Shapes that differ are an infinite gap.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    static = model == "Twice"
    results = []
    for ddp in (True, False):
        torch.manual_seed(0)
        module = globals()[model]()
        if ddp:
            wrapped = DistributedDataParallel(
                module, gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static
            )
            results.append(globals()[job](module, wrapped, rank))
            continue
        nodes = 1 if topology == "shared_memory" else size
        cluster = ClusterSpec.uniform(nodes=nodes, devices=size // nodes, bandwidth=1e8)
        plan = builders.all_reduce(describe(module), cluster, topology=topology, bucket_bytes=1000)
        options = {"gradient_as_bucket_view": gradient_as_bucket_view, "static_graph": static}
        with engine(module, plan, cluster, None, **options):
            results.append(globals()[job](module, module, rank))
    theirs, ours = results
    if [value.shape for value in theirs] != [value.shape for value in ours]:
        return float("inf")
    return max(float((a - b).abs().max()) / max(1e-6, float(a.abs().max())) for a, b in zip(theirs, ours, strict=True))

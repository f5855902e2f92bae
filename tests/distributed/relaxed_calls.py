"""What ranks do in tests of partial reduce and periodic averaging."""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from training import Net, batches, subgroup

from lightning_autosync.plan import Consistency
from lightning_autosync.runtime.relaxed.averaging_worker import AveragingWorker
from lightning_autosync.runtime.relaxed.mesh import Mesh
from lightning_autosync.runtime.relaxed.partial_reduce import PartialReduce
from lightning_autosync.runtime.relaxed.periodic import Periodic
from lightning_autosync.runtime.relaxed.tensors import ModelTensors

LR = 0.1


class NormedNet(Net):
    """With buffers: running means of floating point, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.norm(images))


def make_worker(mesh: Mesh, module: nn.Module, settings: dict[str, Any], **options: Any) -> AveragingWorker:
    consistency = Consistency(**settings)
    kind = PartialReduce if consistency.mode == "partial_reduce" else Periodic
    return kind(mesh, ModelTensors.of(module), consistency, timeout=60.0, stall=20.0, **options)


def digest(module: nn.Module) -> str:
    """Equal for models that are equal to the last bit, buffers included."""
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if value.is_floating_point():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def weights(module: nn.Module) -> list[float]:
    return [float(value) for parameter in module.parameters() for value in parameter.detach().reshape(-1)]


def local_step(module: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """Gradients of a batch, in place of the last ones."""
    optimizer.zero_grad()
    images, labels = batch
    nn.functional.cross_entropy(module(images), labels).backward()


def train_relaxed(
    key: str,
    settings: dict[str, Any],
    size: int,
    epochs: list[list[int]],
    momentum: float = 0.0,
    norm: bool = False,
    pauses: list[float] | None = None,
    resume_after: int | None = None,
) -> dict[str, Any] | None:
    """Train some epochs; what this rank found, or None if it is not one of the first ``size``.

    Args:
        key: unique in the life of the store.
        epochs: for each epoch, the steps of each rank.
        momentum: of the local SGD.
        pauses: seconds that each rank sleeps before a step.
        resume_after: epochs after which everything is thrown away and loaded from a checkpoint.
    """
    rank = dist.get_rank()
    if rank >= size:
        return None
    store = dist.distributed_c10d._get_default_store()
    data = list(batches(rank, sum(steps[rank] for steps in epochs), torch.float64))
    checkpoint: dict[str, Any] | None = None
    groups: list[tuple[int, list[int], str]] = []
    drained: list[str] = []
    progress: list[int] = []
    spans = [range(len(epochs))]
    if resume_after is not None:
        spans = [range(resume_after), range(resume_after, len(epochs))]
    with ExitStack() as open_now:
        for part, span in enumerate(spans):
            torch.manual_seed(rank)  # different models; the start makes them one
            module = (NormedNet() if norm else Net()).double()
            optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=momentum)
            mesh = Mesh.open(dist.PrefixStore(f"{key}-{part}", store), rank, size, address="127.0.0.1")
            open_now.callback(mesh.close)
            worker = make_worker(mesh, module, settings)
            open_now.callback(worker.close)
            if checkpoint is not None:
                worker.load_state_dict(checkpoint["worker"])
                module.load_state_dict(checkpoint["model"])
                optimizer.load_state_dict(checkpoint["optimizer"])
            worker.start()
            for epoch in span:
                worker.resume()
                for _ in range(epochs[epoch][rank]):
                    if pauses is not None:
                        time.sleep(pauses[rank])
                    local_step(module, optimizer, data.pop(0))
                    worker.step(optimizer, 4)
                    if worker.group is not None:
                        groups.append((worker.group.generation, list(worker.group.members), digest(module)))
                    progress.append(worker.progress)
                worker.finish()
                worker.drain()
                drained.append(digest(module))
            checkpoint = {
                "worker": worker.state_dict(),
                "model": module.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            open_now.close()
    return {"weights": weights(module), "drained": drained, "groups": groups, "progress": progress}


def train_ddp(size: int, steps: int, momentum: float = 0.0) -> list[float] | None:
    """The same training by DDP; rank 0's initial model."""
    group = subgroup(size)
    if group is None:
        return None
    torch.manual_seed(0)
    module = Net().double()
    model = DistributedDataParallel(module, process_group=group)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=momentum)
    for batch in batches(dist.get_rank(), steps, torch.float64):
        local_step(model, optimizer, batch)
        optimizer.step()
    return weights(module)

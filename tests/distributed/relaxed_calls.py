"""What ranks do in tests of partial reduce and periodic averaging."""

from __future__ import annotations

import hashlib
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from strangers import SECRET
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from training import Net, batches, subgroup

from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.averaging_worker import AveragingWorker, PartialReduce
from lightning_autosync.relaxed.model_state import ModelTensors
from lightning_autosync.relaxed.periodic import Periodic
from lightning_autosync.relaxed.transport.mesh import Mesh

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
    """Equal for models that are equal to the last bit, but for counters, which stay each rank's own."""
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


@dataclass
class Notes:
    """What a rank found: its groups (number, ranks, model afterwards), models after drains, progress after steps."""

    groups: list[tuple[int, list[int], str]] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)


class Trainee:
    """A worker's model and data, in one mesh after another.

    Args:
        key: unique in the life of the store.
        size: ranks of the mesh.
        settings: of the consistency.
        epochs: for each epoch, the steps of each rank.
        momentum: of the local SGD.
        norm: whether the model has buffers.
        pause: seconds of sleep before each step.
    """

    def __init__(
        self,
        key: str,
        size: int,
        settings: dict[str, Any],
        epochs: list[list[int]],
        momentum: float,
        norm: bool,
        pause: float,
    ) -> None:
        self._key, self._size, self._settings, self._epochs = key, size, settings, epochs
        self._momentum, self._norm, self._pause = momentum, norm, pause
        self._rank = dist.get_rank()
        self._store = dist.distributed_c10d._get_default_store()
        self._data = list(batches(self._rank, sum(steps[self._rank] for steps in epochs), torch.float64))
        self._checkpoint: dict[str, Any] | None = None
        self.notes = Notes()
        self.module: nn.Module

    def run(self, part: int, span: range) -> None:
        """Some of the epochs, from the last part's checkpoint on."""
        torch.manual_seed(self._rank)  # different models; the start makes them one
        self.module = (NormedNet() if self._norm else Net()).double()
        optimizer = torch.optim.SGD(self.module.parameters(), lr=LR, momentum=self._momentum)
        store = dist.PrefixStore(f"{self._key}-{part}", self._store)
        with (
            closing(Mesh.open(store, self._rank, self._size, secret=SECRET, address="127.0.0.1")) as mesh,
            closing(make_worker(mesh, self.module, self._settings)) as worker,
        ):
            self._load(worker, optimizer)
            worker.start()
            for epoch in span:
                self._pass(worker, optimizer, self._epochs[epoch][self._rank])
            self._checkpoint = {
                "worker": worker.state_dict(),
                "model": self.module.state_dict(),
                "optimizer": optimizer.state_dict(),
            }

    def _load(self, worker: AveragingWorker, optimizer: Optimizer) -> None:
        if self._checkpoint is not None:
            worker.load_state_dict(self._checkpoint["worker"])
            self.module.load_state_dict(self._checkpoint["model"])
            optimizer.load_state_dict(self._checkpoint["optimizer"])

    def _pass(self, worker: AveragingWorker, optimizer: Optimizer, steps: int) -> None:
        worker.resume()
        for _ in range(steps):
            time.sleep(self._pause)
            local_step(self.module, optimizer, self._data.pop(0))
            worker.step(optimizer, 4)
            if worker.group is not None:
                group = worker.group
                self.notes.groups.append((group.generation, list(group.members), digest(self.module)))
            self.notes.progress.append(worker.progress)
        worker.finish()
        worker.drain()
        self.notes.drained.append(digest(self.module))


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
    trainee = Trainee(key, size, settings, epochs, momentum, norm, pauses[rank] if pauses else 0.0)
    spans = [range(len(epochs))]
    if resume_after is not None:
        spans = [range(resume_after), range(resume_after, len(epochs))]
    for part, span in enumerate(spans):
        trainee.run(part, span)
    return {"weights": weights(trainee.module), **asdict(trainee.notes)}


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

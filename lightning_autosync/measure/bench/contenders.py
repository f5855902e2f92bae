"""Contenders inside a worker: all of them alive side by side, each stepped when its turn comes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import BufferBroadcast
from lightning_autosync.measure.bench.hooks import install
from lightning_autosync.measure.bench.settings import DDPOptions
from lightning_autosync.measure.models.models import Model
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.workload import Workload, variable_names

SEED = 0


class Contender(ABC):
    """A model in training; every contender runs the same loop, and only the synchronization differs.

    Args:
        model: the recipe; modules of all contenders and ranks start with the same weights.
        sparse: whether its embeddings make sparse gradients.
        cluster: the machines, of which nodes may compute at different speeds.
    """

    def __init__(self, model: Model, sparse: bool, cluster: ClusterSpec) -> None:
        rank = dist.get_rank()
        torch.manual_seed(SEED)
        self.module = model.module(sparse, cluster.nodes[cluster.rank_nodes[rank]].speed)
        self._batches = model.batches(rank)
        self._steps = 0
        self._after_step: Callable[[], None] | None = None
        self._step_optimizer = model.optimizer(self.module)

    @property
    @abstractmethod
    def synchronized(self) -> nn.Module:
        """What is called for the loss."""

    def step(self) -> None:
        """One training step, on the next batch."""
        self.backward(self._steps % len(self._batches))
        self._steps += 1
        if self._step_optimizer is not None:
            self._step_optimizer()
        if self._after_step is not None:
            self._after_step()
        self.module.zero_grad()

    def backward(self, batch: int = 0) -> None:
        """Forward and backward of one batch; gradients hold the mean over ranks afterwards."""
        self.synchronized(*self._batches[batch]).backward()

    def close(self) -> None:  # noqa: B027 - most have nothing to give up
        """Give up connections."""


class DDPContender(Contender):
    """``DistributedDataParallel``; a bucket cap of ``default`` leaves DDP its own rule."""

    def __init__(self, model: Model, sparse: bool, options: DDPOptions, cluster: ClusterSpec) -> None:
        super().__init__(model, sparse, cluster)
        self._wrapped = DistributedDataParallel(
            self.module,
            bucket_cap_mb=None if options.bucket_cap_mb == "default" else options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            init_sync=False,  # all ranks start from one seed
        )
        self._after_step = install(self._wrapped, options, cluster)

    @property
    def synchronized(self) -> nn.Module:
        return self._wrapped


class PlanContender(Contender):
    """The engine, following a plan; buffers follow rank 0 before each forward pass, as with DDP."""

    def __init__(
        self,
        model: Model,
        sparse: bool,
        plan: SyncPlan,
        workload: Workload,
        cluster: ClusterSpec,
        timeout: float,
    ) -> None:
        super().__init__(model, sparse, cluster)
        schedule = compile_plan(plan, workload, cluster)
        self._engine = Engine(variable_names(self.module), schedule, cluster=cluster, timeout=timeout)
        self._buffers = BufferBroadcast(self.module)

    @property
    def synchronized(self) -> nn.Module:
        return self.module

    def backward(self, batch: int = 0) -> None:
        self._buffers.before_forward(synchronizes=True)
        super().backward(batch)

    def close(self) -> None:
        self._engine.close()


_live: dict[str, Contender] = {}
_references: dict[str, list[Tensor]] = {}


def set_up(
    name: str,
    model: dict[str, Any],
    sparse: bool,
    cluster: dict[str, Any],
    timeout: float,
    ddp: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
) -> None:
    """Make a contender: DDP with the arguments ``ddp``, or ``plan`` for ``workload``."""
    recipe, described = model_of(model), ClusterSpec.from_dict(cluster)
    if ddp is not None:
        _live[name] = DDPContender(recipe, sparse, DDPOptions(**ddp), described)
        return
    _live[name] = PlanContender(
        recipe,
        sparse,
        SyncPlan.from_dict(plan),
        Workload.from_dict(workload),
        described,
        timeout,
    )


def tear_down(name: str) -> None:
    """End a contender; nothing happens if there is none of that name."""
    _references.pop(name, None)
    contender = _live.pop(name, None)
    if contender is not None:
        contender.close()


def forget() -> None:
    """End every contender, whatever state it is in."""
    for name in list(_live):
        with suppress(Exception):
            tear_down(name)


def measure(name: str, steps: int) -> list[float]:
    """Seconds of each of ``steps`` steps of a contender; ranks begin together."""
    contender = _live[name]
    dist.barrier()
    times = [time.perf_counter()]
    for _ in range(steps):
        contender.step()
        times.append(time.perf_counter())
    return [end - start for start, end in pairwise(times)]


def keep_gradients(name: str) -> None:
    """Let a contender do a forward and backward of the first batch, for others to be compared with by `deviation`."""
    _references[name] = _gradients(_live[name])


def deviation(name: str, reference: str) -> float:
    """How far a contender's gradients are from the kept ones of a reference: length of the difference over length.

    Both must be at the same weights, as before their first step, and see the first batch.
    """
    found, expected = _gradients(_live[name]), _references[reference]
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    length = sum(float(gradient.square().sum()) for gradient in expected)
    return (difference / length) ** 0.5


def _gradients(contender: Contender) -> list[Tensor]:
    torch.manual_seed(SEED + dist.get_rank())  # what is dropped at random is the same with each contender
    contender.backward()
    gradients = []
    for parameter in contender.module.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad.to_dense().clone())
    contender.module.zero_grad()
    return gradients

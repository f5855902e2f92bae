"""Replicas of a model in a worker: DDP, or the engine that follows a plan, in the same training loop.

This module does not import ``annotations`` from ``__future__``: DDP compares the annotations of a communication hook
with types, and postponed annotations are strings.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine, StepOverlap, defer_steps
from lightning_autosync.engine.collectives import BufferBroadcast
from lightning_autosync.engine.engine import Waits
from lightning_autosync.engine.tracing import Recorder
from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.reduction import GradientReduction, ReductionSettings
from lightning_autosync.hybrid.execution.split_model import SplitModel
from lightning_autosync.measure.bench.settings import DDPOptions
from lightning_autosync.measure.models.model import Batch, Model
from lightning_autosync.measure.models.paced import PacedModule
from lightning_autosync.measure.workers.devices import Device
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.plan.schedule import first_parameters_first
from lightning_autosync.workload import Workload, variable_names
from lightning_autosync.workload.capturing import clock_of

SEED = 0
_FIRST_HOOKED_STEP = 2
"""First step of hooks that keep state by bucket, since DDP rebuilds its buckets after the first step."""


@dataclass(frozen=True)
class Training:
    """What this rank trains, independent of synchronization.

    Attributes:
        module: module that returns the loss of a batch.
        batches: batches, used in turn.
        step_optimizer: makes the optimizer's step; None if there is no optimizer.
        optimizer: the optimizer; None if there is none, or if its step is paced.
    """

    module: nn.Module
    batches: Sequence[Batch]
    step_optimizer: Callable[[], object] | None
    optimizer: Optimizer | None = None

    @classmethod
    def of(cls, model: Model, sparse: bool, cluster: ClusterSpec, device: Device = "cpu") -> Self:
        """From a recipe; the modules of all contenders and ranks start with the same weights."""
        torch.manual_seed(SEED)
        module = model.module(sparse, _speed(cluster)).to(device)
        batches = tree_map_only(Tensor, lambda part: part.to(device), model.batches(dist.get_rank()))
        if isinstance(module, PacedModule):
            return cls(module, batches, module.step_optimizer)
        optimizer = model.optimizer(module)
        return cls(module, batches, None if optimizer is None else optimizer.step, optimizer)

    @classmethod
    def paced(cls, workload: Workload, cluster: ClusterSpec) -> Self:
        """Paced compute with a workload's times."""
        module = PacedModule(workload, _speed(cluster))
        return cls(module, [(torch.tensor(dist.get_rank()),)], module.step_optimizer)


def _speed(cluster: ClusterSpec) -> float:
    """Relative compute speed of this rank's node."""
    return cluster.nodes[cluster.rank_nodes[dist.get_rank()]].speed


class Replica(ABC):
    """A model in training; all replicas run the same loop, and only the synchronization differs."""

    def __init__(self, training: Training) -> None:
        self.module = training.module
        self._batches = training.batches
        self._step_optimizer = training.step_optimizer
        self._after_step: Callable[[], None] | None = None
        self._parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._steps = 0

    @property
    @abstractmethod
    def synchronized(self) -> nn.Module:
        """The module that is called for the loss."""

    def run(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps; collective, since a barrier lets all ranks start together."""
        clock = clock_of(self._parameters[0].device)
        dist.barrier()
        marks = [clock.mark()]
        for _ in range(steps):
            self.step()
            marks.append(clock.mark())
        clock.synchronize()
        return [clock.seconds(start, end) for start, end in pairwise(marks)]

    def step(self, recorder: Recorder | None = None) -> None:
        """One training step, on the next batch."""
        self.backward(self._steps % len(self._batches), recorder)
        self._steps += 1
        if self._step_optimizer is not None:
            self._step_optimizer()
        if self._after_step is not None:
            self._after_step()
        self._clear_gradients()

    def backward(self, batch: int = 0, recorder: Recorder | None = None) -> None:
        """Forward and backward pass of one batch; afterwards gradients are means over ranks."""
        loss = self.synchronized(*self._batches[batch])
        if recorder is not None:
            recorder.end_forward()
        loss.backward()

    def _clear_gradients(self) -> None:
        # Module.zero_grad would walk through the modules, which costs 3 us per parameter.
        for parameter in self._parameters:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Copies of the whole gradients of all trained parameters, zeros where a batch left one out; collective."""
        return [_dense(parameter) for parameter in self._parameters]

    def close(self) -> None:  # noqa: B027 - DDP has nothing to close
        """Close connections."""


class DDPReplica(Replica):
    """``DistributedDataParallel``; a bucket cap of ``default`` keeps DDP's own rule."""

    def __init__(self, training: Training, options: DDPOptions, cluster: ClusterSpec) -> None:
        super().__init__(training)
        self._wrapped = DistributedDataParallel(
            self.module,
            bucket_cap_mb=None if options.bucket_cap_mb == "default" else options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            init_sync=False,  # all ranks draw the same weights from one seed
        )
        self._after_step = _install_hook(self._wrapped, options, cluster)

    @property
    def synchronized(self) -> nn.Module:
        return self._wrapped


class PlanReplica(Replica):
    """The engine that follows a plan. Rank 0 broadcasts its buffers before each forward pass, as in DDP.

    Args:
        timeout: seconds to wait for other ranks.
        views: whether gradients become views of the engine's buffers.

    Raises:
        AutoSyncError: plan, workload and cluster do not match.
    """

    waits: Waits = "backward"

    def __init__(
        self,
        training: Training,
        plan: SyncPlan,
        workload: Workload,
        cluster: ClusterSpec,
        timeout: float,
        views: bool = False,
    ) -> None:
        super().__init__(training)
        two_levels = self._parameters[0].is_cuda  # as in jobs on NCCL
        self.schedule = compile_plan(plan, workload, cluster, two_level_collectives=two_levels)
        waits: Waits = "backward" if self.schedule.waits else self.waits
        if waits == "parameters":
            self.schedule = first_parameters_first(self.schedule, [variable.name for variable in workload.variables])
        names = variable_names(self.module)
        self.engine = Engine(
            names, self.schedule, cluster=cluster, timeout=timeout, waits=waits, gradient_as_bucket_view=views
        )
        self._buffers = BufferBroadcast(self.module)

    @property
    def synchronized(self) -> nn.Module:
        return self.module

    def backward(self, batch: int = 0, recorder: Recorder | None = None) -> None:
        self._buffers.before_forward(synchronizes=True)
        super().backward(batch, recorder)

    def close(self) -> None:
        self.engine.close()


class OverlapReplica(PlanReplica):
    """As `PlanReplica`, and sums travel while the next forward pass computes (``overlap="step"``).

    Raises:
        DocumentError: there is no optimizer whose steps can be made message by message.
    """

    waits = "parameters"

    def __init__(
        self,
        training: Training,
        plan: SyncPlan,
        workload: Workload,
        cluster: ClusterSpec,
        timeout: float,
        views: bool = False,
    ) -> None:
        optimizer = training.optimizer
        fault = "the model has no optimizer" if optimizer is None else defer_steps(optimizer)
        if optimizer is None or fault:
            raise DocumentError(f"overlap: {fault}")
        super().__init__(training, plan, workload, cluster, timeout, views)
        self._optimizer = optimizer
        self._overlap = StepOverlap(self.module)
        self._overlap.follow(self.engine)

    def run(self, steps: int) -> list[float]:
        times = super().run(steps)
        self._overlap.settle()  # so that the next contender has the links for itself
        if self._parameters[0].is_cuda:
            torch.cuda.synchronize()
        return times

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad()  # which does not wait for sums

    def close(self) -> None:
        self._overlap.close()
        super().close()


class HybridReplica(Replica):
    """A model whose operators a hybrid plan splits over ranks; the engine reduces the gradients of replicas.

    Args:
        timeout: seconds to wait for other ranks.

    Raises:
        AutoSyncError: the plan does not match the module or the cluster.
    """

    def __init__(self, training: Training, plan: HybridPlan, cluster: ClusterSpec, timeout: float) -> None:
        super().__init__(training)
        self._mesh = LiveMesh(plan, timeout=timedelta(seconds=timeout))
        self._split = SplitModel(self.module, plan, self._mesh, seed=SEED)
        self._split.split()
        self._reduction = GradientReduction(self._split, ReductionSettings(cluster, timeout=timeout, watched=False))
        self._buffers = BufferBroadcast(self.module)

    @property
    def synchronized(self) -> nn.Module:
        return self.module

    def backward(self, batch: int = 0, recorder: Recorder | None = None) -> None:
        self._buffers.before_forward(synchronizes=True)
        with self._split.forward(self._batches[batch]):
            loss = bring_home(self.module(*self._batches[batch]))
        if recorder is not None:
            recorder.end_forward()
        with self._reduction.backward():
            loss.backward()

    def gradients(self) -> list[Tensor]:
        parts = (part for part in self._split.parts.values() if part.parameter.requires_grad)
        return [self._split.whole(_dense(part.parameter), part.shard) for part in parts]

    def close(self) -> None:
        self._reduction.close()


def _dense(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense().clone()


def _install_hook(
    wrapped: DistributedDataParallel, options: DDPOptions, cluster: ClusterSpec
) -> Callable[[], None] | None:
    """Register the communication hook of ``options`` with DDP; returns what to call after every optimizer step."""
    if options.hook == "fp16":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif options.hook == "bf16":
        wrapped.register_comm_hook(None, _bf16_hook)
    elif options.hook == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=options.rank, start_powerSGD_iter=_FIRST_HOOKED_STEP)
        wrapped.register_comm_hook(state, powerSGD_hook)
    elif options.hook == "post_local_sgd":
        local = PostLocalSGDState(None, _node_group(cluster), _FIRST_HOOKED_STEP)
        wrapped.register_comm_hook(local, post_localSGD_hook)
        averager = PeriodicModelAverager(period=options.period)
        return lambda: averager.average_parameters(wrapped.parameters())
    return None


def _bf16_hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """All-reduce in bfloat16, used because torch's own ``bf16_compress_hook`` raises a TypeError on gloo."""
    narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size(group))
    reduced = dist.all_reduce(narrow, group=group, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _node_group(cluster: ClusterSpec) -> dist.ProcessGroup:
    """The process group of this rank's node; if all ranks share one node, a group of this rank alone."""
    nodes = [list(cluster.ranks_of(index)) for index in range(len(cluster.nodes))]
    groups = nodes if len(nodes) > 1 else [[rank] for rank in range(cluster.world_size)]
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return group

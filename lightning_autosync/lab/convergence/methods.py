"""Inside a worker: a common interface of all synchronization methods, so that one loop trains with any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.engine.secret import common_secret
from lightning_autosync.lab.convergence.settings import MethodSettings
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.relaxed.averaging_worker import PartialReduce, WorkerGroup
from lightning_autosync.relaxed.factory import open_synchronizer
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.workload import Workload, variable_names


class PlannedJob(NamedTuple):
    """A plan and the job that it is for; ``timeout`` is the seconds to wait for other ranks."""

    plan: SyncPlan
    workload: Workload
    cluster: ClusterSpec
    timeout: float


class SyncMethod(ABC):
    """A replica and its synchronization with the other replicas.

    Attributes:
        synchronous: whether all workers must make the same number of steps.
        forward: module that computes the logits.
        groups: groups of a partial reduce in which this replica took part.
    """

    synchronous: bool
    forward: nn.Module
    optimizer: Optimizer
    groups: Sequence[WorkerGroup] = ()

    @abstractmethod
    def start(self) -> None:
        """Give all replicas the parameters of rank 0."""

    @abstractmethod
    def step(self, samples: int) -> None:
        """Update the parameters after the backward pass of a mini-batch with this number of samples."""

    @abstractmethod
    def finish(self) -> None:
        """Obtain the common model after this worker's last step."""

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank, including an outer optimizer and a server in this process.

        Read it after `finish`, when a server no longer changes it.
        """
        return tensor_bytes(self.optimizer.state.values())

    @abstractmethod
    def close(self) -> None:
        """Close connections and remove hooks; collective."""

    @abstractmethod
    def abandon(self) -> None:
        """Close after a failure, without waiting for other ranks."""


class SynchronousMethod(SyncMethod):
    """Averages gradients in each step. Replicas start equal, from a common seed, and stay equal."""

    synchronous = True

    def start(self) -> None:
        pass

    def step(self, samples: int) -> None:
        self.optimizer.step()

    def finish(self) -> None:
        pass


class DDPMethod(SynchronousMethod):
    """``DistributedDataParallel``; with ``zero`` the optimizer's state is partitioned over ranks."""

    def __init__(self, module: nn.Module, rate: float, momentum: float, zero: bool) -> None:
        self.forward = DistributedDataParallel(module, init_sync=False)
        parameters = list(module.parameters())
        self.optimizer = (
            ZeroRedundancyOptimizer(parameters, SGD, lr=rate, momentum=momentum)
            if zero
            else SGD(parameters, lr=rate, momentum=momentum)
        )

    @property
    def state_bytes(self) -> int:
        inner = self.optimizer.optim if isinstance(self.optimizer, ZeroRedundancyOptimizer) else self.optimizer
        return tensor_bytes(inner.state.values())

    def close(self) -> None:
        dist.barrier()

    def abandon(self) -> None:
        pass


class PlanMethod(SynchronousMethod):
    """A synchronous plan that the engine executes."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, job: PlannedJob) -> None:
        self.forward, self.optimizer = module, optimizer
        schedule = compile_plan(job.plan, job.workload, job.cluster)
        self._engine = Engine(variable_names(module), schedule, cluster=job.cluster, timeout=job.timeout)

    def close(self) -> None:
        dist.barrier()
        self._engine.close()

    def abandon(self) -> None:
        self._engine.close()


class RelaxedMethod(SyncMethod):
    """A plan of relaxed synchronization."""

    synchronous = False

    def __init__(self, module: nn.Module, optimizer: Optimizer, job: PlannedJob, store: dist.Store) -> None:
        self.forward, self.optimizer = module, optimizer
        self.groups: list[WorkerGroup] = []
        plan, workload, cluster, timeout = job
        place = dist.get_rank(), dist.get_world_size()
        self._mesh = Mesh.open(store, *place, secret=common_secret(), timeout=timeout)
        try:
            self._synchronizer = open_synchronizer(
                plan, workload, module, self._mesh, optimizer=optimizer, cluster=cluster, timeout=timeout
            )
        except BaseException:
            self._mesh.close()
            raise

    def start(self) -> None:
        self._synchronizer.start()

    def step(self, samples: int) -> None:
        self._synchronizer.step(self.optimizer, samples)
        if isinstance(self._synchronizer, PartialReduce) and self._synchronizer.group is not None:
            self.groups.append(self._synchronizer.group)

    def finish(self) -> None:
        self._synchronizer.finish()
        self._synchronizer.drain()

    @property
    def state_bytes(self) -> int:
        return super().state_bytes + self._synchronizer.state_bytes

    def close(self) -> None:
        self._synchronizer.close()
        dist.barrier()
        self._mesh.close()

    def abandon(self) -> None:
        # Close the mesh first, so that a server in this process notices that its workers are gone, and ends.
        self._mesh.close()
        self._synchronizer.close()


def open_method(
    method: MethodSettings, module: nn.Module, rate: float, momentum: float, job: PlannedJob, store: dist.Store
) -> SyncMethod:
    """Open the method that trains a replica with this learning rate; collective.

    Args:
        job: job with the method's plan, which kinds ``ddp`` and ``zero`` do not use.
        store: store for this training only.
    """
    if method.kind != "plan":
        return DDPMethod(module, rate, momentum, zero=method.kind == "zero")
    optimizer = SGD(module.parameters(), lr=rate, momentum=momentum)
    if job.plan.has_schedule:
        return PlanMethod(module, optimizer, job)
    return RelaxedMethod(module, optimizer, job, store)


def tensor_bytes(values: Iterable[Any]) -> int:
    """Bytes of all tensors within nested containers."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += Tensor.element_size(value) * value.numel()
        elif isinstance(value, dict):
            total += tensor_bytes(value.values())
        elif isinstance(value, list | tuple):
            total += tensor_bytes(value)
    return total

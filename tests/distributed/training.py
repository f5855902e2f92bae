"""What ranks do in tests of the engine: train the same model by a plan and by DDP, and compare."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine, StepOverlap, defer_steps, resources
from lightning_autosync.engine.engine import Waits
from lightning_autosync.engine.exchanges.native import destroy_unused_groups
from lightning_autosync.engine.resources import Resources
from lightning_autosync.errors import OpeningError, PlanError
from lightning_autosync.plan import SyncPlan, TwoLevelAllReduce, builders, compile_plan
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning import accelerators
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.strategy.tuning.settings import TuningSettings
from lightning_autosync.workload import Workload, describe, variable_names

_GROUPS: dict[tuple[Any, int], dist.ProcessGroup] = {}


def subgroup(size: int) -> dist.ProcessGroup | None:
    """The group of the first ``size`` ranks; None on ranks outside of it."""
    # After an error in a test the workers meet in a new world, of which old groups are no part.
    key = (dist.group.WORLD, size)
    if key not in _GROUPS:
        # Every rank must take part in making every group.
        _GROUPS[key] = dist.new_group(range(size))
    return _GROUPS[key] if dist.get_rank() < size else None


class Net(nn.Module):
    """Odd sizes, a scalar, several shapes: nothing divides by anything."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(1, 3, 3)
        self.hidden = nn.Linear(3 * 6 * 6, 13)
        self.head = nn.Linear(13, 5, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.conv(images) * self.scale).flatten(1)
        return self.head(torch.tanh(self.hidden(features)))


def batches(rank: int, steps: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        images = torch.randn(4, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
        yield images, torch.randint(0, 5, (4,), generator=generator)


@contextmanager
def engine(
    module: nn.Module,
    plan: SyncPlan,
    cluster: ClusterSpec,
    group: dist.ProcessGroup | None,
    workload: Workload | None = None,
    two_level: bool = False,
    waits: Waits = "backward",
    **options: Any,
) -> Iterator[Engine]:
    schedule = compile_plan(plan, workload or describe(module), cluster, two_level_collectives=two_level)
    running = Engine(variable_names(module), schedule, group=group, timeout=30.0, waits=waits, **options)
    try:
        yield running
    finally:
        dist.barrier(group)
        running.close()


def train(forward: Callable[..., Tensor], module: nn.Module, rank: int, steps: int, dtype: torch.dtype) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches(rank, steps, dtype):
        loss = nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of any weight, relative to the largest weight of its tensor."""
    return max(
        float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-6))
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def two_level_distance(builder: str, cluster: dict[str, Any]) -> float:
    """How far training by collectives in two levels ends from DDP, on all ranks."""
    spec = ClusterSpec.from_dict(cluster)
    torch.manual_seed(0)
    module, reference = Net().double(), Net().double()
    reference.load_state_dict(module.state_dict())
    ddp = DistributedDataParallel(reference)
    train(ddp, reference, dist.get_rank(), 3, torch.float64)
    plan = builders.build(builder, describe(module), spec, topology="hierarchical")
    with engine(module, plan, spec, None, two_level=True) as running:
        transfers = [transfer for message in running.schedule.messages for transfer in message.rounds[0].transfers]
        assert all(isinstance(transfer, TwoLevelAllReduce) for transfer in transfers)
        train(module, module, dist.get_rank(), 3, torch.float64)
    return distance(module, reference)


def two_level_without_memory(cluster: dict[str, Any], rank: int) -> str:
    """The error of an engine whose buffers ``rank`` cannot allocate."""
    spec, module = ClusterSpec.from_dict(cluster), Net()
    plan = builders.build("hierarchical", describe(module), spec, topology="hierarchical")
    full = mock.patch.object(Resources, "_gradients_of", side_effect=MemoryError("no memory is left"))
    try:
        with full if dist.get_rank() == rank else nullcontext(), engine(module, plan, spec, None, two_level=True):
            return "no error"
    except OpeningError as error:
        return str(error)


def groups_of_a_measuring_job(hierarchical: bool, cluster: dict[str, Any]) -> list[int]:
    """Process groups that a job has more than before it, while it trains and after it, which measures plans before.

    Args:
        hierarchical: whether the plan in two levels is found to be faster than the native all-reduce.
        cluster: the cluster.
    """
    destroy_unused_groups()  # of other tests
    spec, before, measured = ClusterSpec.from_dict(cluster), group_count(), accelerators.measure_schedules

    def measure(schedules: Any, *rest: Any) -> list[float]:
        assert all(seconds < math.inf for seconds in measured(schedules, *rest))
        two_levels = [isinstance(each.messages[0].rounds[0].transfers[0], TwoLevelAllReduce) for each in schedules]
        return [0.01 if each == hierarchical else 0.02 for each in two_levels]

    tuning = TuningSettings(probe=0, search=0.5, cache=None, accelerators=True)
    with (
        mock.patch.object(JobTuning, "_device", "cuda"),
        mock.patch.object(JobTuning, "_two_level_collectives", True),
        mock.patch.object(accelerators, "measure_schedules", measure),
    ):
        replica = ExactReplica(Net(), StrategySettings(cluster=spec, tuning=tuning), 2, 2)
    found = [group_count() - before]
    replica.close()
    return [*found, group_count() - before]


def opening_beside_training(builder: str, cluster: dict[str, Any]) -> str:
    """The fault of opening resources with a process group of their own; "opened" if all calls went over it."""
    spec, module = ClusterSpec.from_dict(cluster), Net()
    plan = builders.build(builder, describe(module), spec)
    schedule = compile_plan(plan, describe(module), spec, two_level_collectives=True)
    control = dist.new_group()
    with (
        mock.patch.object(resources, "open_failure_detector", return_value=None) as detector,
        mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1"),
    ):
        try:
            Resources(dict(variable_names(module)), schedule, None, None, 30.0, control=control).close()
        except PlanError as error:
            return str(error)
        finally:
            dist.destroy_process_group(control)
    return "opened" if detector.call_args.args[0] is control else "another group"


def group_count() -> int:
    """Process groups of this rank."""
    return len(dist.distributed_c10d._world.pg_map)


def overlapped_distances(plans: list[dict[str, Any]], cluster: dict[str, Any], steps: int = 3) -> list[list[float]]:
    """For each plan: how far training that waits where parameters are used ends from DDP, and messages under way
    when backward was over, on average."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    start = Net().double()
    reference = copy.deepcopy(start)
    train(DistributedDataParallel(reference), reference, rank, steps, torch.float64)
    found = []
    for plan in plans:
        assert plan["world_size"] == size
        module, under_way = copy.deepcopy(start), 0
        spec = ClusterSpec.from_dict(cluster)
        with engine(module, SyncPlan.from_dict(plan), spec, None, waits="parameters") as running:
            optimizer, overlap = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), StepOverlap(module)
            overlap.follow(running)
            assert defer_steps(optimizer) == ""
            for images, labels in batches(rank, steps, torch.float64):
                nn.functional.cross_entropy(module(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                under_way += len(running.pending)
            overlap.close()
        found.append([distance(module, reference), under_way / steps])
    return found


def distances(
    plans: list[dict[str, Any]], cluster: dict[str, Any], steps: int = 3, double: bool = False
) -> list[float] | None:
    """For each plan, how far training by it ends from DDP's weights; all plans train the same model."""
    size = plans[0]["world_size"]
    group = subgroup(size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    dtype = torch.float64 if double else torch.float32
    torch.manual_seed(0)
    start = Net().to(dtype)
    reference = copy.deepcopy(start)
    ddp = DistributedDataParallel(reference, process_group=group)
    train(ddp, reference, rank, steps, dtype)
    found = []
    for plan in plans:
        module = copy.deepcopy(start)
        with engine(module, SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster), group):
            train(module, module, rank, steps, dtype)
        found.append(distance(module, reference))
    return found

"""What ranks do in tests of row-wise messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import distance, engine, subgroup

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.workload import Workload, describe

ROWS, WIDTH = 50, 3


class Recommender(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, items: Tensor, idle: bool = False) -> Tensor:
        """With ``idle`` the table plays no part."""
        features = torch.ones(len(items), WIDTH, dtype=torch.float64) if idle else self.items(items).mean(dim=1)
        return self.head(features)


def workload_of(module: nn.Module, kind: str) -> Workload:
    described = describe(module)
    variables = tuple(
        variable.model_copy(update={"kind": kind}) if variable.name == "items.weight" else variable
        for variable in described.variables
    )
    return described.model_copy(update={"variables": variables})


def train(
    forward: nn.Module,
    module: nn.Module,
    rank: int,
    idle_rank: int | None,
    micro_batches: int = 1,
    accumulate: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Four steps, each of some micro-batches, of which all but the last run in ``accumulate()``."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        for number in range(micro_batches):
            items = torch.randint(0, ROWS, (3, 2), generator=generator)
            if step == 1:
                items[:] = 7  # all ranks touch one row, and it alone
            with accumulate() if number < micro_batches - 1 else nullcontext():
                loss = forward(items, idle=rank == idle_rank and step == 2).square().mean()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def unsynchronized(running: Engine) -> Iterator[None]:
    """Accumulate gradients without sending them."""
    running.enabled = False
    yield
    running.enabled = True


def row_distances(
    plans: list[dict[str, Any]],
    cluster: dict[str, Any],
    sparse: bool,
    idle_rank: int | None = None,
    micro_batches: int = 1,
) -> list[float] | None:
    """For each plan, how far training by rows ends from DDP's dense weights."""
    group = subgroup(plans[0]["world_size"])
    if group is None:
        return None
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    start = Recommender(sparse).double()
    reference = Recommender(sparse=False).double()
    reference.load_state_dict(start.state_dict())
    ddp = DistributedDataParallel(reference, process_group=group, find_unused_parameters=idle_rank is not None)
    train(ddp, reference, rank, idle_rank, micro_batches, ddp.no_sync)
    found = []
    for plan in plans:
        module = copy.deepcopy(start)
        workload = workload_of(module, "sparse" if sparse else "row_sparse")
        with engine(module, SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster), group, workload) as running:
            train(module, module, rank, idle_rank, micro_batches, partial(unsynchronized, running))
        found.append(distance(module, reference))
    return found


def gradient_kinds(plan: dict[str, Any], cluster: dict[str, Any], sparse: bool) -> list[Any]:
    """Layout of the table's gradient after a step, how many rows it has, and bytes that this rank sent."""
    module = Recommender(sparse).double()
    workload = workload_of(module, "sparse" if sparse else "row_sparse")
    group = subgroup(plan["world_size"])
    if group is None:
        return []
    with engine(module, SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster), group, workload) as running:
        module(torch.tensor([[dist.get_rank(group), 20]])).sum().backward()
        gradient = module.items.weight.grad
        assert gradient is not None
        touched = gradient.to_dense().abs().sum(dim=1).nonzero().view(-1).tolist()
        return [str(gradient.layout), touched, running.bytes_sent]


def layouts_of_idle_ranks(cluster: dict[str, Any], sparse: bool, touched: bool, builder: str = "ps") -> list[Any]:
    """Layout of the table's gradient (None if there is none) when at most rank 0 uses the table."""
    group = subgroup(3)
    if group is None:
        return []
    module = Recommender(sparse).double()
    workload = workload_of(module, "sparse" if sparse else "row_sparse")
    plan = builders.build(builder, workload, ClusterSpec.from_dict(cluster))
    idle = dist.get_rank(group) > 0 or not touched
    with engine(module, plan, ClusterSpec.from_dict(cluster), group, workload):
        module(torch.tensor([[1, 20]]), idle=idle).sum().backward()
        gradient = module.items.weight.grad
        return [None if gradient is None else str(gradient.layout)]

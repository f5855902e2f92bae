"""Golden trajectories: the loss of every step of a fixed run, in double precision.

``python tests/golden/trajectory.py`` writes ``trajectories.json`` anew from DDP itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import digits, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import engine, subgroup

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import SyncPlan

GOLDEN = Path(__file__).with_name("trajectories.json")
STEPS = 12
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def trajectory(
    size: int, optimizer: str, plan: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None
) -> list[float] | None:
    """Mean loss over ranks after each of `STEPS` steps; by DDP if there is no plan."""
    group = subgroup(size)
    if group is None:
        return None
    module = network().double()
    if plan is None or cluster is None:
        ddp = DistributedDataParallel(module, process_group=group)
        return _run(ddp, module, group, OPTIMIZERS[optimizer])
    with engine(module, SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster), group):
        return _run(module, module, group, OPTIMIZERS[optimizer])


def _run(forward: nn.Module, module: nn.Module, group: dist.ProcessGroup, make_optimizer: Any) -> list[float]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    images, labels = digits()
    optimizer = make_optimizer(module.parameters())
    losses = []
    for step in range(STEPS):
        chosen = torch.arange(16) * size + rank + 16 * size * step
        loss = nn.functional.cross_entropy(forward(images[chosen].double()), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(float(mean) / size)
    return losses


def main() -> None:
    from lightning_autosync.measure.workers import WorkerPool

    here = Path(__file__).parent
    with WorkerPool(4, extra_paths=[here, here.parent, here.parent / "distributed"]) as pool:
        golden = {
            f"{optimizer}-{size}": pool.run(trajectory, size=size, optimizer=optimizer)[0]
            for optimizer in OPTIMIZERS
            for size in (2, 3, 4)
        }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    from trajectory import main as write  # workers import functions of the module, not of this script

    write()

"""What ranks do in tests of paths for accelerators; each runs on the CPU too, so that it is known to be right."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from recommender import ROWS, Recommender, workload_of
from torch import nn
from training import Net, batches, distance, engine

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine, StepOverlap, defer_steps
from lightning_autosync.engine.exchanges.native import TwoLevelExchange, TwoLevelGroups
from lightning_autosync.plan import SyncPlan, TwoLevelAllReduce, builders, compile_plan
from lightning_autosync.workload import describe, variable_names


def _beside(device: str, side_stream: bool) -> contextlib.AbstractContextManager[Any]:
    """Another stream than the default one, if so asked."""
    if device != "cuda" or not side_stream:
        return contextlib.nullcontext()
    torch.cuda.synchronize()
    return torch.cuda.stream(torch.cuda.Stream())


def _train(module: nn.Module, device: str, steps: int, side_stream: bool = False) -> None:
    """Forward and backward on a side stream, if so asked, the optimizer where the engine leaves its sums."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with _beside(device, side_stream):
        for images, labels in batches(dist.get_rank(), steps, torch.float64):
            nn.functional.cross_entropy(module(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.current_stream().synchronize()


def _mean_train(module: nn.Module, steps: int) -> None:
    """What all ranks should do, by plain all-reduces of gradients on the CPU."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches(dist.get_rank(), steps, torch.float64):
        nn.functional.cross_entropy(module(images), labels).backward()
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


def distances(device: str, plans: list[dict[str, Any]], cluster: dict[str, Any], side_stream: bool) -> list[float]:
    """For each plan, how far training on the device ends from plain means on the CPU."""
    torch.manual_seed(0)
    start = Net().double()
    reference = copy.deepcopy(start)
    _mean_train(reference, 4)
    found = []
    for plan in plans:
        module = copy.deepcopy(start).to(device)
        with engine(module, SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster), None):
            _train(module, device, 4, side_stream)
        found.append(distance(module.cpu(), reference))
    return found


def overlapped(device: str, plan: dict[str, Any], cluster: dict[str, Any]) -> float:
    """As `distances`, waiting where parameters are used."""
    torch.manual_seed(0)
    module = Net().double()
    reference = copy.deepcopy(module)
    _mean_train(reference, 4)
    module.to(device)
    with engine(module, SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster), None, waits="parameters") as running:
        optimizer, overlap = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), StepOverlap(module)
        overlap.follow(running)
        assert defer_steps(optimizer) == ""
        for images, labels in batches(dist.get_rank(), 4, torch.float64):
            nn.functional.cross_entropy(module(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        overlap.close()
    return distance(module.cpu(), reference)


def compressed(device: str, plans: list[dict[str, Any]], cluster: dict[str, Any]) -> list[list[float]]:
    """For each plan: how far the device's run ends from the CPU's, and this rank's replica from rank 0's."""
    torch.manual_seed(0)
    start = Net().double()
    found = []
    for plan in plans:
        ended = []
        for place in (device, "cpu"):
            module = copy.deepcopy(start).to(place)
            with engine(module, SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster), None) as running:
                running.loss_scale = 1.0
                _train(module, place, 4)
                assert running.load_state_dict(running.state_dict()) == []
            ended.append(module.cpu())
        first = copy.deepcopy(ended[0])
        for parameter in first.parameters():
            dist.broadcast(parameter.data, src=0)
        found.append([distance(*ended), distance(ended[0], first)])
    return found


def rows(device: str, plans: list[dict[str, Any]], cluster: dict[str, Any], sparse: bool) -> list[float]:
    """For each plan, how far gradients of a table on the device are from the mean of dense ones on the CPU."""
    torch.manual_seed(0)
    start = Recommender(sparse).double()
    dense = Recommender(sparse=False).double()
    dense.load_state_dict(start.state_dict())
    generator = torch.Generator().manual_seed(dist.get_rank())
    items = torch.randint(0, ROWS, (3, 2), generator=generator)
    dense(items).square().mean().backward()
    expected = dense.items.weight.grad
    dist.all_reduce(expected)
    expected /= dist.get_world_size()
    found = []
    for plan in plans:
        module = copy.deepcopy(start).to(device)
        workload = workload_of(module, "sparse" if sparse else "row_sparse")
        with engine(module, SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster), None, workload):
            for _ in range(2):  # the second step uses what the first allocated
                module.zero_grad()
                module(items.to(device)).square().mean().backward()
            gradient = module.items.weight.grad
            assert gradient is not None
            assert gradient.device.type == device
        found.append(float((gradient.to_dense().cpu() - expected).abs().max()))
    return found


def alone(device: str) -> list[float]:
    """Two gradients of a world of one rank by the device's own collectives."""
    group = dist.new_group([0], backend="nccl" if device == "cuda" else "gloo")
    module = nn.Linear(2, 1).to(device)
    cluster = ClusterSpec.uniform(nodes=1)
    plan = builders.all_reduce(describe(module), cluster)
    running = Engine(variable_names(module), compile_plan(plan, describe(module), cluster), group=group, timeout=30.0)
    found = []
    for step in range(2):
        module.zero_grad()
        module(torch.full((1, 2), step + 1.0, device=device)).sum().backward()
        found.append(float(module.weight.grad[0, 0]))
    running.close()
    return found


def two_levels(device: str) -> list[float]:
    """Largest errors of sums of one rank that is alone in its place, computed right before and used right after."""
    backend = "nccl" if device == "cuda" else "gloo"
    groups = TwoLevelGroups(dist.new_group([0], backend=backend), dist.new_group([0], backend=backend), 1)
    values = torch.zeros(1 << 20, device=device)
    exchange = TwoLevelExchange([TwoLevelAllReduce(0, values.numel(), ((0,),))], values, groups)
    factor = torch.rand(256, 256, device=device)
    found = []
    for step in range(3):
        # Work that the exchange has to wait for, and that has to wait for the exchange.
        for _ in range(20):
            factor = factor @ factor / factor.norm()
        values.copy_((factor * 0 + step + 1).view(-1)[:1].expand_as(values))
        exchange.start()
        exchange.wait()
        found.append(float((values - (step + 1)).abs().max()))
    return found


def trainer_over_one_device(accelerator: str, plan: str) -> list[float]:
    """Sums of the weights after training on two nodes of one device, which are one and the same device here."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_autosync import AutoSyncStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    os.environ["LOCAL_RANK"] = "0"
    seed_everything(3)
    module = Module()
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(
        accelerator=accelerator,
        devices=1,
        num_nodes=dist.get_world_size(),
        plugins=[TorchElasticEnvironment()],
        strategy=AutoSyncStrategy(plan=plan, process_group_backend="gloo"),
        max_epochs=1,
        enable_model_summary=False,
        **quiet,
    ).fit(module, DataLoader(data, batch_size=2))
    return [float(parameter.double().sum()) for parameter in module.parameters()]

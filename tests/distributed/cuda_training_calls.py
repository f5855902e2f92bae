"""What ranks do in tests of engines and Fabric on accelerators; each function runs on the CPU too."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cuda_trainer_calls import CLASSES, FEATURES, Delay, data, some_due, weights
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from training import Net, batches, distance

from lightning_autosync import AutoSyncFabricStrategy
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import (
    broadcast_json,
    broadcast_tensors,
    gather_json,
    group_device,
    require_success,
    separate_group,
)
from lightning_autosync.engine.compressor_state import ParameterState
from lightning_autosync.engine.replicas import ReplicaCheck
from lightning_autosync.engine.resources import Resources
from lightning_autosync.plan import Schedule, SyncPlan, builders, compile_plan
from lightning_autosync.strategy.checkpoint import gather_state
from lightning_autosync.workload import describe, variable_names

STEPS = 4


# Engines


def _compiled(module: nn.Module, plan: SyncPlan, cluster: ClusterSpec) -> Schedule:
    return compile_plan(plan, describe(module), cluster, two_level_collectives=True)


def _step(forward: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], device: str) -> None:
    images, labels = (part.to(device) for part in batch)
    F.cross_entropy(forward(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _by_ddp(device: str, start: nn.Module, steps: int) -> nn.Module:
    module = copy.deepcopy(start).to(device)
    wrapped, optimizer = DistributedDataParallel(module), sgd(module)
    for batch in batches(dist.get_rank(), steps, torch.float64):
        _step(wrapped, optimizer, batch, device)
    return module


def _start() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def against_ddp(device: str, plans: dict[str, list[Any]], nodes: int, devices: int = 1) -> dict[str, float]:
    """How far training by each plan (a builder and its options) ends from DDP on the same device and backend."""
    start, cluster = _start(), ClusterSpec.uniform(nodes=nodes, devices=devices, bandwidth=1e8)
    reference = _by_ddp(device, start, STEPS)
    found = {}
    for name, (builder, options) in plans.items():
        module = copy.deepcopy(start).to(device)
        plan = builders.build(builder, describe(module), cluster, **options)
        running = Engine(variable_names(module), _compiled(module, plan, cluster), cluster=cluster, timeout=60.0)
        optimizer = sgd(module)
        for batch in batches(dist.get_rank(), STEPS, torch.float64):
            _step(module, optimizer, batch, device)
        dist.barrier()
        running.close()
        found[name] = distance(module, reference)
    return found


def switched(device: str, topologies: list[str], rounds: int) -> dict[str, float]:
    """Training whose plan changes after each step: how far it ends from DDP, and the memory that switches leave.

    The resources of the next plan are opened before the present one ends, as in a job that tunes itself.
    """
    start, cluster = _start(), ClusterSpec.uniform(nodes=dist.get_world_size(), bandwidth=1e8)
    steps = rounds * len(topologies)
    reference = _by_ddp(device, start, steps)
    module = copy.deepcopy(start).to(device)
    parameters, optimizer = dict(variable_names(module)), sgd(module)
    held: list[int] = []
    engine: Engine | None = None
    for step, batch in enumerate(batches(dist.get_rank(), steps, torch.float64)):
        plan = builders.all_reduce(describe(module), cluster, topology=topologies[step % len(topologies)])
        schedule = _compiled(module, plan, cluster)
        resources = Resources(parameters, schedule, None, cluster, 60.0)
        if engine is not None:
            engine.enabled = False
            engine.release().close()
        engine = Engine(list(parameters.items()), schedule, cluster=cluster, timeout=60.0, resources=resources)
        _step(module, optimizer, batch, device)
        if step % len(topologies) == 0:
            held.append(_allocated(device))
    dist.barrier()
    assert engine is not None
    engine.close()
    return {"distance": distance(module, reference), "left": float(held[-1] - held[1])}


def _allocated(device: str) -> int:
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


class Deep(nn.Module):
    """Layers whose gradients come one after another, each a while after the host has issued its computation.

    Args:
        reentrant: whether blocks run under reentrant checkpointing, within passes of their own.
    """

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = (
                checkpoint(partial(_block, layer), value, use_reentrant=True)
                if self.reentrant
                else _block(layer, value)
            )
        return value


def _block(layer: nn.Module, value: Tensor) -> Tensor:
    return Delay.apply(torch.tanh(layer(value)))


def delayed(device: str, plans: dict[str, list[Any]], reentrant: bool = False, side: bool = False) -> dict[str, float]:
    """For each plan, how far training on a device that is slower than the host ends from DDP's mean on the CPU.

    Args:
        side: whether all work of the user is on another stream than the default one.
    """
    torch.manual_seed(0)
    start, rank, size = Deep(reentrant).double(), dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(6, size, 5, 24, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    reference = copy.deepcopy(start)
    optimizer = sgd(reference)
    for step in inputs:
        sum(reference(part.requires_grad_()).square().mean() / size for part in step).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    cluster, found = ClusterSpec.uniform(nodes=size, bandwidth=1e8), {}
    for name, (builder, options) in plans.items():
        module = copy.deepcopy(start).to(device)
        plan = builders.build(builder, describe(module), cluster, **options)
        running = Engine(variable_names(module), _compiled(module, plan, cluster), cluster=cluster, timeout=60.0)
        optimizer = sgd(module)
        with _stream(device if side else "cpu"):
            for step in inputs:
                module(step[rank].detach().to(device).requires_grad_()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()
        running.close()
        found[name] = distance(module.cpu(), reference)
    return found


@contextmanager
def _stream(device: str) -> Iterator[None]:
    """Another stream than the default one, if there are streams."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def late(device: str, seconds: float) -> list[float]:
    """Gradients over a group of the device's own backend, beside a default group of gloo, whose rank 1 comes late."""
    group = dist.new_group(backend="nccl" if device == "cuda" else "gloo")
    module = nn.Linear(2, 1).double().to(device)
    cluster = ClusterSpec.uniform(nodes=dist.get_world_size())
    plan = builders.all_reduce(describe(module), cluster)
    running = Engine(variable_names(module), compile_plan(plan, describe(module), cluster), group=group, timeout=30.0)
    found = []
    for step in range(3):
        module.zero_grad()
        time.sleep(seconds * (dist.get_rank() == 1))
        module(torch.full((1, 2), step + 1.0, dtype=torch.float64, device=device) * dist.get_rank()).sum().backward()
        found.append(float(module.weight.grad[0, 0]))
    dist.barrier()
    running.close()
    return found


def accumulated(device: str, topology: str, as_views: bool) -> float:
    """As `against_ddp`, with two passes in each step, of which the first stays on its rank."""
    start, cluster = _start(), ClusterSpec.uniform(nodes=dist.get_world_size(), bandwidth=1e8)
    ends = []
    for synchronized in ("ddp", "engine"):
        module = copy.deepcopy(start).to(device)
        optimizer, forward, running = sgd(module), module, None
        if synchronized == "ddp":
            forward = DistributedDataParallel(module)
        else:
            plan = builders.all_reduce(describe(module), cluster, topology=topology, bucket_bytes=2000)
            schedule = _compiled(module, plan, cluster)
            options: Any = {"cluster": cluster, "timeout": 60.0, "gradient_as_bucket_view": as_views}
            running = Engine(variable_names(module), schedule, **options)
        for number, (images, labels) in enumerate(batches(dist.get_rank(), 2 * STEPS, torch.float64)):
            first = number % 2 == 0
            if running is not None:
                running.enabled = not first
            else:
                forward.require_backward_grad_sync = not first
            F.cross_entropy(forward(images.to(device)), labels.to(device)).backward()
            if not first:
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()
        if running is not None:
            running.close()
        ends.append(module)
    return distance(*ends)


def small_collectives(device: str) -> dict[str, Any]:
    """What the package's own small collectives give, on the default group and on another one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for name, group in (("default", None), ("separate", separate_group(60.0))):
        sent = [torch.full((3,), float(rank), device=device), torch.full((2,), rank, dtype=torch.int16, device=device)]
        broadcast_tensors(sent, group)
        residual = torch.full((2, 2), float(rank), device=device)
        entry = gather_state({"one": ParameterState({"kind": "int8"}, {"residual": residual})}, group)
        weight = torch.full((3,), 1.0 + (rank == size - 1), device=device)
        found[name] = {
            "gathered": gather_json({"rank": rank, "text": "x" * rank}, group),
            "broadcast": broadcast_json([rank, "ü"], group),
            "tensors": [float(tensor.double().sum()) for tensor in sent],
            "state": None
            if entry is None
            else entry["variables"]["one"]["tensors"]["residual"].sum(dim=(1, 2)).tolist(),
            "fault": told(lambda: require_success("broken" if rank == 1 else "", group)),  # noqa: B023
            "replicas": told(lambda: ReplicaCheck(0, group).run({"weight": weight})),  # noqa: B023
            "device": group_device(group).type,
        }
    return found


def _sums(entry: dict[str, Any] | None) -> list[float] | None:
    """The sum of each rank's residual in a checkpoint's entry."""
    if entry is None:
        return None
    residuals: Tensor = entry["variables"]["one"]["tensors"]["residual"]
    return residuals.sum(dim=(1, 2)).tolist()


def told(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Fabric


def with_fabric(
    device: str, ours: bool, plain_backward: bool, together: bool = False, overlap: Any = None
) -> list[float]:
    """The weights of two modules after training with accumulation.

    Args:
        together: whether one backward pass reaches both modules, in different orders on different ranks.
    """
    strategy: Any = AutoSyncFabricStrategy(overlap=overlap) if ours else DDPStrategy()
    kind = "cpu" if device == "cpu" else "gpu"
    plugins = [TorchElasticEnvironment()]
    fabric = Fabric(accelerator=kind, devices=1, num_nodes=dist.get_world_size(), strategy=strategy, plugins=plugins)
    fabric.launch()
    torch.manual_seed(3)
    modules = [nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double() for _ in range(2)]
    made: Any = [fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)) for module in modules]
    order = made[::-1] if dist.get_rank() == 1 and together else made
    loader: Any = fabric.setup_dataloaders(DataLoader(data(torch.float64), batch_size=4))
    overlapped = False
    for index, (inputs, labels) in enumerate(loader):
        waits = index % 2 == 0
        with ExitStack() as contexts:
            for module, _ in made:
                contexts.enter_context(fabric.no_backward_sync(module, enabled=waits))
            losses = []
            for module, _ in order:
                losses.append(F.cross_entropy(module(inputs), labels))
                if not together:
                    _backward(fabric, losses[-1], plain_backward)
            if together:
                _backward(fabric, sum(losses), plain_backward)
        if not waits:
            for _, optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
        overlapped = overlapped or any(map(some_due, modules))
    assert overlapped == (overlap is not None)
    found = [value for module in modules for value in weights(module)]
    if ours:
        fabric.strategy.teardown()
    return found


def _backward(fabric: Fabric, loss: Any, plain: bool) -> None:
    loss.backward() if plain else fabric.backward(loss)

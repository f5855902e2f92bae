"""What ranks do in tests of the engine's own behaviour."""

from __future__ import annotations

import copy
import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from training import Net, batches, engine, subgroup

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.engine.compressor_state import ParameterStates
from lightning_autosync.engine.resources import Resources
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.plan import Compressor, SyncPlan, builders, compile_plan
from lightning_autosync.workload import describe, variable_names


class Branches(nn.Module):
    """Two parts, each of which may be left out of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)

    def forward(self, images: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        return sum(part(images).sum() for part, used in ((self.left, left), (self.right, right)) if used)


def _plan(module: nn.Module, builder: str, topology: str, size: int, **more: Any) -> tuple[SyncPlan, ClusterSpec]:
    nodes = 1 if topology == "shared_memory" else size
    cluster = ClusterSpec.uniform(nodes=nodes, devices=size // nodes, bandwidth=1e8)
    return builders.build(builder, describe(module), cluster, topology=topology, **more), cluster


def gradients(
    topology: str, uses: list[tuple[bool, bool]], compressor: str = "none", noticed: Sequence[int] = (), **options: bool
) -> dict[str, list[float] | None] | None:
    """Gradients after one step in which rank ``r`` uses the branches ``uses[r]``.

    The ranks in ``noticed`` notice a change before it, so that all ranks synchronize again.
    """
    group = subgroup(len(uses))
    if group is None:
        return None
    torch.manual_seed(0)
    module = Branches()
    plan, cluster = _plan(module, "all_reduce", topology, len(uses), compressor=compressor)
    with engine(module, plan, cluster, group, **options) as running:
        rank = dist.get_rank(group)
        running.changed = rank in noticed

        def follow() -> None:
            running.changed = False
            running.synchronize()

        running.on_change = follow
        module(torch.full((1, 3), float(rank + 1)), *uses[rank]).backward()
        return {
            name: None if parameter.grad is None else parameter.grad.flatten().tolist()
            for name, parameter in module.named_parameters()
        }


def with_notes(topology: str, segment: int | None) -> tuple[list[list[float]], float]:
    """The notes after each of three steps in which every rank writes its own, and the largest gap of gradients."""
    torch.manual_seed(0)
    module, plain, rank = Net().double(), Net().double(), dist.get_rank()
    plain.load_state_dict(module.state_dict())
    size = dist.get_world_size()
    plan, cluster = _plan(module, "all_reduce", topology, size)
    groups = tuple(group.model_copy(update={"segment": segment}) for group in plan.groups)
    plan = plan.model_copy(update={"groups": groups})
    found, gap = [], 0.0
    with engine(module, plan, cluster, None, notes=2) as running:
        assert running.notes is not None
        for step, (images, labels) in enumerate(batches(rank, 3, torch.float64)):
            for network in (module, plain):
                network.zero_grad()
            running.notes.write([step + rank, -rank])
            for network in (module, plain):
                nn.functional.cross_entropy(network(images), labels).backward()
            assert running.notes.travelled
            found.append(running.notes.of_ranks())
            for one, other in zip(module.parameters(), plain.parameters(), strict=True):
                dist.all_reduce(other.grad)
                gap = max(gap, float((one.grad - other.grad / size).abs().max()))
    return found, gap


def accumulated(topology: str) -> list[float]:
    """The largest gaps to the mean of plain gradients: after accumulation, and on top of a synchronized one."""
    torch.manual_seed(0)
    module, plain = Net().double(), Net().double()
    plain.load_state_dict(module.state_dict())
    size = dist.get_world_size()
    plan, cluster = _plan(module, "all_reduce", topology, size)
    gaps = []

    def backward(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
        nn.functional.cross_entropy(network(images), labels).backward()

    def gap() -> float:
        worst = 0.0
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            expected = other.grad.clone()
            dist.all_reduce(expected)
            worst = max(worst, float((one.grad - expected / size).abs().max()))
        return worst

    with engine(module, plan, cluster, None) as running:
        for number, (images, labels) in enumerate(batches(dist.get_rank(), 3, torch.float64)):
            running.enabled = number == 2
            backward(module, images, labels)
            backward(plain, images, labels)
        gaps.append(gap())
        # Not zeroed: the next gradient comes on top of a mean, on all ranks alike.
        for parameter, synchronized in zip(plain.parameters(), module.parameters(), strict=True):
            parameter.grad = synchronized.grad.clone()
        for images, labels in batches(10 + dist.get_rank(), 1, torch.float64):
            backward(module, images, labels)
            backward(plain, images, labels)
        gaps.append(gap())
    return gaps


def norms_of_roots(topology: str, compressor: str) -> tuple[int, float, bool]:
    """The messages with roots, how far their norms are from those of the gradients, and whether a rank can refuse."""
    torch.manual_seed(0)
    module, rank = Net(), dist.get_rank()
    plan, cluster = _plan(module, "all_reduce", topology, dist.get_world_size(), compressor=compressor)
    gap, early, refused = 0.0, [], True
    with engine(module, plan, cluster, None, waits="parameters") as running:
        for images, labels in batches(rank, 3, torch.float32):
            module.zero_grad()
            nn.functional.cross_entropy(module(images), labels).backward()
            early = [index for index in running.pending if running.has_roots(index)]
            found = running.norms(early, refuses=False)
            refused &= running.norms(early, refuses=rank == 1) is None
            assert found is not None
            running.finish()
            for index, norms in zip(early, found, strict=True):
                for parameter, norm in zip(running.members(index), norms, strict=True):
                    expected = float(parameter.grad.double().norm())
                    gap = max(gap, abs(float(norm) - expected) / max(expected, 1e-6))  # top-k drops small ones
    return len(early), gap, refused


def arrivals(topology: str, key: str) -> tuple[list[bool], list[bool]]:
    """Whether each message has come, before the last rank sends anything, and some time after that.

    Args:
        key: a word that no other call uses.
    """
    torch.manual_seed(0)
    module, rank, last = Net(), dist.get_rank(), dist.get_world_size() - 1
    plan, cluster = _plan(module, "all_reduce", topology, last + 1)
    store = dist.distributed_c10d._get_default_store()
    with engine(module, plan, cluster, None, waits="parameters") as running:
        (images, labels), *_ = batches(rank, 1, torch.float32)
        if rank == last:
            store.wait([f"{key} {other}" for other in range(last)])
        nn.functional.cross_entropy(module(images), labels).backward()
        before = [running.has_come(index) for index in running.pending]
        if rank != last:
            store.set(f"{key} {rank}", "")
        deadline = time.monotonic() + 60
        while not all(map(running.has_come, running.pending)) and time.monotonic() < deadline:
            time.sleep(0.001)
        after = [running.has_come(index) for index in running.pending]
        running.finish()
    return before, after


def restored(compressor: str, topology: str) -> float:
    """How far a run that was stopped and restored half-way ends from one that was not."""
    size = dist.get_world_size()

    def run(steps: list[int], module: nn.Module, state: dict[str, Any] | None) -> dict[str, Any]:
        plan, cluster = _plan(module, "all_reduce", topology, size, compressor=compressor)
        with engine(module, plan, cluster, None) as running:
            if state is not None:
                running.load_state_dict(state)
            for step in steps:
                for images, labels in batches(100 * step + dist.get_rank(), 1, torch.float32):
                    module.zero_grad()
                    nn.functional.cross_entropy(module(images), labels).backward()
                    with torch.no_grad():
                        for parameter in module.parameters():
                            parameter -= 0.1 * parameter.grad
            return running.state_dict()

    torch.manual_seed(0)
    whole = Net()
    halves = Net()
    halves.load_state_dict(whole.state_dict())
    run([0, 1, 2, 3], whole, None)
    state = run([0, 1], halves, None)
    run([2, 3], halves, state)
    return max(
        float((a - b).detach().abs().max()) for a, b in zip(whole.parameters(), halves.parameters(), strict=True)
    )


def under_a_scaler(compressor: str, topology: str) -> dict[str, Any]:
    """How far a run under changing loss scales, one of whose steps overflows on one rank, ends from one without both.

    Powers of two change no bit of the rest.
    """
    size = dist.get_world_size()
    torch.manual_seed(0)
    plain = Net()
    scaled = copy.deepcopy(plain)
    states = []
    for module, scales in ((plain, [None] * 4), (scaled, [4.0, 4.0, math.inf, 64.0, 2.0])):
        kind = Compressor(kind=compressor, **({"ratio": 0.2} if compressor == "topk" else {}))
        plan, cluster = _plan(module, "all_reduce", topology, size, compressor=kind)
        data = iter(list(batches(dist.get_rank(), 4, torch.float32)))
        with engine(module, plan, cluster, None) as running:
            for scale in scales:
                overflows = scale == math.inf
                running.loss_scale = 8.0 if overflows else scale
                images, labels = next(iter(batches(7, 1, torch.float32))) if overflows else next(data)
                factor = math.inf if overflows and dist.get_rank() == 1 else running.loss_scale or 1.0
                module.zero_grad()
                (nn.functional.cross_entropy(module(images), labels) * factor).backward()
                gradients = [parameter.grad for parameter in module.parameters()]
                if overflows:
                    assert not all(bool(gradient.isfinite().all()) for gradient in gradients)
                    continue
                with torch.no_grad():
                    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient / (running.loss_scale or 1.0)
            states.append(running.state_dict())
    lost = {name: memory.tensors["residual"] for name, memory in states[0].items()}
    return {
        "distance": max(
            float((a - b).detach().abs().max()) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True)
        ),
        "memory": max(float((states[1][name].tensors["residual"] - kept).abs().max()) for name, kept in lost.items()),
        "lost": max(float(kept.abs().max()) for kept in lost.values()),
    }


def refused_scale(scale: float) -> str:
    module = Net()
    plan, cluster = _plan(module, "all_reduce", "native", dist.get_world_size())
    with engine(module, plan, cluster, None) as running:
        try:
            running.loss_scale = scale
        except ValueError as error:
            return str(error)
    return "no error"


def carried_over(compressor: str) -> dict[str, Any]:
    """What one plan's memory becomes under another one, and what has no place under a third."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    module = Net()

    def remembered(topology: str, state: ParameterStates | None, **more: Any) -> tuple[ParameterStates, list[str]]:
        plan, cluster = _plan(module, "all_reduce", topology, size, **more)
        left_out: list[str] = []
        with engine(module, plan, cluster, None) as running:
            if state is not None:
                left_out = running.load_state_dict(state)
            else:
                for images, labels in batches(dist.get_rank(), 2, torch.float32):
                    module.zero_grad()
                    nn.functional.cross_entropy(module(images), labels).backward()
            return running.state_dict(), left_out

    fused, _ = remembered("star", None, compressor=compressor)
    alone, left_out = remembered("native", fused, compressor=compressor, bucket_bytes=1)
    _, dropped = remembered("native", fused, compressor="fp16")
    return {
        "names": sorted(fused),
        "shapes": {name: list(memory.tensors["residual"].shape) for name, memory in fused.items()},
        "lost": max(float(memory.tensors["residual"].abs().max()) for memory in fused.values()),
        "difference": max(
            float((tensor - alone[name].tensors[key]).abs().max())
            for name, memory in fused.items()
            for key, tensor in memory.tensors.items()
        ),
        "left_out": left_out,
        "dropped": sorted(dropped),
    }


def mismatched(what: str) -> str:
    """The error of ranks that do not agree."""
    module = Net()
    plan, cluster = _plan(module, "all_reduce", "ring", dist.get_world_size())
    if what == "plan" and dist.get_rank() == 1:
        plan, cluster = _plan(module, "ps", "star", dist.get_world_size())
    schedule = compile_plan(plan, describe(module), cluster)
    group = subgroup(3) if what == "world" else None
    if what == "world" and group is None:
        return "PlanError: the process group has 3"
    try:
        Engine(variable_names(module), schedule, group=group, timeout=10.0).close()
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def with_a_lost_peer(topology: str, how: str, victim: int, timeout: float) -> dict[str, Any]:
    """Train while ``victim`` is killed or stopped in its third step; what the others saw, and after how long."""
    module = Net()
    plan, cluster = _plan(module, "all_reduce", topology, dist.get_world_size())
    running = Engine(variable_names(module), compile_plan(plan, describe(module), cluster), timeout=timeout)
    began = time.monotonic()
    try:
        for step, (images, labels) in enumerate(batches(dist.get_rank(), 6, torch.float32)):
            if step == 2 and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            began = time.monotonic()
            nn.functional.cross_entropy(module(images), labels).backward()
    except AutoSyncError as error:
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())
        return {"error": str(error), "seconds": time.monotonic() - began, "finite": finite}
    finally:
        running.close()
    return {"error": "", "seconds": 0.0, "finite": True}


def frozen_in_turn(topology: str, compressor: str) -> list[list[float]]:
    """Gradients of two fused parameters, of which one is frozen after two steps; it keeps its gradient."""
    module = Branches()
    plan, cluster = _plan(module, "all_reduce", topology, dist.get_world_size(), compressor=compressor)
    history = []
    with engine(module, plan, cluster, None):
        for step in range(8):
            module.right.requires_grad_(step < 2)
            module.left.zero_grad()
            module(torch.ones(1, 3), True, True).backward()
            history.append([float(module.left.bias.grad[0]), float(module.right.bias.grad[0])])
    return history


def ended_without_a_barrier(builder: str, topology: str, trials: int) -> list[str]:
    """Errors of runs in which every rank closes its engine as soon as it is done."""
    errors = []
    for _ in range(trials):
        module = Net()
        plan, cluster = _plan(module, builder, topology, dist.get_world_size())
        running = Engine(variable_names(module), compile_plan(plan, describe(module), cluster), timeout=20.0)
        try:
            for images, labels in batches(dist.get_rank(), 2, torch.float32):
                nn.functional.cross_entropy(module(images), labels).backward()
        except AutoSyncError as error:
            errors.append(str(error))
        running.close()
        dist.barrier()
    return errors


def fewer_steps(topology: str, victim: int) -> str:
    """The error of ranks that go on when one has ended."""
    module = Net()
    plan, cluster = _plan(module, "all_reduce", topology, dist.get_world_size())
    running = Engine(variable_names(module), compile_plan(plan, describe(module), cluster), timeout=20.0)
    error = ""
    try:
        for images, labels in batches(dist.get_rank(), 2 if dist.get_rank() == victim else 4, torch.float32):
            nn.functional.cross_entropy(module(images), labels).backward()
    except AutoSyncError as caught:
        error = str(caught)
    running.close()
    return error


def without_memory() -> tuple[str, float]:
    """The error of an engine for whose buffers rank 1 has no memory, and a gradient of the next engine."""
    module, error = nn.Linear(1, 1, bias=False), ""
    plan, cluster = _plan(module, "all_reduce", "ring", dist.get_world_size())
    schedule = compile_plan(plan, describe(module), cluster)
    fail = mock.patch.object(Resources, "_gradients_of", side_effect=RuntimeError("no memory"))
    with fail if dist.get_rank() == 1 else nullcontext():
        try:
            Engine(variable_names(module), schedule, timeout=20.0)
        except AutoSyncError as caught:
            error = f"{type(caught).__name__}: {caught}"
    running = Engine(variable_names(module), schedule, timeout=20.0)
    module(torch.ones(1, 1)).backward()
    running.close()
    assert module.weight.grad is not None
    return error, float(module.weight.grad)


def alone() -> list[float]:
    """The gradient of a world of one rank, on trees."""
    group = subgroup(1)
    if group is None:
        return []
    module = nn.Linear(2, 1)
    plan, cluster = _plan(module, "ps", "star", 1)
    with engine(module, plan, cluster, group):
        module(torch.ones(1, 2)).sum().backward()
        return module.weight.grad.flatten().tolist()


def deaf() -> str:
    """The error when the node of rank 1 has an address that is not its own."""
    size = dist.get_world_size()
    module = Net()
    plan, cluster = _plan(module, "ps", "star", size)
    nodes = [node.model_copy(update={"address": "127.0.0.1"}) for node in cluster.nodes]
    nodes[1] = nodes[1].model_copy(update={"address": "192.0.2.1"})
    wrong = cluster.model_copy(update={"nodes": tuple(nodes)})
    try:
        Engine(variable_names(module), compile_plan(plan, describe(module), wrong), cluster=wrong, timeout=10.0)
    except AutoSyncError as error:
        return str(error)
    return "no error"


def after_an_error() -> str:
    """The error of a backward pass that follows one that broke off."""
    module = Net()
    plan, cluster = _plan(module, "all_reduce", "ring", dist.get_world_size())
    with engine(module, plan, cluster, None) as running:
        running.interrupt(MemoryError("out of memory"))
        try:
            for images, labels in batches(0, 1, torch.float32):
                nn.functional.cross_entropy(module(images), labels).backward()
        except AutoSyncError as error:
            return str(error)
    return "no error"


def second_derivatives() -> float:
    """A gradient that was made with ``create_graph``."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 3.0)
    plan, cluster = _plan(module, "all_reduce", "native", dist.get_world_size())
    with engine(module, plan, cluster, None):
        module(torch.ones(1, 1)).pow(2).sum().backward(create_graph=True)
        return float(module.weight.grad)

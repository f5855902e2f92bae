"""What ranks do in tests of which backward passes are synchronized, and of passes that fail."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from divergence_jobs import Changing, apart
from jobs import make_fabric, make_trainer
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy, builders
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import AutoSyncError, OpeningError
from lightning_autosync.strategy import exact as exact_module
from lightning_autosync.strategy import fabric as fabric_module
from lightning_autosync.strategy import replica_comparison
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.workload import describe


class Fails(torch.autograd.Function):
    """The identity, whose gradient raises."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError("out of memory")


def unreached(plan: str) -> list[float]:
    """Gradients of a weight in three passes; the loss of rank 1 does not depend on it in the second one."""
    module = nn.Linear(1, 1, bias=False)
    replica = ExactReplica(module, StrategySettings(plan=plan), 1, 2)
    other = torch.ones(1, requires_grad=True)
    found = []
    for step in range(3):
        module.zero_grad()
        with replica.backward():
            reaches = dist.get_rank() == 0 or step != 1
            (module(torch.full((1, 1), 10.0**step)) if reaches else other).sum().backward()
        found.append(float(module.weight.grad))  # type: ignore[arg-type]
    dist.barrier()
    replica.close()
    return found


def caught(ddp: bool) -> str:
    """The error of the forward pass under Fabric after a backward pass whose error the user caught."""
    fabric = make_fabric(FabricDDP() if ddp else AutoSyncFabricStrategy())

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs: Tensor, fails: bool) -> Tensor:
            middle = self.first(inputs)
            return self.second(Fails.apply(middle) if fails else middle)

    wrapped = fabric.setup(Called())
    with pytest.raises(RuntimeError, match="out of memory"):
        fabric.backward(wrapped(torch.ones(1, 2), True).sum())
    try:
        fabric.backward(wrapped(torch.ones(1, 2), False).sum())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        fabric.strategy.teardown()
    return "none"


def thawed_late(layer: int, kept: bool, **strategy: Any) -> float:
    """The largest gap of a gradient to the mean, in passes of which the last one follows the end of a layer's freeze.

    Args:
        layer: place of the layer, which trains in the first pass. Ranks then no longer compare before each pass.
        kept: whether gradients are set to zero, and not to None.
    """
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    inputs, gap = torch.full((1, 2), dist.get_rank() + 1.0), 0.0
    with mock.patch.object(replica_comparison, "CALM", 2):
        replica = ExactReplica(module, StrategySettings(**strategy), 1, 2)
        for step in range(6):
            module[layer].requires_grad_(step in (0, 5))
            module.zero_grad(set_to_none=not kept)
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            means = torch.autograd.grad(module(inputs).sum(), trained)
            with replica.backward():
                module(inputs).sum().backward()
            for parameter, mean in zip(trained, means, strict=True):
                dist.all_reduce(mean)
                gap = max(gap, float((parameter.grad - mean / 2).abs().max()))  # type: ignore[operator]
    dist.barrier()
    replica.close()
    return gap


def draw_new(module: Changing) -> None:
    """Replace a layer and add one; each rank draws its own weights."""
    torch.manual_seed(dist.get_rank())
    module.head = nn.Linear(8, models.CLASSES)
    module.body = nn.Sequential(module.body, nn.Linear(8, 8, bias=False))
    module.trainer.optimizers[0].param_groups[0]["params"] = list(module.parameters())


def new_layers(**strategy: Any) -> float:
    """How far replicas are apart after training in which layers were added and replaced on all ranks."""
    seed_everything(3)
    module = Changing(draw_new, [0, 1])
    make_trainer(AutoSyncStrategy(check_replicas=0, **strategy)).fit(module)
    return apart(module)


def unplanned() -> list[str]:
    """How each pass's error begins under Fabric with a user's plan, if all ranks add a layer before the second."""
    layers = nn.Sequential(nn.Linear(1, 1, bias=False))
    plan = builders.all_reduce(describe(layers), ClusterSpec.uniform(1, 2))
    fabric = make_fabric(AutoSyncFabricStrategy(plan=plan))
    wrapped = fabric.setup_module(layers)
    found = []
    for step in range(4):
        if step == 1:
            layers.append(nn.Linear(1, 1, bias=False))
        try:
            fabric.backward(wrapped(torch.ones(1, 1)).sum())
            found.append("none")
        except AutoSyncError as error:
            found.append(f"{type(error).__name__}: {error}".partition(",")[0])
    fabric.strategy.teardown()
    return found


def passes_after_a_failed_opening(how: str, overlap: bool, fails: str = "Engine") -> list[str]:
    """How each pass's error begins under Fabric, if a layer thaws before the second one and ranks cannot connect then.

    Args:
        how: the passes: by ``fabric.backward``, by ``loss.backward``, or by ``loss.backward`` of an output that was
            computed before (``late``). Before the last one, the module is set up again.
        overlap: whether steps overlap; the error then comes where a parameter is read.
        fails: what fails: the new engine, or the broadcast of new parameters before it.
    """
    fabric = make_fabric(AutoSyncFabricStrategy(plan="all_reduce", overlap="step" if overlap else None))
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    layers[1].requires_grad_(False)
    wrapped, found = fabric.setup_module(layers), []
    early = [wrapped(torch.ones(1, 1)).sum() for _ in range(2)]
    for step in range(5):
        if step == 1:
            layers[1].requires_grad_(True)
        if step == 4:
            wrapped = fabric.setup_module(layers)
        fault = OpeningError("rank 1: no memory") if step == 1 else None
        with mock.patch.object(exact_module, fails, side_effect=fault) if fault else contextlib.nullcontext():
            try:
                loss = early.pop() if how == "late" and step in (2, 3) else wrapped(torch.ones(1, 1)).sum()
                fabric.backward(loss) if how == "fabric" else loss.backward()
                fabric.strategy.settle()
                found.append("none")
            except AutoSyncError as error:
                found.append(f"{type(error).__name__}: {error}")
    assert layers[1].weight.grad is not None
    fabric.strategy.teardown()
    return found


def change_before_a_collective(kind: str) -> str:
    """The error under Fabric if rank 1 freezes a layer, and a collective call follows the pass."""
    fabric = make_fabric(AutoSyncFabricStrategy(overlap="step", bucket_cap_mb=1e-6, timeout=20.0))
    module = models.Plain()
    wrapped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    calls = {
        "all_reduce": lambda: fabric.all_reduce(torch.ones(3)),
        "all_gather": lambda: fabric.all_gather(torch.ones(3)),
        "barrier": fabric.barrier,
        "broadcast": lambda: fabric.broadcast("text"),
    }
    try:
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                module.head.bias.requires_grad_(False)
            fabric.backward(wrapped(torch.ones(2, models.FEATURES)).sum())
            calls[kind]()
            optimizer.step()
            optimizer.zero_grad()
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        fabric.strategy.teardown()
    return "none"


def hooks_after_a_failed_setup() -> int:
    """Hooks on the forward passes of all modules that a failed setup with overlap leaves."""
    before = len(torch_module._global_forward_pre_hooks)
    settings = StrategySettings(plan="all_reduce", overlap="step")
    with mock.patch.object(JobTuning, "start", side_effect=MemoryError), pytest.raises(MemoryError):
        ExactReplica(nn.Linear(1, 1), settings, 1, 2)
    return len(torch_module._global_forward_pre_hooks) - before


def overlap_after_a_trial_that_closing_ends() -> bool:
    """Whether the engine to which closing returns still overlaps."""
    replica = ExactReplica(nn.Linear(1, 1), StrategySettings(plan="all_reduce", overlap="step"), 1, 2)
    engine = replica.engine
    assert engine is not None
    with mock.patch.object(replica._tuning, "close", side_effect=lambda: replica._follow(engine)):
        dist.barrier()
        replica.close()
    return engine.on_launch is not None


def failure_detector_after_a_failed_setup() -> bool:
    """Whether teardown closes the failure detector, if the setup of batch shares failed."""
    strategy = AutoSyncFabricStrategy()
    closed = []
    line = mock.Mock(close=lambda: closed.append(True))
    with (
        mock.patch.object(fabric_module, "compare_ranks", return_value=line),
        mock.patch.object(fabric_module, "open_shares", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        make_fabric(strategy)
    strategy.teardown()
    return closed == [True]

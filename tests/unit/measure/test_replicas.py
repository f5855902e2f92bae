"""Replicas inside a worker, here alone in its process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.bench.settings import DDPOptions
from lightning_autosync.measure.models import paced
from lightning_autosync.measure.models.model import Model
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.measure.replicas import DDPReplica, PlanReplica, Replica, Training
from lightning_autosync.plan import builders
from lightning_autosync.workload import Variable, Workload

SLOW = ClusterSpec.from_dict(
    {"format": ClusterSpec.FORMAT, "name": "slow", "nodes": [{"name": "machine", "speed": 0.5}]}
)
WORKLOAD = Workload(
    name="timed",
    variables=(Variable(name="a", shape=(8,), ready=0.2),),
    forward_time=0.1,
    backward_time=0.3,
    optimizer_time=0.05,
)


class Clock:
    """In place of the module ``time`` of paced computation: it passes by sleeping only."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def replica(kind: str, model: Model) -> Replica:
    training = Training.of(model, False, SLOW)
    if kind == "ddp":
        return DDPReplica(training, DDPOptions(), SLOW)
    workload = model.workload("rows")
    return PlanReplica(training, builders.all_reduce(workload, SLOW), workload, SLOW, timeout=10.0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["ddp", "plan"])
def test_paced_steps_take_what_the_bound_and_the_replay_count(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and optimizer, all of them at the speed of the rank's node."""
    WORKLOAD.save(tmp_path / "workload.yaml")
    one = replica(kind, model_of({"kind": "paced", "workload_file": str(tmp_path / "workload.yaml")}))
    clock = Clock()
    monkeypatch.setattr(paced, "time", clock)
    one.step()
    assert clock.now == pytest.approx((0.1 + 0.3 + 0.05) / 0.5)
    one.close()


class FineTuned(nn.Module):
    """Returns its loss; the first layer is frozen, and no batch uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head, self.unused = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.head(self.frozen(batch)).sum()
        return loss


@pytest.mark.usefixtures("alone")
def test_gradients_are_those_of_trained_parameters() -> None:
    one = DDPReplica(Training(FineTuned(), [(torch.ones(1, 2),)], None), DDPOptions(), SLOW)
    one.backward()
    head, unused = one.gradients()
    assert head.any()
    assert torch.equal(unused, torch.zeros(2, 2))


@pytest.mark.usefixtures("alone")
def test_real_models_step_a_real_optimizer() -> None:
    one = replica("ddp", model_of({"kind": "layers", "tensors": 2, "width": 4, "batch": 2}))
    before = [parameter.detach().clone() for parameter in one.module.parameters()]
    one.step()
    assert any((was != now).any() for was, now in zip(before, one.module.parameters(), strict=True))

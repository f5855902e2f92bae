"""Weights that a script changes itself, where servers keep them: nothing is lost silently, and ranks stay alike."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from test_frozen_parameters import opened
from test_group_average import together
from torch import nn
from torch.optim import SGD

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Consistency, builders
from lightning_autosync.relaxed.base import Synchronizer
from lightning_autosync.relaxed.factory import open_synchronizer
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.workload import describe

CHANGED = r"model: parameter '\w+' was changed by other code than the optimizer's step"


class Trained:
    """A module with an optimizer, trained by servers."""

    def __init__(self, mesh: Mesh, module: nn.Module, running: Synchronizer, optimizer: SGD) -> None:
        self.rank, self.module, self.running, self.optimizer = mesh.rank, module, running, optimizer

    def step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.running.step(self.optimizer, 1)

    def clamp(self) -> None:
        for parameter in self.module.parameters():
            parameter.data.clamp_(-1e-3, 1e-3)


def dense(mesh: Mesh) -> Trained:
    module = nn.Linear(3, 2)
    optimizer = SGD(module.parameters(), lr=0.1)
    return Trained(mesh, module, opened("asynchronous", mesh, module, optimizer), optimizer)


@pytest.mark.parametrize("when", ["after each step", "before a barrier", "after a barrier", "after the start"])
def test_what_the_next_answer_would_overwrite_is_refused(when: str) -> None:
    def train(worker: Trained) -> None:
        if when == "after the start":
            worker.clamp()
        worker.step()
        if when in ("before a barrier", "after each step"):
            worker.clamp()
        if when == "after each step":
            worker.step()
        worker.running.drain()
        if when == "after a barrier":
            worker.clamp()
        worker.step()

    def play(mesh: Mesh) -> None:
        worker = dense(mesh)
        worker.running.start()
        with pytest.raises(PlanError, match=CHANGED):
            train(worker)
        worker.running.close()

    together(2, play)


def test_weights_that_are_put_back_are_no_change() -> None:
    def play(mesh: Mesh) -> None:
        worker = dense(mesh)
        worker.running.start()
        for _ in range(2):
            worker.step()
            kept = [parameter.detach().clone() for parameter in worker.module.parameters()]
            worker.clamp()
            for parameter, values in zip(worker.module.parameters(), kept, strict=True):
                parameter.data.copy_(values)
            worker.running.drain()
        worker.running.close()

    together(2, play)


def table(mesh: Mesh) -> Trained:
    module = nn.Embedding(6, 2)
    described = describe(module)
    by_rows = [variable.model_copy(update={"kind": "row_sparse"}) for variable in described.variables]
    workload = described.model_copy(update={"variables": tuple(by_rows)})
    cluster = ClusterSpec.uniform(nodes=mesh.size, bandwidth="1 Gbit/s")
    plan = builders.byteps(workload, cluster).model_copy(update={"consistency": Consistency(mode="asynchronous")})
    optimizer = SGD(module.parameters(), lr=0.1)
    return Trained(mesh, module, open_synchronizer(plan, workload, module, mesh, optimizer=optimizer), optimizer)


def test_rows_that_no_answer_replaces_are_compared_with_the_servers_at_a_barrier() -> None:
    """Only rows that changed on the servers travel, so ranks left the barrier with different tables."""

    def play(mesh: Mesh) -> str:
        worker = table(mesh)
        worker.running.start()
        for _ in range(2):  # weights are noted after the first step, and not after the second
            worker.module.weight.grad = torch.zeros(6, 2)
            worker.module.weight.grad[1] = 1.0
            worker.running.step(worker.optimizer, 1)
        if mesh.rank == 1:
            worker.module.weight.data[4] = 0.0
        try:
            worker.running.drain()
        except PlanError as error:
            return str(error)
        finally:
            worker.running.close()
        return ""

    first, second = together(2, play)
    assert first == ""
    assert re.match(CHANGED, second)


def test_tables_that_each_rank_rescales_are_refused_if_servers_keep_them() -> None:
    module = nn.Sequential(nn.Embedding(6, 2, max_norm=1.0), nn.Linear(2, 1))
    with pytest.raises(PlanError, match=r"model: '0.weight' is an embedding with max_norm"):
        opened("asynchronous", SimpleNamespace(size=2), module, SGD(module.parameters(), lr=0.1))

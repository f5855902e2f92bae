"""Periodic averaging where replicas do not end together, and after a warmup."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from test_group_average import together
from torch import nn

from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed import periodic
from lightning_autosync.relaxed.model_state import ModelTensors
from lightning_autosync.relaxed.periodic import Periodic
from lightning_autosync.relaxed.transport.mesh import Mesh


class Replica:
    """Each of its steps moves the only weight by -0.1; it begins at 0."""

    def __init__(self, mesh: Mesh, **settings: Any) -> None:
        self.module = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(self.module.weight)
        consistency = Consistency(mode="periodic", **settings)
        self.worker = Periodic(mesh, ModelTensors.of(self.module), consistency, timeout=20.0)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.worker.start()

    def step(self) -> None:
        self.module.weight.grad = torch.ones_like(self.module.weight)
        self.worker.step(self.optimizer, 4)

    @property
    def weight(self) -> float:
        return float(self.module.weight.detach())


def test_elastic_averaging_begins_where_the_warmup_ends() -> None:
    def play(mesh: Mesh) -> float:
        replica = Replica(mesh, period=1, outer="easgd", alpha=0.5, warmup=3)
        for _ in range(4):
            replica.step()
        replica.worker.close()
        return replica.weight

    torch.testing.assert_close(together(1, play), [-0.35])


def test_who_trains_on_after_others_have_ended_makes_no_outer_updates() -> None:
    def play(mesh: Mesh) -> tuple[float, float]:
        replica = Replica(mesh, period=1, outer="diloco")
        replica.step()
        momentum = replica.worker._outer[0].state["momentum"]
        before = float(momentum)
        if mesh.rank == 0:
            replica.worker.finish()
            mesh.send(1, "ended")
        else:
            mesh.receive("ended", sender=0, timeout=20.0)
            replica.step()
            assert float(momentum) == before
            assert float(replica.worker._outer[0].state["anchor"]) == replica.weight
            replica.worker.finish()
        replica.worker.drain()
        replica.worker.close()
        return before, float(momentum)

    (before, after), other = together(2, play)
    assert other == (before, after)
    assert before == after


def test_who_has_ended_learns_at_the_barrier_how_long_the_period_is() -> None:
    """Otherwise its fragments would be due at other steps than those of the others."""

    def play(mesh: Mesh) -> int:
        replica = Replica(mesh, period=2, outer="averaging", overhead=0.5)
        replica.worker._period += 3 * mesh.rank  # as after an average in which rank 0 took no part
        replica.worker.drain()
        replica.worker.close()
        return replica.worker._period

    assert together(2, play) == [2, 2]


def test_steps_within_a_period_are_reported() -> None:
    def play(mesh: Mesh) -> list[str]:
        replica = Replica(mesh, period=100, outer="averaging")
        with (
            mock.patch.object(periodic, "_LONGEST_SILENCE", 0.0),
            mock.patch.object(replica.worker._client, "send") as send,
        ):
            replica.step()
        replica.step()
        replica.worker.close()
        return [call.args[0] for call in send.call_args_list]

    assert together(1, play) == [["progress"]]

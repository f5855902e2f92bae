"""The synchronizer that a plan asks for, in a world of one worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.runtime.relaxed.mesh import Mesh
from lightning_autosync.runtime.relaxed.opening import open_synchronizer
from lightning_autosync.runtime.relaxed.periodic import Periodic
from lightning_autosync.runtime.relaxed.server import ParameterServer
from lightning_autosync.workload import describe

MODULE = torch.nn.Linear(3, 2)
ALONE = ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "alone", "nodes": [{"name": "a", "devices": 1}]})


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    opened = Mesh.open(dist.HashStore(), 0, 1, address="127.0.0.1", timeout=10.0)
    yield opened
    opened.close()


def plan(**fields: Any) -> SyncPlan:
    made = builders.build("all_reduce", describe(MODULE), ALONE)
    return SyncPlan.from_dict({**made.to_dict(), **fields})


PERIODIC = {"mode": "periodic", "period": 2, "outer": "averaging"}


@pytest.mark.parametrize(
    ("consistency", "kind"),
    [
        (PERIODIC, Periodic),
        ({"mode": "synchronous", "served": True}, ParameterServer),
        ({"mode": "bounded_staleness", "staleness": 1}, ParameterServer),
        ({"mode": "asynchronous"}, ParameterServer),
    ],
)
def test_each_mode_trains_as_its_optimizer_would(mesh, consistency, kind):
    torch.manual_seed(0)
    module, alone = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    alone.load_state_dict(module.state_dict())
    optimizer, reference = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (module, alone))
    made = plan(consistency=consistency)
    synchronizer = open_synchronizer(made, describe(module), module, mesh, optimizer=optimizer, timeout=10.0)
    assert isinstance(synchronizer, kind)
    synchronizer.start()
    for _ in range(3):
        for one in (module, alone):
            one.zero_grad()
            one(torch.ones(3)).square().sum().backward()
        synchronizer.step(optimizer, 1)
        reference.step()
    synchronizer.drain()
    synchronizer.close()
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has a schedule, which Engine executes"),
        ({"world_size": 2, "consistency": PERIODIC}, "2 ranks and 0 server-only ranks make no mesh of 1"),
        ({"consistency": {"mode": "asynchronous"}}, "optimizer: missing; in mode 'asynchronous'"),
        ({"workload": "feedbeef", "consistency": PERIODIC}, "made for a model with fingerprint feedbeef"),
    ],
)
def test_what_does_not_fit(mesh, fields, message):
    with pytest.raises(PlanError, match=message):
        open_synchronizer(plan(**fields), describe(MODULE), MODULE, mesh)

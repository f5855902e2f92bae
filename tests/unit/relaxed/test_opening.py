"""The synchronizer that a plan asks for, in a world of one worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strangers import SECRET

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.relaxed.factory import open_synchronizer
from lightning_autosync.relaxed.periodic import Periodic
from lightning_autosync.relaxed.server import ParameterServer
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.workload import describe

MODULE = torch.nn.Linear(3, 2)
ALONE = ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "alone", "nodes": [{"name": "a", "devices": 1}]})


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    opened = Mesh.open(dist.HashStore(), 0, 1, secret=SECRET, address="127.0.0.1", timeout=10.0)
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


def test_the_patience_with_a_group_is_handed_on(mesh) -> None:
    synchronizer: Any = open_synchronizer(plan(consistency=PERIODIC), describe(MODULE), MODULE, mesh, stall=7.0)
    assert synchronizer._average._timeout == 7.0
    synchronizer.close()


def train_on(mesh: Mesh, state: dict[str, Any] | None = None, **consistency: Any) -> dict[str, Any]:
    """The state of periodic averaging after one step, from another one's on."""
    module = torch.nn.Linear(3, 2)
    made = plan(consistency={"mode": "periodic", "period": 4, "outer": "averaging", **consistency})
    synchronizer = open_synchronizer(made, describe(module), module, mesh, timeout=10.0)
    if state is not None:
        synchronizer.load_state_dict(state)
    synchronizer.start()
    module(torch.ones(3)).sum().backward()
    synchronizer.step(torch.optim.SGD(module.parameters(), lr=0.1), 1)
    synchronizer.drain()
    found = synchronizer.state_dict()
    synchronizer.close()
    return found


def test_a_resumed_plan_has_its_own_period_unless_that_adapts(mesh) -> None:
    state = train_on(mesh, period=4)
    assert train_on(mesh, state, period=7)["period"] == 7
    state["period"] = 5
    state["controller"]["pace"] = {"period": 5, "step_time": 0.0, "exchange_time": 0.0}
    assert train_on(mesh, state, period=7, overhead=0.1)["period"] == 5


@pytest.mark.parametrize("changed", [{"outer": "slowmo"}, {"outer": "averaging"}, {"outer": "diloco", "fragments": 2}])
def test_another_outer_update_begins_anew(mesh, changed) -> None:
    state = train_on(mesh, outer="diloco")
    with pytest.warns(UserWarning, match=r"does not match consistency\.outer or consistency\.fragments"):
        found = train_on(mesh, state, **changed)
    assert found["iteration"] == 2
    for fragment in found["outer"]:
        assert "momentum" not in fragment or not fragment["momentum"].any()


class Running(torch.nn.Linear):
    """Keeps a mean by putting a new tensor in the old one's place, as much code does."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.full((2,), float("-inf")), persistent=False)


@pytest.mark.parametrize("consistency", [PERIODIC, {"mode": "asynchronous"}], ids=["averages", "servers"])
def test_buffers_that_a_module_replaces_are_averaged_where_ranks_meet(consistency) -> None:
    store, modules = dist.HashStore(), [Running(), Running()]
    two = ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "two", "nodes": [{"name": "a", "devices": 2}]})
    made = builders.build("all_reduce", describe(modules[0]), two)
    made = SyncPlan.from_dict({**made.to_dict(), "consistency": consistency})

    def train(rank: int) -> None:
        module = modules[rank]
        mesh = Mesh.open(store, rank, 2, secret=SECRET, address="127.0.0.1", timeout=20.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        synchronizer = open_synchronizer(made, describe(module), module, mesh, optimizer=optimizer, timeout=20.0)
        synchronizer.start()
        module(torch.ones(3)).sum().backward()
        synchronizer.step(optimizer, 1 + 2 * rank)
        module.mean = module.mean + 4.0 * (rank + 1)
        synchronizer.drain()
        synchronizer.close()
        mesh.close()

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    # One sample at 4 and three at 8.
    assert [module.mean.tolist() for module in modules] == [[7.0, 7.0]] * 2
    assert all(module.mask.isneginf().all() for module in modules)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has a schedule; use Engine for it"),
        ({"world_size": 2, "consistency": PERIODIC}, "2 ranks and 0 server-only ranks do not match a mesh of 1"),
        ({"consistency": {"mode": "asynchronous"}}, "optimizer: missing; mode 'asynchronous' needs it"),
        ({"workload": "feedbeef", "consistency": PERIODIC}, "made for a model with fingerprint feedbeef"),
    ],
)
def test_what_does_not_fit(mesh, fields, message):
    with pytest.raises(PlanError, match=message):
        open_synchronizer(plan(**fields), describe(MODULE), MODULE, mesh)


def test_a_plan_for_another_model_is_named(mesh) -> None:
    other = plan(workload="feedbeef", consistency=PERIODIC)
    with pytest.raises(PlanError, match=r"^p\.yaml: workload: the plan was made for a model with fingerprint feedbeef"):
        open_synchronizer(other, describe(MODULE), MODULE, mesh, source="p.yaml")


@pytest.mark.parametrize(
    "field",
    [
        {"compressor": "int8"},
        {"topology": "ring"},
        {"topology": "star", "local_aggregation": True},
        {"partition": {"shards": 2}},
        {"architecture": "parameter_server", "placement": [0]},
    ],
    ids=str,
)
def test_averages_of_models_refuse_what_only_gradients_have(mesh, field) -> None:
    groups = [{**group, **field} for group in plan().to_dict()["groups"]]
    named = next(iter(field))
    with pytest.raises(PlanError, match=rf"p\.yaml: groups\[0\] '.*': {named}: mode 'periodic' averages models"):
        open_synchronizer(plan(groups=groups, consistency=PERIODIC), describe(MODULE), MODULE, mesh, source="p.yaml")

"""Transfers of one length along the same trees are loaded at once, which changes no price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import Compressor, Group, Partition, SyncPlan, compile_plan
from lightning_autosync.plan.schedule import Round, Tree, TreeTransfer
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.workload import Variable, Workload

CLUSTER = ClusterSpec.racks(racks=2, nodes_per_rack=2, bandwidth=50e6, uplink=25e6, latency=1e-4)
WORKLOAD = Workload(
    name="two",
    variables=(Variable(name="a", shape=(300_000,)), Variable(name="b", shape=(70_001,))),
    forward_time=0.01,
    backward_time=0.02,
)


def plan(topology: Any, shards: int, compressor: Any) -> SyncPlan:
    cut = Partition(shards=shards) if shards > 1 else None
    groups = tuple(
        Group(
            name=name,
            variables=(name,),
            topology=topology,
            partition=cut,
            compressor=Compressor.model_validate(compressor),
        )
        for name in WORKLOAD.ready_order
    )
    return SyncPlan(workload=WORKLOAD.variables_fingerprint, world_size=4, groups=groups)


def with_trees_of_their_own(round: Round) -> Round:
    """The same exchange, in which no two transfers share a tree."""
    transfers = []
    for transfer in round.transfers:
        assert isinstance(transfer, TreeTransfer)
        trees = Tree(transfer.reduce.parents), Tree(transfer.broadcast.parents)
        transfers.append(replace(transfer, reduce=trees[0], broadcast=trees[1]))
    return replace(round, transfers=tuple(transfers))


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize("compressor", [{"kind": "none"}, {"kind": "int8"}, {"kind": "topk", "ratio": 0.1}])
@pytest.mark.parametrize(("topology", "shards"), [("ring", 1), ("ring", 3), ("tree", 4), ("hierarchical", 4)])
def test_they_cost_what_each_by_itself_does(topology: str, shards: int, compressor: Any, detail: Any) -> None:
    shared = compile_plan(plan(topology, shards, compressor), WORKLOAD, CLUSTER)
    apart = replace(
        shared,
        messages=tuple(
            replace(message, rounds=tuple(with_trees_of_their_own(round) for round in message.rounds))
            for message in shared.messages
        ),
    )
    replays = [Replay(WORKLOAD, CLUSTER, Constants()) for _ in range(2)]
    counts = [
        sum(len(stage.flows) for stage in replay._prepare(each).stages)
        for replay, each in zip(replays, (shared, apart), strict=True)
    ]
    assert counts[0] < counts[1] if (topology, shards) == ("ring", 3) else counts[0] <= counts[1]
    together, alone = (replay.predict(each, detail) for replay, each in zip(replays, (shared, apart), strict=True))
    # Frames of equal urgency may take turns in another order, which matters a little on paced connections.
    assert together.step_time == pytest.approx(alone.step_time, rel=5e-3)
    numpy.testing.assert_allclose(together.demand, alone.demand, rtol=1e-9)
    assert together.timeline.links == pytest.approx(alone.timeline.links, rel=5e-3)

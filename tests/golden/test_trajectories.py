"""Exact plans follow the trajectories that DDP left behind."""

from __future__ import annotations

import json
from itertools import product

import pytest
import trajectory
from clusters import shared_nodes
from digits import network
from sweeps import crossed
from trajectory import GOLDEN, OPTIMIZERS

from lightning_autosync.plan import builders
from lightning_autosync.workload import describe

GOLDEN_LOSSES = json.loads(GOLDEN.read_text())


PLANS = [("all_reduce", "native"), ("all_reduce", "ring"), ("byteps", "star"), ("packed_trees", "packed")]


@pytest.mark.parametrize(
    ("builder", "topology", "optimizer", "size"), crossed(PLANS, [*product(OPTIMIZERS, [2, 3, 4])])
)
def test_losses_follow_the_golden_trajectory(pool, builder: str, topology: str, optimizer: str, size: int) -> None:
    cluster = shared_nodes(size)
    plan = builders.build(builder, describe(network().double()), cluster, topology=topology)
    losses = pool.run(
        trajectory.trajectory,
        size=size,
        optimizer=optimizer,
        plan=plan.to_dict(),
        cluster=cluster.to_dict(),
    )[0]
    assert losses == pytest.approx(GOLDEN_LOSSES[f"{optimizer}-{size}"], rel=1e-10)

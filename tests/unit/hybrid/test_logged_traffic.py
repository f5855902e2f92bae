"""What split models send, as a job of ranks that are not there logs it, is what predictions state."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from collective_traffic import TrafficLog, pretended_job
from planned_models import MODELS, drawn, graph_of, home, tables_of
from sweeps import SHARE, sweep
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.conversions import sent
from lightning_autosync.hybrid.exact import exact
from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.split_model import SplitModel
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.hybrid.prediction import HybridPrediction, predict
from lightning_autosync.hybrid.tables import plan_of

Sends = Counter[tuple[str, tuple[int, ...], str]]
CHECK = 16
"""Bytes with which ranks compare a buffer or a mask within a pass."""


def logged(model: nn.Module, batch: torch.Tensor, plan: HybridPlan) -> Sends:
    """Bytes by pass, dimensions and collective."""
    found: Sends = Counter()
    with pretended_job(plan.world_size):
        mesh = LiveMesh(plan)
        split = SplitModel(model, plan, mesh)
        split.split()
        with TrafficLog() as forward, split.forward(batch):
            output = bring_home(model(batch))
        value = output if isinstance(output, torch.Tensor) else output.logits
        with TrafficLog() as backward:
            value.sum().backward()
    # Before a pass of a split model, ranks compare their batches and buffers.
    for phase, logged_here in (("forward", forward.collectives[split.is_split :]), ("backward", backward.collectives)):
        for one in logged_here:
            dimensions = tuple(k for k in mesh.dimensions if set(mesh.peers((k,))) <= set(one.ranks))
            if one.payload == CHECK and math.prod(mesh.sizes[k] for k in dimensions) == plan.world_size:
                continue
            found[phase, dimensions, one.collective] += round(one.sent)
    for part in split.parts.values():
        ranks = math.prod(mesh.sizes[k] for k in part.replicas)
        if ranks > 1 and part.parameter.requires_grad:
            size = 4 * math.prod(part.shard.local_shape)
            found["gradients", part.replicas, "all_reduce"] += round(size * sent("all_reduce", ranks))
    return found


def stated(prediction: HybridPrediction) -> Sends:
    return Counter({(part.phase, part.dimensions, part.collective): round(part.bytes) for part in prediction.sent})


@pytest.mark.parametrize("mesh", sweep([(4,), (2, 2), (2, 2, 2)], [(2, 2)], ids=str))
@pytest.mark.parametrize("name", sweep(MODELS, ["residual", "gated", "attention"]))
def test_predicted_bytes_are_those_that_are_logged(name: str, mesh: tuple[int, ...]) -> None:
    model, batch = MODELS[name]
    graph, cluster = graph_of(name), ClusterSpec.uniform(math.prod(mesh), 1, "200 Mbit/s")
    found, rng = tables_of(graph, cluster, mesh), random.Random(math.prod(mesh))
    choices = [home(found), list(exact(found)[0]), *(drawn(found, rng) for _ in range(max(2, round(6 * SHARE))))]
    for choice in choices:
        plan = plan_of(found, choice)
        assert logged(model().train(), batch, plan) == stated(predict(plan, graph, cluster)), plan.describe()

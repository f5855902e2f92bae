"""What the text of a prediction says beside its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from planned_models import graph_of

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.report.hybrid_prediction import predict_hybrid


@pytest.mark.parametrize("gradients", ["all_reduce", "byteps"])
def test_how_gradients_are_priced_is_said_where_the_plan_says_otherwise(tmp_path: Path, gradients: str) -> None:
    graph = graph_of("mlp")
    layers = [LayerPlan(module=one.module, signature=("dp",)) for one in graph.operators if one.module is not None]
    plan = HybridPlan(mesh=(2,), layers=tuple(layers), gradients=gradients)
    text = predict_hybrid(plan, graph, ClusterSpec.uniform(2, 1, "200 Mbit/s"), HybridRates(), tmp_path)
    told = "the sums of gradients are predicted as all-reduces, whatever the plan's field 'gradients' says"
    assert (told in text) is (gradients != "all_reduce")

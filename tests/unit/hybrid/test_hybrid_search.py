"""Predictions and the search: against brute force, against an exact oracle, and against what everybody knows."""

from __future__ import annotations

import random
from itertools import product

import numpy
import pytest
import torch
from planned_models import MODELS, TOKENS, drawn, gpt2, graph_of, home, mlp, tables_of
from sweeps import SHARE, sweep

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import ClusterError, PlanError
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.cost import BOXING_FORWARD, StepSettings, memory_bytes, step_seconds
from lightning_autosync.hybrid.descent import Descent
from lightning_autosync.hybrid.exact import exact
from lightning_autosync.hybrid.mesh import shapes
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan
from lightning_autosync.hybrid.prediction import MemoryStage, peak_bytes, predict
from lightning_autosync.hybrid.search import search
from lightning_autosync.hybrid.structure import structure
from lightning_autosync.hybrid.tables import plan_of
from lightning_autosync.hybrid.validation import check_plan

SLOW = ClusterSpec.uniform(4, 1, "200 Mbit/s")


@pytest.mark.parametrize("mesh", sweep([(4,), (2, 2), (2, 2, 2)], [(2, 2)]))
@pytest.mark.parametrize("name", sweep(MODELS, ["residual", "gated", "attention"]))
def test_a_prediction_adds_up_to_what_the_search_compares(name: str, mesh: tuple[int, ...]) -> None:
    graph, (model, _) = graph_of(name), MODELS[name]
    cluster = ClusterSpec.uniform(int(numpy.prod(mesh)) // 2, 2, "200 Mbit/s")
    found, rng = tables_of(graph, cluster, mesh), random.Random(0)
    for _ in range(max(3, round(8 * SHARE))):
        choice = drawn(found, rng)
        plan = plan_of(found, choice)
        check_plan(plan, model(), cluster.world_size)
        predicted, compared = predict(plan, graph, cluster).costs, found.total(choice)
        if name == "attention":
            # Its input is needed twice in one layout, which the search counts twice.
            assert predicted[BOXING_FORWARD] <= compared[BOXING_FORWARD] * (1 + 1e-9)
            compared[BOXING_FORWARD] = predicted[BOXING_FORWARD]
        numpy.testing.assert_allclose(predicted, compared, rtol=1e-9)


@pytest.mark.parametrize("name", ["mlp", "residual", "gated"])
def test_the_exact_search_finds_what_trying_all_finds(name: str) -> None:
    found = tables_of(graph_of(name), SLOW, (4,))
    choice, seconds = exact(found)
    everything = product(*(range(len(table)) for table in found.alone))
    best = min(float(step_seconds(found.total(states), overlap=False)) for states in everything)
    assert seconds == pytest.approx(best)
    assert float(step_seconds(found.total(choice), overlap=False)) == pytest.approx(best)


def test_descent_is_near_the_exact_optimum() -> None:
    rng, gaps = random.Random(0), []
    for name in MODELS:
        for mesh in ((4,), (2, 2)):
            found = tables_of(graph_of(name), SLOW, mesh)
            _, least = exact(found)
            starts = [home(found), *([rng.randrange(len(table)) for table in found.alone] for _ in range(7))]
            reached = [Descent(found, overlap=False).run(start)[1] for start in starts]
            assert min(reached) >= least * (1 - 1e-9)
            gaps.append(min(reached) / least - 1)
    assert max(gaps) < 0.05
    assert sum(gap < 1e-9 for gap in gaps) >= 0.8 * len(gaps)


def test_one_choice_at_a_time_gets_stuck_where_two_do_not() -> None:
    found = tables_of(graph_of("residual"), SLOW, (4,))
    _, least = exact(found)
    alone = Descent(found, overlap=False)
    alone._pairs = []
    assert alone.run(home(found))[1] > least * 1.01
    assert Descent(found, overlap=False).run(home(found))[1] == pytest.approx(least)


@pytest.mark.parametrize("name", sweep(MODELS, ["residual", "gated", "attention", "gpt2"]))
def test_no_plan_is_worse_than_those_that_everybody_knows(name: str) -> None:
    found = search(graph_of(name), ClusterSpec.uniform(2, 2, "200 Mbit/s"))
    assert found.data_parallel.plan.is_data_parallel
    assert found.best.step_seconds <= found.data_parallel.step_seconds
    assert found.megatron is not None
    assert found.best.step_seconds <= found.megatron.step_seconds * (1 + 1e-9)
    seconds = [candidate.step_seconds for candidate in found.plans]
    assert seconds == sorted(seconds)
    assert len({candidate.plan.fingerprint for candidate in found.plans}) == len(found.plans)


def test_the_megatron_alternation_is_what_it_is_called() -> None:
    found = search(graph_of("gpt2"), ClusterSpec.uniform(4, 1, "200 Mbit/s"), meshes=[(4,)])
    assert found.megatron is not None
    names = {layer.module.rpartition(".")[2]: layer.signature[-1] for layer in found.megatron.plan.layers}
    assert (names["c_attn"], names["c_fc"], names["c_proj"]) == ("col", "col", "row")


def test_large_batches_and_small_weights_are_data_parallel() -> None:
    graph = capture(mlp(width=32), torch.zeros(4096, 32))
    for cluster in (SLOW, ClusterSpec.uniform(2, 2, "1 Gbit/s")):
        found = search(graph, cluster)
        assert found.best.origin == "data parallel"
        assert found.best.plan.mesh == (4,)


def test_large_weights_and_small_batches_are_split() -> None:
    graph = capture(mlp(width=2048), torch.zeros(4, 2048))
    found = search(graph, SLOW)
    assert found.data_parallel.step_seconds / found.best.step_seconds > 3
    assert found.best.memory < found.data_parallel.memory / 2


def test_a_model_is_made_to_fit() -> None:
    graph = capture(mlp(width=512), torch.zeros(256, 512))
    fast = ClusterSpec.uniform(1, 4, "100 Gbit/s")
    free = search(graph, fast)
    assert free.best.origin == "data parallel"
    limit = 0.6 * free.best.memory
    found = search(graph, fast, memory=limit)
    assert found.data_parallel.memory > limit
    assert all(candidate.memory <= limit for candidate in found.plans)
    nothing = search(graph, fast, memory=1000.0)
    assert len(nothing.plans) == 1
    assert nothing.best.memory < 0.6 * free.best.memory


def test_a_dimension_that_talks_much_lies_on_fast_links() -> None:
    graph = capture(mlp(width=1024), torch.zeros(64, 1024))
    found = search(graph, ClusterSpec.uniform(2, 2, "100 Mbit/s"), meshes=[(2, 2)])
    sent = predict(found.best.plan, graph, ClusterSpec.uniform(2, 2, "100 Mbit/s")).sent
    within, across = (sum(part.bytes for part in sent if part.dimensions == (k,)) for k in (1, 0))
    assert within > across


@pytest.mark.slow
def test_repeated_blocks_are_searched_once() -> None:
    shallow, deep = (structure(capture(gpt2(layers), TOKENS)) for layers in (2, 6))
    assert len(shallow.layers) == len(deep.layers)
    found = search(deep.graph, SLOW)
    blocks = {layer.signature for layer in found.best.plan.layers if layer.module.endswith("mlp.c_fc")}
    assert len(blocks) == 1


def test_gradients_that_overlap_cost_what_outlasts_computing() -> None:
    graph = graph_of("mlp")
    plan = search(graph, SLOW).data_parallel.plan
    one, other = (predict(plan, graph, SLOW, settings=StepSettings(overlap=overlap)) for overlap in (True, False))
    assert one.step_seconds < other.step_seconds
    assert one.bytes == other.bytes == pytest.approx(2 * 3 / 4 * graph.weight_bytes)
    assert [part.phase for part in one.sent] == ["gradients"]


def test_memory_counts_parameters_gradients_and_optimizer_state() -> None:
    graph = graph_of("mlp")
    plan = search(graph, SLOW).data_parallel.plan
    kept = sum(operator.work.kept + operator.after.kept for operator in graph.operators)
    for slots in (0, 1, 2):
        found = predict(plan, graph, SLOW, settings=StepSettings(slots=slots))
        # Parameters, their gradients, and the buffers in which these travel.
        assert found.memory >= (3 + slots) * graph.weight_bytes
        assert float(memory_bytes(found.costs)) == pytest.approx((3 + slots) * graph.weight_bytes + kept)


def test_memory_is_followed_through_a_step() -> None:
    """What two layers hold; gradients take the place of what the backward pass needs no more."""
    first = MemoryStage(kept=10.0, gradients=3.0, backward=2.0)
    second = MemoryStage(kept=5.0, gradients=20.0, forward=1.0)
    assert peak_bytes([first, second]) == 10 + 5 + 20
    assert peak_bytes([second, first]) == max(5 + 10 + 3 + 2, 5 + 3 + 20)
    assert peak_bytes([MemoryStage(gradients=7.0)] * 3) == 21
    assert peak_bytes([MemoryStage(forward=9.0), MemoryStage(kept=1.0)]) == 9
    assert peak_bytes([]) == 0


def test_what_does_not_fit_is_refused() -> None:
    graph = graph_of("mlp")
    plan = search(graph, SLOW).best.plan
    with pytest.raises(PlanError, match="it has 4 ranks, but cluster 'uniform' has 8"):
        predict(plan, graph, ClusterSpec.uniform(8, 1, "1 Gbit/s"))
    with pytest.raises(PlanError, match="workload: it was made for another model"):
        predict(plan, graph_of("vgg"), SLOW)
    with pytest.raises(PlanError, match="layers: module '0' has parameters, but no layer in the plan"):
        predict(HybridPlan(mesh=(4,), layers=(LayerPlan(module="2", signature=("dp",)),)), graph, SLOW)
    with pytest.raises(ClusterError, match="unknown"):
        search(graph, ClusterSpec.uniform(4))


def test_a_prime_number_of_ranks_has_one_dimension() -> None:
    found = search(graph_of("mlp"), ClusterSpec.uniform(5, 1, "200 Mbit/s"))
    assert {candidate.plan.mesh for candidate in found.plans} == {(5,)}
    assert shapes(5) == ((5,),)

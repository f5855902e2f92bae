"""What simulators see of a plan."""

from __future__ import annotations

from random import Random

import numpy
import pytest
import torch
from learned_samples import CONSTANTS, plan_of, star, workload

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.learned.context import BUNDLES, Context
from lightning_autosync.learned.ensemble import KINDS
from lightning_autosync.learned.graph import (
    MESSAGES,
    NODES,
    RELATIONS,
    Edges,
    PlanGraph,
    _waits_for,
    encode_graph,
    merge,
)
from lightning_autosync.learned.hetero import batch_graphs
from lightning_autosync.learned.plan_arrays import EVERYBODY, plan_arrays
from lightning_autosync.learned.predefined import predefined, shard_set
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.plan.topologies import MODES
from lightning_autosync.workload import Variable, Workload

LINKS, HOSTS = RELATIONS.index(("message", "routed over", "link")), RELATIONS.index(("device", "handles", "message"))


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(workload(), star(400, 100, 100), CONSTANTS)


@pytest.fixture(scope="module")
def graphs(context: Context) -> list[PlanGraph]:
    space, random = PlanSpace(context.workload, context.cluster, "compressed"), Random(0)
    return [encode_graph(plan_arrays(context, space.plan(space.draw(random)))) for _ in range(8)]


def test_nodes_and_edges_are_whole(graphs: list[PlanGraph]) -> None:
    for graph in graphs:
        counts = {name: len(nodes) for name, nodes in zip(NODES, graph.nodes, strict=True)}
        assert counts["variable"] == 10
        assert counts["device"] == 3
        assert counts["link"] == 6
        for (source, _, target), edges in zip(RELATIONS, graph.edges, strict=True):
            assert len(edges.source) == len(edges.target) == len(edges.weight)
            assert edges.source.max(initial=0) < counts[source]
            assert edges.target.max(initial=0) < counts[target]
        assert all(numpy.isfinite(array).all() for array in (*graph.nodes, graph.overall))
        assert numpy.isfinite(numpy.concatenate([edges.weight for edges in graph.edges])).all()


def test_shares_of_a_message_add_up(graphs: list[PlanGraph]) -> None:
    for graph in graphs:
        for relation in ("travels in", "part of"):
            place = [name for _, name, _ in RELATIONS].index(relation)
            edges = graph.edges[place]
            assert numpy.bincount(edges.target, edges.weight) == pytest.approx(1, abs=1e-5)


def test_routes_carry_the_load_that_the_replay_says(context: Context) -> None:
    found = plan_arrays(context, builders.ps(context.workload, context.cluster, server=0))
    graph, step = encode_graph(found), found.prediction.step_time
    busy = numpy.bincount(graph.edges[LINKS].target, graph.edges[LINKS].weight, 6)
    assert busy == pytest.approx(list(found.prediction.timeline.links.values()), rel=1e-4)
    hosts = numpy.bincount(graph.edges[HOSTS].source, graph.edges[HOSTS].weight, 3)
    assert hosts == pytest.approx(found.prediction.hosts, rel=1e-4)
    assert found.prediction.demand.shape == (len(found.mode), 6 + 3 + 1)
    assert found.prediction.demand[:, -1].sum() < step


def test_shards_lie_on_the_ranks_that_reduce_them(context: Context) -> None:
    plan = plan_of(
        context.workload,
        3,
        architecture="parameter_server",
        topology="star",
        partition={"shards": 3, "weights": [2.0, 1.0, 1.0]},
        placement=(0, 2, 2),
    )
    graph = encode_graph(plan_arrays(context, plan))
    edges = graph.edges[[name for _, name, _ in RELATIONS].index("reduced at")]
    assert edges.target.tolist() == [0, 2]
    assert edges.weight == pytest.approx([0.5, 0.5], abs=1e-3)


def test_the_depth_of_a_pair_of_trees_is_their_mean(context: Context) -> None:
    pair = {"weight": 1.0, "parents": (-1, 0, 0), "broadcast": (-1, 0, 1)}
    arrays = plan_arrays(context, plan_of(context.workload, 3, topology="packed", trees=(pair,)))
    assert set(arrays.shards.depth) == {1.5}


@pytest.mark.parametrize(("topology", "exchanges"), [("recursive_doubling", 3), ("halving_doubling", 4)])
def test_exchanges_between_pairs_look_like_trees_that_every_rank_reduces(
    topology: str, exchanges: int, context: Context
) -> None:
    """Among three ranks, there is an exchange before and one after those between the other two."""
    found = plan_arrays(context, plan_of(context.workload, 3, topology=topology, segment=65536))
    assert set(found.shards.root) == {EVERYBODY}
    assert set(found.shards.depth) == {exchanges / 2}
    assert set(found.shards.pieces) == {8}
    assert set(found.mode) == {MODES.index("tree")}


def test_many_messages_and_variables_are_merged_and_nothing_is_lost() -> None:
    variables = tuple(Variable(name=f"v{number}", shape=(100 + number,)) for number in range(200))
    many = Workload(name="many", variables=variables, forward_time=0.01, backward_time=0.02)
    cluster = star(100, 100)
    context = Context(many, cluster, CONSTANTS)
    found = plan_arrays(context, builders.partitioned_all_reduce(many, cluster))
    assert len(found.mode) > MESSAGES
    merged = merge(found)
    graph = encode_graph(found)
    assert len(graph.nodes[1]) == merged.max() + 1 <= MESSAGES + 1
    assert numpy.unique(merged).tolist() == list(range(merged.max() + 1))
    assert len(graph.nodes[0]) <= BUNDLES
    assert found.bytes.sum() == many.bytes
    busy = numpy.bincount(graph.edges[LINKS].target, graph.edges[LINKS].weight, 4)
    assert busy == pytest.approx(list(found.prediction.timeline.links.values()), rel=1e-4)


def test_messages_of_different_kinds_are_never_merged() -> None:
    variables = tuple(Variable(name=f"v{number}", shape=(1000,)) for number in range(60))
    many = Workload(name="many", variables=variables, forward_time=0.01, backward_time=0.02)
    groups = [
        {"name": variable.name, "variables": [variable.name], "topology": ("native", "ring")[number % 2]}
        for number, variable in enumerate(variables)
    ]
    plan = SyncPlan.from_dict({"format": SyncPlan.FORMAT, "world_size": 2, "groups": groups})
    found = plan_arrays(Context(many, star(100, 100), CONSTANTS), plan)
    merged = merge(found)
    for node in range(merged.max() + 1):
        assert len(set(found.mode[merged == node].tolist())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_names_mean_nothing(kind: str) -> None:
    cluster = star(400, 100, 100)
    encoded = []
    for name in ("one", "other"):
        model = workload(name)
        found = plan_arrays(Context(model, cluster, CONSTANTS), builders.ps_load_balancing(model, cluster))
        encoded.append(KINDS[kind].encode(found))
    for one, other in zip(_arrays(encoded[0]), _arrays(encoded[1]), strict=True):
        assert numpy.array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_the_company_in_a_batch(kind: str, context: Context) -> None:
    space, random = PlanSpace(context.workload, context.cluster, "compressed"), Random(3)
    items = [KINDS[kind].encode(plan_arrays(context, space.plan(space.draw(random)))) for _ in range(6)]
    network = _network(kind, items)
    with torch.inference_mode():
        together = network(KINDS[kind].collate(items))
        alone = torch.cat([network(KINDS[kind].collate([item])) for item in items])
        backwards = network(KINDS[kind].collate(items[::-1])).flip(0)
    assert together.std() > 0
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together, backwards, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("node", NODES)
def test_the_order_of_nodes_means_nothing(node: str, graphs: list[PlanGraph]) -> None:
    network = _network("hetero", graphs)
    moved = [_shuffled(graph, node) for graph in graphs]
    with torch.inference_mode():
        before, after = network(batch_graphs(graphs)), network(batch_graphs(moved))
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)


def test_placement_changes_the_graph_but_not_its_size(context: Context) -> None:
    network_items = [
        encode_graph(plan_arrays(context, builders.ps(context.workload, context.cluster, server=server)))
        for server in (0, 1, 2)
    ]
    network = _network("hetero", network_items)
    with torch.inference_mode():
        fat, thin, other_thin = network(batch_graphs(network_items)).tolist()
    assert thin == pytest.approx(other_thin, rel=1e-6)  # both links carry 100 Mbit/s
    assert fat != pytest.approx(thin, rel=1e-5)


def test_transmission_is_that_of_the_published_cost_model() -> None:
    """VGG16's first dense shard, 3,952,640 floats, on 4 nodes of 4 devices at 50 Gbit/s: 3 and 12 remote receivers."""
    cluster = ClusterSpec.uniform(nodes=4, devices=4, bandwidth="50 Gbit/s")
    model = Workload(name="fc1", variables=(Variable(name="w", shape=(3952640,)),), backward_time=0.01)
    context = Context(model, cluster, CONSTANTS)
    for local, seconds in ((True, 0.0075890688), (False, 0.0303562752)):
        plan = plan_of(model, 16, architecture="parameter_server", topology="star", local_aggregation=local)
        features = predefined(plan_arrays(context, plan))
        assert features.shape == (12,)
        assert numpy.expm1(features[0]) * context.scale == pytest.approx(seconds, rel=1e-3)
        assert features[6:].tolist() == [0.0] * 6  # no group is all-reduced


def test_every_byte_is_in_a_shard_of_its_variable(context: Context) -> None:
    space, random = PlanSpace(context.workload, context.cluster), Random(5)
    for _ in range(5):
        found = shard_set(plan_arrays(context, space.plan(space.draw(random))))
        assert set(found.variable.tolist()) == set(range(10))
        share = found.features[:, -7]  # size over total
        assert share.sum() == pytest.approx(1, rel=1e-3)


def test_an_all_reduce_is_shown_at_the_slowest_rate_however_ranks_are_numbered() -> None:
    model, encoded = workload(), []
    for rates in ((100, 400, 400), (400, 100, 400), (400, 400, 100)):
        cluster = star(*rates)
        found = shard_set(plan_arrays(Context(model, cluster, CONSTANTS), builders.all_reduce(model, cluster)))
        assert numpy.exp(found.features[:, -6]) == pytest.approx(100 / 400)  # rate over the fastest
        encoded.append(found)
    for one in encoded[1:]:
        for first, other in zip(encoded[0], one, strict=True):
            assert numpy.array_equal(first, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_lone_node_is_a_cluster_too(kind: str, devices: int) -> None:
    node = {"format": ClusterSpec.FORMAT, "name": "one", "nodes": [{"name": "node", "devices": devices}]}
    model, cluster = workload(), ClusterSpec.from_dict(node)
    item = KINDS[kind].encode(plan_arrays(Context(model, cluster, CONSTANTS), builders.all_reduce(model, cluster)))
    assert all(numpy.isfinite(array).all() for array in _arrays(item))
    with torch.inference_mode():
        assert _network(kind, [item])(KINDS[kind].collate([item, item])).isfinite().all()


def test_a_plan_without_schedule_is_refused(context: Context) -> None:
    plan = SyncPlan.from_dict({**plan_of(context.workload, 3).to_dict(), "consistency": {"mode": "asynchronous"}})
    with pytest.raises(PlanError, match="asynchronous"):
        plan_arrays(context, plan)


def _network(kind: str, items: list[object]) -> torch.nn.Module:
    """With weights drawn at random, the last ones too."""
    torch.manual_seed(0)
    network = KINDS[kind].build(KINDS[kind].features(items[0]), KINDS[kind].sized({}))
    for parameter in network.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return network.eval()


def _arrays(item: object) -> list[numpy.ndarray]:
    if isinstance(item, numpy.ndarray):
        return [item]
    assert isinstance(item, tuple)
    return [array for part in item for array in _arrays(part)]


def _shuffled(graph: PlanGraph, node: str) -> PlanGraph:
    """The same graph with the nodes of one type in another order."""
    place = NODES.index(node)
    order = numpy.random.default_rng(1).permutation(len(graph.nodes[place]))
    new = numpy.argsort(order).astype(numpy.int32)
    nodes = tuple(array[order] if number == place else array for number, array in enumerate(graph.nodes))
    edges = tuple(
        Edges(
            new[edge.source] if source == node else edge.source,
            new[edge.target] if target == node else edge.target,
            edge.weight,
        )
        for (source, _, target), edge in zip(RELATIONS, graph.edges, strict=True)
    )
    return PlanGraph(nodes, edges, graph.overall)


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        ("its pipeline", "pipeline"),
        ("paced connection from rank 0 to rank 1", "pipeline"),
        ("shared cores", "cores"),
        ("host of rank 1", "hosts"),
        ("node0 > switch", "links"),
    ],
)
def test_the_kind_of_a_span_is_what_limits_its_message(limit: str, kind: str) -> None:
    assert _waits_for(f"message 'bucket0' on {limit}") == kind

"""The replay paces connections as the engine does, and predicts what that costs."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from clusters import two_interfaces, uneven_cluster

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.plan import Compressor, Schedule, SyncPlan, builders, compile_plan
from lightning_autosync.plan.pacing import PAYLOAD_SHARE, send_buffers, sending_needs
from lightning_autosync.replay import Constants, Replay, conditions, paces
from lightning_autosync.replay.paces import Paces, bursts_of
from lightning_autosync.workload import Variable, Workload

FAT = ClusterSpec.star([50e6, 12.5e6, 12.5e6, 12.5e6])
CLUSTERS = {
    "fat": FAT,
    "fat of eight": uneven_cluster(8),
    "equal": ClusterSpec.star([10e6] * 6),
    "racks": ClusterSpec.racks(racks=2, nodes_per_rack=3, bandwidth=50e6, uplink=25e6),
    "nodes of two": ClusterSpec.uniform(nodes=3, devices=2, bandwidth=12.5e6),
    "two interfaces": two_interfaces([50e6, 12.5e6, 12.5e6, 12.5e6], [12.5e6, 12.5e6, 12.5e6, 50e6]),
}
LAYERS = Workload(
    name="layers",
    variables=tuple(
        Variable(name=f"{kind}{layer}", shape=shape)
        for layer in range(4)
        for kind, shape in (("weight", (384, 384)), ("bias", (384,)))
    ),
)
LARGE = Workload(
    name="large", variables=tuple(Variable(name=f"v{index}", shape=(400_000 + 30_000 * index,)) for index in range(8))
)
TABLES = Workload(
    name="tables",
    variables=(Variable(name="t", shape=(4000, 16), kind="row_sparse", rows=10), *LAYERS.variables[:2]),
)
TABLE = Workload(name="table", variables=TABLES.variables[:1])


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    ("builder", "arguments"),
    [
        ("partitioned_ps", {}),
        ("byteps", {"topology": "star"}),
        ("packed_trees", {}),
        ("all_reduce", {"topology": "tree", "bucket_bytes": 1}),
        ("all_reduce", {"topology": "ring", "compressor": Compressor(kind="powersgd", rank=2)}),
    ],
)
@pytest.mark.parametrize("work", [LAYERS, TABLES, TABLE], ids=["dense", "rows beside dense", "rows"])
def test_the_paces_are_the_engines(work: Workload, builder: str, arguments: dict[str, Any], cluster: str) -> None:
    spec = CLUSTERS[cluster]
    check_paces(compile_plan(builders.build(builder, work, spec, **arguments), work, spec), work, spec)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_paces_beside_gathered_rows_are_the_engines(cluster: str) -> None:
    spec = CLUSTERS[cluster]
    made, work = gathered(spec, 100_000)  # travels in many pieces
    check_paces(made, work, spec)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("topology", ["recursive_doubling", "halving_doubling"])
def test_the_paces_beside_exchanges_between_pairs_are_the_engines(topology: str, cluster: str) -> None:
    """The first two groups are exchanged in pairs, the others along packed trees."""
    spec = CLUSTERS[cluster]
    packed = builders.packed_trees(LAYERS, spec, bucket_bytes=1).groups
    in_pairs = [group.model_copy(update={"topology": topology, "trees": None}) for group in packed[:2]]
    plan = SyncPlan(world_size=spec.world_size, groups=(*in_pairs, *packed[2:]))
    for scale in (1, 10):
        made = compile_plan(plan, LAYERS, spec.scaled(scale))
        check_paces(made, LAYERS, spec.scaled(scale))
        check_held(made, LAYERS, spec.scaled(scale))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_paces_beside_connections_without_are_the_engines(cluster: str) -> None:
    """Some messages have one server each, and others travel in parts over packed trees."""
    spec = CLUSTERS[cluster]
    packed, served = (build(LARGE, spec).groups for build in (builders.packed_trees, builders.ps_load_balancing))
    alone = [group for group in served if group.variables[0] == "v3"]
    others = [one.model_copy(update={"variables": ("v0", "v1")}) for one in packed[:1]]
    others += [
        one.model_copy(update={"variables": (f"v{k}",), "name": f"g{k}"}) for one in packed[:1] for k in (2, 4, 5, 6, 7)
    ]
    made = compile_plan(SyncPlan(world_size=spec.world_size, groups=(*others, *alone)), LARGE, spec)
    check_paces(made, LARGE, spec)
    check_held(made, LARGE, spec)


def gathered(spec: ClusterSpec, rows: int) -> tuple[Schedule, Workload]:
    """A table whose touched rows all ranks gather, beside dense layers on packed trees."""
    table = Variable(name="t", shape=(400_000, 16), kind="row_sparse", rows=rows)
    work = Workload(name="tables", variables=(table, *LAYERS.variables))
    of_rows = builders.gathered_rows(work, spec).groups[0]
    dense = [group for group in builders.packed_trees(work, spec).groups if "t" not in group.variables]
    return compile_plan(SyncPlan(world_size=spec.world_size, groups=(of_rows, *dense)), work, spec), work


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("builder", ["partitioned_ps", "ps_load_balancing", "byteps", "packed_trees"])
@pytest.mark.parametrize("work", [LAYERS, TABLES, TABLE], ids=["dense", "rows beside dense", "rows"])
@pytest.mark.parametrize("factor", [1, 10])  # with 10, most buffers are larger than the least
def test_the_kernel_holds_what_the_engine_lets_it(factor: int, work: Workload, builder: str, cluster: str) -> None:
    spec = CLUSTERS[cluster].scaled(factor)
    check_held(compile_plan(builders.build(builder, work, spec), work, spec), work, spec)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("rows", [10, 100_000])
def test_the_kernel_holds_what_the_engine_lets_it_of_gathered_rows(rows: int, cluster: str) -> None:
    spec = CLUSTERS[cluster].scaled(10)
    made, work = gathered(spec, rows)
    check_held(made, work, spec)


def check_held(made: Schedule, work: Workload, spec: ClusterSpec) -> None:
    """The replay lets the kernel hold what the engine's send buffers do."""
    pricing = Replay(work, spec, Constants())
    step = pricing._prepare(made)
    found = Paces.of(step.stages, step.loads, pricing._forest.trees, pricing._network)
    links, ranks = LinkGraph(spec), spec.world_size
    for pair, held in zip(found.used.tolist(), found.held.tolist(), strict=True):
        (interface, rank), peer = divmod(pair // ranks, ranks), pair % ranks
        rates = links.bandwidth(rank, peer, interface), links.bandwidth(peer, rank, interface)
        round_trip = links.latency(rank, peer) + links.latency(peer, rank)
        need = sending_needs(made, links, rank, interface).get(peer)
        needed = (numpy.inf, False) if need is None else (need.rate, need.pace is not None)
        on_the_way = round_trip * (rates[0] if need is None else need.rate / PAYLOAD_SHARE)
        buffer = float(send_buffers(*map(numpy.float64, rates), numpy.float64(round_trip), *needed))
        assert held == pytest.approx(2 * buffer - on_the_way, rel=1e-2)
    assert len(found.used)


def test_too_many_stages_and_connections_have_no_paces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "lightning_autosync.replay")
    made = compile_plan(builders.packed_trees(LARGE, FAT), LARGE, FAT)
    pricing = Replay(LARGE, FAT, Constants())
    step = pricing._prepare(made)
    given = step.stages, step.loads, pricing._forest.trees, pricing._network
    size = len(step.stages) * 6  # one star, both ways
    monkeypatch.setattr(paces, "_MOST", size)
    assert len(Paces.of(*given).used)
    assert not caplog.messages
    monkeypatch.setattr(paces, "_MOST", size - 1)
    assert not len(Paces.of(*given).used)
    assert "paces are ignored" in caplog.text


def test_fluids_ignore_the_paces_of_too_many_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "lightning_autosync.replay")
    spec = ClusterSpec.from_dict(
        {**uneven_cluster(8).to_dict(), "nodes": [{"name": f"node{k}", "speed": 1.0 if k else 0.5} for k in range(8)]}
    )
    made = compile_plan(builders.byteps(LARGE, spec), LARGE, spec)

    def seconds() -> float:
        return Replay(LARGE, spec, Constants()).predict(made, "fluid").step_time

    seconds()
    assert not caplog.messages
    monkeypatch.setattr(conditions, "_MOST_PACED", 0)
    seconds()
    assert "connections with a pace exceed 0" in caplog.text


def check_paces(made: Schedule, work: Workload, spec: ClusterSpec) -> None:
    """The replay and the engine pace the same connections alike."""
    pricing = Replay(work, spec, Constants())
    step = pricing._prepare(made)
    replayed = Paces.of(step.stages, step.loads, pricing._forest.trees, pricing._network)
    found: dict[int, dict[int, float]] = {row: {} for row in range(spec.interface_count * spec.world_size)}
    for pair, rate in zip(replayed.pairs.tolist(), replayed.rates.tolist(), strict=True):
        found[pair // spec.world_size][pair % spec.world_size] = PAYLOAD_SHARE * rate
    for row, rates in found.items():
        interface, rank = divmod(row, spec.world_size)
        needs = sending_needs(made, LinkGraph(spec), rank, interface)
        paces = {peer: need.pace for peer, need in needs.items() if need.pace is not None}
        assert rates == pytest.approx(paces, rel=1e-2)


def times(
    work: Workload, builder: str, cluster: ClusterSpec, monkeypatch: pytest.MonkeyPatch, **arguments: Any
) -> tuple[float, float]:
    """Seconds of a step with and without paces."""
    made = compile_plan(builders.build(builder, work, cluster, **arguments), work, cluster)
    pricing = Replay(work, cluster, Constants(cores=2, burst=128 * 1024))
    paced = pricing.predict(made, "frames").step_time
    nothing = Paces.none()
    monkeypatch.setattr(Paces, "of", lambda *_: nothing)
    return paced, pricing.predict(made, "frames").step_time


@pytest.mark.parametrize(
    ("builder", "work", "cluster"),
    [
        ("partitioned_ps", LAYERS, "fat"),
        ("uneven_partitioned_ps", LARGE, "fat"),
        ("uneven_partitioned_ps", LARGE, "nodes of two"),
    ],
)
def test_paces_cost_nothing_where_messages_with_other_servers_share_connections(
    builder: str, work: Workload, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the largest rate that one message needs as the pace, these steps take 15 to 32% longer.
    paced, free = times(work, builder, CLUSTERS[cluster], monkeypatch)
    assert paced < 1.02 * free


def test_paces_make_trees_of_unequal_weights_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    paced, free = times(LARGE, "packed_trees", ClusterSpec.star([50e6, 25e6, 25e6, 12.5e6, 12.5e6]), monkeypatch)
    assert paced < 0.96 * free


def test_the_pace_does_not_delay_a_piece_that_leaves_in_one_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each tree has one piece, and the links are idle during the forward pass. Where a pace slows the pieces down at
    # every hop, the step takes 21% longer.
    small = Workload(name="small", forward_time=0.05, variables=(Variable(name="v", shape=(18_000,)),))
    paced, free = times(small, "all_reduce", ClusterSpec.star([50e6] + [6.25e6] * 7), monkeypatch, topology="tree")
    assert paced < 1.05 * free


def test_bursts_are_smaller_on_long_routes() -> None:
    segment = 1514
    rates, latencies = numpy.array([1e6, 1e6, 1e6, 1e8]), numpy.array([0.0, 1.1e-3, 20e-3, 20e-3])
    expected = [10 * segment, 1e6 / 1024 + 64 * 1024 / 16, 2 * segment, 10 * segment]
    assert bursts_of(rates, latencies) == pytest.approx(expected)

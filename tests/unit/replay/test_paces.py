"""The replay paces connections as the engine does, and predicts what that costs."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.plan import Compressor, builders, compile_plan
from lightning_autosync.plan.pacing import PAYLOAD_SHARE, pacing_rates
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.workload import Variable, Workload

FAT = ClusterSpec.star([50e6, 12.5e6, 12.5e6, 12.5e6])
CLUSTERS = {
    "fat": FAT,
    "racks": ClusterSpec.racks(racks=2, nodes_per_rack=3, bandwidth=50e6, uplink=25e6),
    "nodes of two": ClusterSpec.uniform(nodes=3, devices=2, bandwidth=12.5e6),
}
LAYERS = Workload(
    name="layers",
    variables=tuple(
        Variable(name=f"{kind}{layer}", shape=shape)
        for layer in range(4)
        for kind, shape in (("weight", (384, 384)), ("bias", (384,)))
    ),
)
TABLES = Workload(
    name="tables",
    variables=(Variable(name="t", shape=(4000, 16), kind="row_sparse", rows=10), *LAYERS.variables[:2]),
)


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
@pytest.mark.parametrize("work", [LAYERS, TABLES], ids=["dense", "rows"])
def test_the_paces_are_the_engines(work: Workload, builder: str, arguments: dict[str, Any], cluster: str) -> None:
    spec = CLUSTERS[cluster]
    made = compile_plan(builders.build(builder, work, spec, **arguments), work, spec)
    paces = Replay(work, spec, Constants())._prepare(made).loads.paces
    found: dict[int, dict[int, float]] = {rank: {} for rank in range(spec.world_size)}
    for pair, rate in zip(paces.pairs.tolist(), paces.rates.tolist(), strict=True):
        found[pair // spec.world_size][pair % spec.world_size] = PAYLOAD_SHARE * rate
    for rank, rates in found.items():
        assert rates == pytest.approx(pacing_rates(made, LinkGraph(spec), rank), rel=1e-2)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize(
    ("builder", "arguments", "measured"),
    [("partitioned_ps", {}, 0.3995), ("all_reduce", {"topology": "tree", "bucket_bytes": 1}, 0.3076)],
)
def test_several_messages_keep_the_pace_of_one(
    builder: str, arguments: dict[str, Any], measured: float, detail: Any
) -> None:
    """Medians in seconds of four layers on emulated links, where connections serve more messages than one.

    If connections were not paced, partitioned servers would take 0.297 s.
    """
    made = compile_plan(builders.build(builder, LAYERS, FAT, **arguments), LAYERS, FAT)
    pricing = Replay(LAYERS, FAT, Constants(cores=2, burst=128 * 1024))
    assert pricing.predict(made, detail).step_time == pytest.approx(measured, rel=0.05)

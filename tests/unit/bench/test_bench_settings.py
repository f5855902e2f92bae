"""What a bench run may be told, and one clear error for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_autosync.bench.preparation import interleaved, make_cluster, make_workload, prepare
from lightning_autosync.bench.settings import Settings
from lightning_autosync.cluster import ClusterSpec, configuration_directory
from lightning_autosync.errors import DocumentError

BASE: dict[str, Any] = {"model": {"kind": "layers", "tensors": 4, "width": 8, "batch": 2}}
STAR = {"format": "autosync-cluster/1", "name": "star", "star": {"bandwidths": ["4 Mbit/s", "1 Mbit/s", "1 Mbit/s"]}}


def composed(*overrides: str) -> Settings:
    with initialize_config_dir(str(configuration_directory()), version_base="1.3"):
        return Settings.parse(OmegaConf.to_container(compose("bench", list(overrides)), resolve=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"kind": "gpt5"}}, "model: Input tag 'gpt5'.*'layers', 'recommender', 'flat', 'digits'"),
        ({"model": {"kind": "layers", "tensors": 3, "width": 8, "batch": 2}}, "tensors: .*must be even"),
        ({"model": {"kind": "flat", "mib": 0}}, "mib: .*greater than 0"),
        ({"launch": "slurm"}, "launch: .*'local' or 'emulated'"),
        ({"launch": "emulated"}, "cluster: missing; launch=emulated needs one"),
        ({"rank_order": "interleaved"}, "cluster: missing; cluster_scale and rank_order"),
        ({"scheduling": "fifo"}, "scheduling: .*'none' or 'batch'"),
        ({"rounds": 0}, "rounds: .*greater than 0"),
        ({"steps": "many"}, "steps: .*valid integer"),
        ({"speed": 3}, "speed: unknown field"),
        ({"ddp": {"bucket_cap_mb": []}}, "ddp.bucket_cap_mb: .*at least 1 item"),
        ({"ddp": {"bucket_cap_mb": ["large"]}}, "ddp.bucket_cap_mb"),
        ({"contenders": {"a": {}}}, r"contenders.a: expected one of ddp, builder and plan, got none"),
        ({"contenders": {"a": {"builder": "ps", "plan": "x.yaml"}}}, "contenders.a: .*got builder and plan"),
        ({"contenders": {"a": {"ddp": {"buckets": 3}}}}, "contenders.a.ddp.buckets: unknown field"),
        ({"contenders": {"a": {"plan": "x.yaml", "topology": "ring"}}}, "contenders.a.topology: unknown field"),
        ({"contenders": {"a": {"ddp": {}, "embeddings": "rows"}}}, "contenders.a: .*DDP knows no 'rows'"),
        ({"contenders": {"ddp": {"builder": "ps"}}}, "contenders: 'ddp' is the name of a DDP opponent"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(DocumentError, match=message) as caught:
        Settings.parse({**BASE, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contenders": {"a": {"builder": "magic"}}}, "contenders.a: .*'magic' is neither.*all_reduce"),
        ({"contenders": {"a": {"builder": "byteps", "speed": 1}}}, "no argument 'speed'; it takes topology, bucket_"),
        ({"contenders": {"a": {"builder": "byteps", "topology": "moebius"}}}, "contenders.a: .*topology"),
        ({"contenders": {"a": {"builder": "ps", "server": 7}}}, "contenders.a: .*7"),
        ({"contenders": {"a": {"plan": "missing.yaml"}}}, "contenders.a: missing.yaml: cannot be read"),
        ({"cluster": STAR, "ranks": 2}, "ranks: 2 asked for, but cluster 'star' has 3"),
        ({"cluster": {**STAR, "colour": 1}}, "cluster: colour: unknown field"),
    ],
)
def test_contenders_and_clusters_that_cannot_be(changes, message):
    with pytest.raises(DocumentError, match=message) as caught:
        prepare(Settings.parse({**BASE, **changes}))
    assert "\n" not in str(caught.value)


def test_a_plan_for_another_world_is_refused(tmp_path: Path):
    plan = prepare(Settings.parse({**BASE, "contenders": {"a": {"builder": "ps"}}})).orders["a"]["plan"]
    (tmp_path / "plan.yaml").write_text(OmegaConf.to_yaml(plan))
    with pytest.raises(DocumentError, match=r"contenders\.b: .*2 ranks"):
        prepare(Settings.parse({**BASE, "ranks": 3, "contenders": {"b": {"plan": str(tmp_path / "plan.yaml")}}}))


def test_the_sweep_is_the_product_of_its_arguments():
    settings = composed()
    names = list(settings.all_contenders())
    assert len(names) == 17
    assert names[0] == "ddp"
    assert {"ddp_view_static", "ddp_1", "ddp_5_view", "ddp_100_static", "native"} <= set(names)


@pytest.mark.parametrize("model", ["layers60", "layers300", "digits", "flat", "recommender"])
def test_the_shipped_models(model):
    workload = make_workload(composed(f"model={model}").model, "rows")
    if model.startswith("layers"):
        assert len(workload.variables) == int(model.removeprefix("layers"))
    if model == "recommender":
        assert workload.variables[0].kind == "row_sparse"
        assert workload.variables[0].shape == (1_000_000, 32)


@pytest.mark.parametrize("experiment", ["overhead", "row_sparse"])
def test_the_shipped_experiments_can_be_prepared(experiment):
    settings = composed(f"experiment={experiment}")
    assert settings.meets_protocol
    assert len(prepare(settings).orders) > 5


@pytest.mark.parametrize("cluster", ["fat_node_star", "two_racks_2to1"])
@pytest.mark.parametrize("rank_order", ["natural", "interleaved"])
def test_the_shaped_links_can_be_prepared(cluster, rank_order):
    settings = composed("experiment=shaped_links", f"cluster={cluster}", f"rank_order={rank_order}")
    assert settings.meets_protocol
    assert list(prepare(settings).orders) == ["ddp", "ddp_view", "byteps", "packed_trees", "hierarchical"]


def test_scaled_and_interleaved():
    racks = ClusterSpec.racks(racks=2, nodes_per_rack=3, bandwidth=100.0, uplink=50.0)
    assert [racks.nodes[node].name for node in interleaved(racks).rank_nodes] == [
        racks.nodes[index].name for index in (0, 3, 1, 4, 2, 5)
    ]
    settings = Settings.parse({**BASE, "cluster": STAR, "cluster_scale": 0.5, "rank_order": "interleaved"})
    cluster = make_cluster(settings)
    assert cluster.links[0].bandwidth == pytest.approx(0.25e6)
    assert cluster.rank_nodes == (0, 2, 1)

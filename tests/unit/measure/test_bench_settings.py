"""What a bench run may be told, and one clear error for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clusters import two_interfaces
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from sweeps import crossed, sweep

from lightning_autosync.cluster import ClusterSpec, configuration_directory
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.bench.preparation import interleaved, make_cluster, plan_class, prepare
from lightning_autosync.measure.bench.result import BenchResult, ContenderMeasurement
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.models.model import with_kinds_of
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.plan import builders
from lightning_autosync.plan.spec import SyncPlan
from lightning_autosync.workload import Variable, Workload

BASE: dict[str, Any] = {"model": {"kind": "layers", "tensors": 4, "width": 8, "batch": 2}}
STAR = {"format": "autosync-cluster/1", "name": "star", "star": {"bandwidths": ["4 Mbit/s", "1 Mbit/s", "1 Mbit/s"]}}


def composed(*overrides: str) -> BenchSettings:
    with initialize_config_dir(str(configuration_directory()), version_base="1.3"):
        return BenchSettings.parse(OmegaConf.to_container(compose("bench", list(overrides)), resolve=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"kind": "gpt5"}},
            "model: Input tag 'gpt5'.*'layers', 'recommender', 'flat', 'digits'",
        ),
        ({"model": {"kind": "layers", "tensors": 3, "width": 8, "batch": 2}}, "tensors: .*must be even"),
        ({"model": {"kind": "flat", "mib": 0}}, "mib: .*greater than 0"),
        (
            {"device": "cuda", "model": {"kind": "paced", "catalogue": "vgg16"}},
            "model: paced: needs device=cpu, because paced computation is on the CPU",
        ),
        (
            {"model": {"kind": "vgg", "size": 7}},
            r"model: size: got 7; allowed: at least 8, because each of the 3 convolutions \(channels\) halves it",
        ),
        (
            {"model": {"kind": "transformer", "heads": 7}},
            "model: heads: got 7; allowed: a number that divides the width, 512",
        ),
        ({"device": "cuda", "timeline": True}, "timeline: needs device=cpu"),
        ({"device": "tpu"}, "device: 'tpu' is not known; did you mean 'cpu'\\? allowed: cpu, cuda"),
        ({"contenders": {"mine": {"ddp": {}, "overlap": True}}}, "overlap: DDP has none; allowed: false"),
        ({"model": {"kind": "paced"}}, "model: expected exactly one of catalogue and workload_file"),
        (
            {"model": {"kind": "paced", "catalogue": "vgg17"}},
            r"model: no model 'vgg17' in the catalogue; did you mean 'vgg16'\? allowed: vgg16",
        ),
        ({"model": {"kind": "paced", "catalogue": "vgg16", "scale": 0}}, "^model.scale: .*greater than 0"),
        ({"model": {"kind": "paced", "catalogue": "vgg16", "compute": "0 s"}}, "model: compute: must be above zero"),
        ({"model": {"kind": "paced", "workload_file": "missing.yaml"}}, "model: missing.yaml: cannot be read"),
        (
            {"launch": {"kind": "torchrun"}},
            "launch: no launch of this subcommand; allowed: .*, ray; this subcommand starts",
        ),
        ({"launch": {"kind": "emulated"}}, "cluster: missing; launch=emulated needs one"),
        (
            {"launch": {"kind": "emulated"}, "cluster_fastest": "200 Mbit/s"},
            "cluster: missing; launch=emulated needs one, for example cluster=fat_node_star",
        ),
        ({"rank_order": "interleaved"}, "cluster: missing; cluster_scale, cluster_fastest and rank_order"),
        (
            {"cluster": STAR, "cluster_scale": 2.0, "cluster_fastest": 1e6},
            "cluster_scale and cluster_fastest exclude each other",
        ),
        ({"cluster": STAR, "cluster_fastest": "fast"}, "cluster_fastest: expected a number or a rate"),
        (
            {"contenders": {"a": {"ddp": {"hook": "int4"}}}},
            "contenders.a.ddp.hook: 'int4' is not known; .*powersgd",
        ),
        ({"steps": 6, "contenders": {"a": {"ddp": {"hook": "post_local_sgd"}}}}, "steps: 6 is not a multiple of 4"),
        ({"scheduling": "fifo"}, "scheduling: 'fifo' is not known; allowed: none, batch"),
        ({"rounds": 0}, "rounds: .*greater than 0"),
        ({"steps": "many"}, "steps: .*valid integer"),
        ({"speed": 3}, "speed: unknown field"),
        ({"ddp": {"bucket_cap_mb": []}}, "ddp.bucket_cap_mb: .*at least 1 item"),
        ({"ddp": {"bucket_cap_mb": ["large"]}}, "ddp.bucket_cap_mb"),
        ({"contenders": {"a": {}}}, r"contenders.a: expected exactly one of ddp, builder and plan, got none"),
        ({"contenders": {"a": {"builder": "ps", "plan": "x.yaml"}}}, "contenders.a: .*got builder and plan"),
        ({"contenders": {"a": {"ddp": {"buckets": 3}}}}, "contenders.a.ddp.buckets: unknown field"),
        ({"contenders": {"a": {"plan": "x.yaml", "topology": "ring"}}}, "contenders.a.topology: unknown field"),
        ({"contenders": {"a": {"ddp": {}, "embeddings": "rows"}}}, "contenders.a: .*DDP does not support 'rows'"),
        ({"contenders": {"ddp": {"builder": "ps"}}}, "contenders: 'ddp' is the name of a DDP contender"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(DocumentError, match=message) as caught:
        BenchSettings.parse({**BASE, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contenders": {"a": {"builder": "magic"}}}, "contenders.a: .*'magic' is neither.*all_reduce"),
        ({"contenders": {"a": {"builder": "byteps", "speed": 1}}}, "no argument 'speed'; allowed: topology, bucket_"),
        ({"contenders": {"a": {"builder": "byteps", "topology": "moebius"}}}, "contenders.a: .*topology"),
        ({"contenders": {"a": {"builder": "ps", "server": 7}}}, "contenders.a: .*7"),
        ({"contenders": {"a": {"builder": "nowhere:make"}}}, "contenders.a: builder 'nowhere:make': No module"),
        ({"contenders": {"a": {"builder": "os:getcwd"}}}, "contenders.a: builder 'os:getcwd'"),
        ({"contenders": {"a": {"ddp": {"hook": "powersgd"}}}}, "contenders.a: ddp.bucket_cap_mb: .*one bucket only"),
        ({"contenders": {"a": {"plan": "missing.yaml"}}}, "contenders.a: missing.yaml: cannot be read"),
        ({"cluster": STAR, "ranks": 2}, "ranks: 2 requested, but cluster 'star' has 3"),
        ({"cluster": {**STAR, "colour": 1}}, "cluster: colour: unknown field"),
    ],
)
def test_contenders_and_clusters_that_cannot_be(changes, message):
    with pytest.raises(DocumentError, match=message) as caught:
        prepare(BenchSettings.parse({**BASE, **changes}))
    assert "\n" not in str(caught.value)


def test_a_plan_for_another_world_is_refused(tmp_path: Path):
    plan = prepare(BenchSettings.parse({**BASE, "contenders": {"a": {"builder": "ps"}}})).orders["a"]["plan"]
    (tmp_path / "plan.yaml").write_text(OmegaConf.to_yaml(plan))
    with pytest.raises(DocumentError, match=r"contenders\.b: .*plan\.yaml: .*2 ranks"):
        prepare(BenchSettings.parse({**BASE, "ranks": 3, "contenders": {"b": {"plan": str(tmp_path / "plan.yaml")}}}))


@pytest.mark.parametrize("kind", ["local", "emulated", "ssh"])
def test_addresses_of_other_hosts_are_left_out_where_all_ranks_are_here(kind: str) -> None:
    """As in the file that `autosync probe` writes."""
    addressed = two_interfaces([1e7] * 2, [1e7] * 2, [("10.0.0.1", "10.1.0.1"), ("10.0.0.2", "10.1.0.2")])
    settings = BenchSettings.parse({**BASE, "cluster": addressed.to_dict(), "launch": {"kind": kind}})
    for found in (make_cluster(settings, None), prepare(settings).cluster):
        addresses = {place.address for node in found.nodes for place in (node, *node.interfaces)}
        assert (addresses == {None}) == (kind != "ssh")
        assert kind != "ssh" or None not in addresses


def test_the_sweep_is_the_product_of_its_arguments():
    settings = composed()
    names = list(settings.all_contenders())
    assert len(names) == 17
    assert names[0] == "ddp"
    assert {"ddp_view_static", "ddp_1", "ddp_5_view", "ddp_100_static", "native"} <= set(names)


@pytest.mark.parametrize("model", ["layers60", "layers300", "digits", "flat", "recommender"])
def test_the_shipped_models(model):
    workload = composed(f"model={model}").model.workload("rows")
    if model.startswith("layers"):
        assert len(workload.variables) == int(model.removeprefix("layers"))
    if model == "recommender":
        assert workload.variables[0].kind == "row_sparse"
        assert workload.variables[0].shape == (1_000_000, 32)


@pytest.mark.parametrize("rows", [4095, 4096])
def test_rows_of_a_models_tables_travel_as_in_a_job(rows):
    transformer = {"kind": "transformer", "vocabulary": rows, "width": 8, "heads": 1, "layers": 1, "length": 8}
    workload = model_of(transformer).workload("rows")
    kinds = {variable.name: variable.kind for variable in workload.variables}
    assert kinds.pop("tokens.weight") == ("row_sparse" if rows == 4096 else "dense")
    assert set(kinds.values()) == {"dense"}  # also of the table of positions


def test_a_measured_workload_takes_its_kinds_from_the_planned_one():
    def workload(**kinds: str) -> Workload:
        rows = {"row_sparse": 3.0}
        return Workload(
            name="tables",
            variables=[Variable(name=n, shape=(9, 2), kind=k, rows=rows.get(k)) for n, k in kinds.items()],
        )

    planned = workload(small="dense", large="row_sparse", crowded="row_sparse", layer="dense")
    measured = workload(small="row_sparse", large="row_sparse", crowded="dense", layer="dense")
    found = {one.name: (one.kind, one.rows) for one in with_kinds_of(planned, measured).variables}
    assert found == {
        "small": ("dense", None),
        "large": ("row_sparse", 3.0),
        "crowded": ("row_sparse", None),
        "layer": ("dense", None),
    }


PACED = ["vgg_like", "resnet_like", "densenet_like", "bert_like", "ncf_like", "gpt_like"]


@pytest.mark.parametrize("model", PACED)
def test_the_shipped_workloads_are_small_and_keep_their_structure(model):
    workload = composed(f"model={model}").model.workload("rows")
    assert 4e6 < workload.bytes < 25e6
    assert len(workload.variables) == {"densenet_like": 364, "vgg_like": 32}.get(model, len(workload.variables))
    tables = [variable for variable in workload.variables if variable.kind == "row_sparse"]
    assert bool(tables) == (model in ("bert_like", "ncf_like"))


def test_a_paced_model_takes_its_compute_from_the_rate_or_as_told():
    by_rate = [
        composed("model=vgg_like", f"model.flops_per_second={rate}").model.workload("rows") for rate in (1e12, 2e12)
    ]
    assert by_rate[0].backward_time == pytest.approx(2 * by_rate[1].backward_time)
    told = composed("model=vgg_like", "model.compute=300ms").model.workload("rows")
    assert told.forward_time + told.backward_time == pytest.approx(0.3)


def test_embeddings_of_a_paced_model_are_as_the_contender_has_them():
    model = composed("model=ncf_like").model
    kinds = {how: {v.kind for v in model.workload(how).variables} for how in ("dense", "sparse", "rows")}
    assert kinds == {"dense": {"dense"}, "sparse": {"dense", "sparse"}, "rows": {"dense", "row_sparse"}}


def test_a_captured_workload_can_be_paced(tmp_path: Path):
    given = composed("model=vgg_like").model.workload("dense")
    given.save(tmp_path / "captured.yaml")
    settings = BenchSettings.parse({"model": {"kind": "paced", "workload_file": str(tmp_path / "captured.yaml")}})
    assert settings.model.workload("dense") == given


def test_every_contender_there_is_can_be_prepared():
    settings = composed("model=bert_like", "cluster=fat_node_star", "contenders=all", "ddp=quick")
    found = prepare(settings)
    assert {"autosync", "byteps", "byteps_1", "ddp_bf16", "ddp_post_local", "parallax"} <= set(found.orders)
    assert {name for name, one in found.classes.items() if one == "low precision"} == {"ddp_fp16", "ddp_bf16"}
    assert {name for name, one in found.classes.items() if one == "relaxed or lossy"} == {
        "ddp_powersgd",
        "ddp_post_local",
    }
    assert "shards" in found.reasons["autosync"]


@pytest.mark.parametrize(
    ("compressor", "expected"),
    [("none", "exact"), ("bf16", "low precision"), ("int8", "relaxed or lossy"), ("topk", "relaxed or lossy")],
)
def test_the_class_of_a_plan_follows_its_compressors(compressor, expected):
    cluster = ClusterSpec.from_dict(STAR)
    workload: Workload = composed("model=layers60").model.workload("dense")
    assert plan_class(builders.all_reduce(workload, cluster, compressor=compressor)) == expected


def own_builder(workload: Workload, cluster: ClusterSpec, *, server: int = 0) -> SyncPlan:
    return builders.ps(workload, cluster, server=server)


def test_a_function_can_build_the_plan():
    contender = {"builder": f"{__name__}:own_builder", "server": 1}
    order = prepare(BenchSettings.parse({**BASE, "contenders": {"own": contender}})).orders["own"]
    assert order["plan"]["groups"][0]["placement"] == [1]
    with pytest.raises(DocumentError, match="no argument 'port'; allowed: server"):
        prepare(BenchSettings.parse({**BASE, "contenders": {"own": {**contender, "port": 1}}}))


def test_on_one_machine_the_choice_is_that_of_the_strategy():
    settings = composed("contenders=quick", "model=layers60", "ranks=2")
    plan = SyncPlan.from_dict(prepare(settings).orders["autosync"]["plan"])
    assert {group.topology for group in plan.groups} == {"shared_memory"}


@pytest.mark.parametrize(("rounds", "foreign", "meets"), [(5, 0.0, True), (4, 0.0, False), (5, 0.5, False)])
def test_a_run_that_was_cut_short_or_disturbed_backs_no_claim(rounds, foreign, meets):
    settings = composed("contenders=quick", "ddp=short", "model=layers60", "rounds=5", "steps=8", "warm_up=5")
    found = {"ddp": ContenderMeasurement([[[1.0], [1.0]]] * rounds, None, [foreign] * rounds, 0.0)}
    assert BenchResult(settings, prepare(settings), None, {}, found).meets_protocol is meets


EXPERIMENTS = ["fat_star_4", "fat_star_8", "two_racks", "two_racks_interleaved", "embedding", "equal_switch", "matrix"]


@pytest.mark.parametrize("experiment", sweep(EXPERIMENTS, ["fat_star_8", "two_racks_interleaved", "matrix"]))
def test_the_experiments_behind_links_can_be_prepared(experiment):
    settings = composed(f"experiment={experiment}")
    assert settings.emulated
    assert settings.long_enough
    found = prepare(settings)
    assert found.cluster.world_size in (4, 8)
    names = list(found.orders)
    assert names[:9] == [
        *(f"ddp{cap}_view{static}" for cap in ("", "_1", "_5", "_100") for static in ("", "_static")),
        "autosync",
    ]


@pytest.mark.parametrize("experiment", ["overhead", "row_sparse"])
def test_the_shipped_experiments_can_be_prepared(experiment):
    settings = composed(f"experiment={experiment}")
    assert settings.long_enough
    assert len(prepare(settings).orders) > 5


@pytest.mark.parametrize(
    ("cluster", "rank_order"), crossed(["fat_node_star", "two_racks_2to1"], ["natural", "interleaved"])
)
def test_the_shaped_links_can_be_prepared(cluster, rank_order):
    settings = composed("experiment=shaped_links", f"cluster={cluster}", f"rank_order={rank_order}")
    assert settings.long_enough
    ddp = ["ddp", "ddp_static", "ddp_view", "ddp_view_static"]
    assert list(prepare(settings).orders) == [*ddp, "byteps", "packed_trees", "hierarchical"]


def test_scaled_and_interleaved():
    racks = ClusterSpec.racks(racks=2, nodes_per_rack=3, bandwidth=100.0, uplink=50.0)
    assert [racks.nodes[node].name for node in interleaved(racks).rank_nodes] == [
        racks.nodes[index].name for index in (0, 3, 1, 4, 2, 5)
    ]
    settings = BenchSettings.parse({**BASE, "cluster": STAR, "cluster_scale": 0.5, "rank_order": "interleaved"})
    cluster = make_cluster(settings, settings.ranks)
    assert cluster.links[0].bandwidth == pytest.approx(0.25e6)
    assert cluster.rank_nodes == (0, 2, 1)


def test_the_fastest_link_sets_the_scale():
    cluster = make_cluster(BenchSettings.parse({**BASE, "cluster": STAR, "cluster_fastest": "2 Mbit/s"}), None)
    assert [link.bandwidth for link in cluster.links] == pytest.approx([0.25e6, 0.0625e6, 0.0625e6])


@pytest.mark.parametrize("contender", ["autosync", "autosync_sparse"])
def test_the_default_gathers_the_rows_of_the_embedding_experiment_once(contender: str):
    order = prepare(composed("experiment=embedding")).orders[contender]
    workload = Workload.from_dict(order["workload"])
    plan = SyncPlan.from_dict(order["plan"])
    row_wise = {variable.name for variable in workload.variables if variable.kind != "dense"}
    assert row_wise
    gathered = {name for group in plan.groups if group.topology == "gather_rows" for name in group.variables}
    assert gathered == row_wise

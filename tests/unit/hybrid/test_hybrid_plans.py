"""Hybrid plans as data: files, tables, groups of ranks, and what is refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_models import bert, gpt2, mlp
from schemas import check_schema
from sweeps import examples
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.plan import Layout, Signature
from lightning_autosync.hybrid.signatures import RULES, kind_of, refusal
from lightning_autosync.hybrid.validation import check_plan, fingerprint
from lightning_autosync.plan import builders
from lightning_autosync.workload import describe


@st.composite
def hybrid_plans(draw: st.DrawFn) -> HybridPlan:
    mesh = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
    ranks = draw(st.none() | st.permutations(range(int(numpy.prod(mesh)))))
    names = draw(st.lists(st.text("ab.01", max_size=6), min_size=1, max_size=5, unique=True))

    def some(values: Any) -> Any:
        return draw(st.tuples(*[st.sampled_from(values)] * len(mesh)))

    layers = [
        LayerPlan(
            module=name,
            signature=some(get_args(Signature)),
            output=draw(st.sampled_from([None, some(get_args(Layout))])),
            parts=draw(st.integers(1, 3)),
            batch_axis=draw(st.sampled_from([0, 1, None])),
        )
        for name in names
    ]
    return HybridPlan(mesh=mesh, ranks=ranks, layers=tuple(layers), workload=draw(st.none() | st.just("0123456789ab")))


@examples(40)
@given(st.data())
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_files_keep_everything(tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject) -> None:
    plan = data.draw(hybrid_plans())
    path = tmp_path_factory.mktemp("plans") / f"plan.{suffix}"
    plan.save(path)
    assert HybridPlan.load(path) == plan
    check_schema(HybridPlan, json.loads(json.dumps(plan.to_dict())))
    assert plan.describe().startswith(f"hybrid plan {plan.fingerprint}")


@examples(40)
@given(hybrid_plans())
def test_ranks_that_differ_along_some_dimensions_form_groups(plan: HybridPlan) -> None:
    for dimensions in product([False, True], repeat=len(plan.mesh)):
        chosen = [dimension for dimension, wanted in enumerate(dimensions) if wanted]
        groups = plan.groups(chosen)
        assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
        for group in groups:
            places = numpy.array([plan.coordinates(rank) for rank in group])
            varying = [dimension for dimension in range(len(plan.mesh)) if len(set(places[:, dimension])) > 1]
            assert varying == chosen
            assert [tuple(place) for place in places] == sorted(map(tuple, places))


def _plan(**fields: Any) -> dict[str, Any]:
    layers = [{"module": "0", "signature": ["dp", "col"]}]
    return {"format": "autosync-hybrid/1", "mesh": [2, 2], "layers": layers, **fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "autosync-hybrid/9"}, "format: 'autosync-hybrid/9' was written by a newer release"),
        ({"mesh": [2, 1]}, "mesh[1]: a dimension of size 1 splits nothing"),
        ({"mesh": [2, 0]}, "mesh[1]:"),
        ({"ranks": [0, 1, 2, 2]}, "ranks: expected each of 0 to 3 once"),
        ({"layers": []}, "layers:"),
        ({"layers": [{"module": "0", "signature": ["dp"]}]}, "layers[0].signature: expected one for each of 2 dimen"),
        ({"layers": [{"module": "0", "signature": ["dp", "column"]}]}, "layers[0].signature[1]:"),
        (
            {"layers": [{"module": "0", "signature": ["dp", "dp"], "output": ["full"]}]},
            "layers[0].output: expected one for each of 2",
        ),
        (
            {"layers": [{"module": "0", "signature": ["dp", "dp"]}] * 2},
            "layers[1].module: another layer already has the module '0'",
        ),
        ({"gradients": "ring"}, "gradients: 'ring' is not a builder of synchronous plans"),
        ({"gradients": "partial_reduce"}, "gradients: 'partial_reduce' is not a builder of synchronous plans"),
        ({"remarks": "none"}, "remarks: unknown field"),
        ({"laiers": []}, "laiers: unknown field; did you mean 'layers'?"),
        (
            {"layers": [{"module": "0", "signatur": ["dp", "dp"]}]},
            "layers[0].signatur: unknown field; did you mean 'signature'? (line",
        ),
        (
            {"layers": [{"module": "0", "split": ["dp", "dp"]}]},
            "layers[0].split: unknown field; allowed: module, signature, output, parts, batch_axis (and 'signature'",
        ),
        (
            {"gradients": {"world_siz": 2}},
            "gradients.world_siz: unknown field; did you mean 'world_size'? (and 'groups' is missing)",
        ),
        ({"gradients": 3}, "gradients: expected a builder's name or a plan for gradients (got 3)"),
        ({"gradients": {"world_size": 2, "bucket": 1}}, "gradients.bucket: unknown field"),
        ({"gradients": {"world_size": 2, "groups": [{"name": 3}]}}, "gradients.groups[0].name: "),
        ({"gradients": {"format": "autosync-plan/9"}}, "gradients: its format is 'autosync-plan/9'; expected 'autosy"),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(_plan(**fields)))
    with pytest.raises(PlanError) as error:
        HybridPlan.load(path)
    assert str(error.value).startswith(f"{path}: {message}") or message in str(error.value)
    assert str(path) in str(error.value)


def test_an_inner_plan_is_for_the_replicas() -> None:
    plan = builders.all_reduce(describe(nn.Linear(4, 4)), ClusterSpec.uniform(2))
    layer = LayerPlan(module="0", signature=("dp", "col"))
    assert HybridPlan(mesh=(2, 2), layers=(layer,), gradients=plan).gradients == plan
    whole = HybridPlan(mesh=(2, 2), layers=(layer,), gradients=plan).to_dict()
    assert HybridPlan.from_dict({**whole, "gradients": plan.to_dict()}) == HybridPlan.from_dict(whole)
    with pytest.raises(ValueError, match=r"gradients.world_size: it is 2, but layers have 4 replicas"):
        HybridPlan(mesh=(2, 2), layers=(LayerPlan(module="0", signature=("dp", "dp")),), gradients=plan)
    relaxed = builders.partial_reduce(describe(nn.Linear(4, 4)), ClusterSpec.uniform(2))
    with pytest.raises(ValueError, match=r"gradients.consistency: split operators need all ranks in every step"):
        HybridPlan(mesh=(2, 2), layers=(layer,), gradients=relaxed)


def _layers(model: nn.Module, **signatures: tuple[str, ...]) -> tuple[LayerPlan, ...]:
    return tuple(
        LayerPlan(module=path, signature=signatures.get(path, ("dp",)))
        for path, part in model.named_modules()
        if next(part.children(), None) is None and next(part.parameters(recurse=False), None) is not None
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": "0123456789ab"}, "plan: workload: it was made for another model"),
        ({"mesh": (8,)}, "plan: mesh: 8 is 8 ranks, but the job has 4"),
        ({"layers": ("9", ("dp",))}, "layers[0].module: the model has no module '9'"),
        (
            {"layers": ("0", ("heads",))},
            "layers[0] ('0'): signature: Linear has no signature 'heads'; allowed: dp, rep",
        ),
        ({"layers": ("1", ("col",))}, "layers[0] ('1'): signature: ReLU has no signature 'col'"),
        ({"layers": ("0", ("dp",))}, "layers: '2.weight' and 3 other parameters belong to no layer"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    model = mlp(width=64)
    fields: dict[str, Any] = {"mesh": (4,), "layers": _layers(model), **change}
    if isinstance(fields["layers"][0], str):
        module, signature = fields["layers"]
        fields["layers"] = (LayerPlan(module=module, signature=signature),)
    with pytest.raises(PlanError) as error:
        check_plan(HybridPlan(**fields), model, 4)
    assert message in str(error.value)


def test_a_layer_that_ranks_cannot_share_evenly_is_refused() -> None:
    assert refusal(nn.Linear(8, 6), ["col"], [4]) == "weight has size 6 along axis 0; 4 ranks cannot share it evenly"
    assert refusal(nn.Linear(8, 6), ["row"], [4]) is None
    assert refusal(nn.Linear(8, 8), ["col", "col"], [4, 4]) is not None
    assert refusal(nn.Linear(8, 8), ["col", "row"], [4, 4]) is None
    assert refusal(nn.Linear(8, 12), ["col"], [4], parts=3) is None
    assert "in each of 3 parts" in str(refusal(nn.Linear(8, 12), ["col"], [6], parts=3))
    attention = nn.MultiheadAttention(24, 6)
    assert refusal(attention, ["heads"], [3]) is None
    assert refusal(attention, ["heads"], [4]) == "6 heads cannot be shared evenly by 4 ranks"


def test_tied_parameters_are_cut_alike() -> None:
    model = gpt2(1)
    layers = {layer.module: layer for layer in _layers(model)}

    def with_signatures(**signatures: str) -> HybridPlan:
        changed = [
            layer.model_copy(update={"signature": (signatures.get(name.split(".")[-1], "dp"),)})
            for name, layer in layers.items()
        ]
        return HybridPlan(mesh=(2,), layers=tuple(changed), workload=fingerprint(model))

    check_plan(with_signatures(), model, 2)
    check_plan(with_signatures(wte="row", lm_head="col"), model, 2)
    check_plan(with_signatures(wte="col", lm_head="row"), model, 2)
    with pytest.raises(PlanError, match=r"'lm_head' and 'transformer\.wte' share the parameter weight"):
        check_plan(with_signatures(wte="col", lm_head="col"), model, 2)


def test_parameters_that_an_owner_ties_need_one_layer() -> None:
    model = bert(1)
    plan = HybridPlan(mesh=(2,), layers=_layers(model))
    assert plan.layer("cls.predictions") is None  # which has the decoder's bias under a name of its own
    check_plan(plan, model, 2)


def test_every_kind_is_told_from_its_class() -> None:
    class Odd(nn.Linear):
        pass

    kinds = {
        "linear": nn.Linear(2, 2),
        "transposed_linear": gpt2(1).transformer.h[0].mlp.c_fc,
        "convolution": nn.Conv2d(2, 2, 1),
        "embedding": nn.Embedding(2, 2),
        "attention": nn.MultiheadAttention(2, 1),
        "norm": nn.RMSNorm(2),
        "batch_norm": nn.BatchNorm2d(2),
        "unknown": Odd(2, 2),
    }
    assert {name: kind_of(module) for name, module in kinds.items()} == {name: name for name in kinds}
    assert set(kinds) == set(RULES)
    patched = nn.Linear(2, 2)
    vars(patched)["forward"] = lambda value: nn.Linear.forward(patched, value) * 2
    assert kind_of(patched) == "unknown"
    told = "Linear with another forward has no signature 'col'; allowed: dp"
    assert refusal(patched, ["col"], [2]) == told
    assert kind_of(nn.Conv2d(2, 2, 1, groups=2)) == "unknown"
    assert kind_of(nn.Embedding(2, 2, max_norm=1.0)) == "unknown"
    assert kind_of(nn.MultiheadAttention(2, 1, kdim=3)) == "unknown"


def test_a_table_shows_repeated_blocks_once() -> None:
    layers = tuple(LayerPlan(module=f"h.{block}.fc", signature=("col",)) for block in range(12))
    odd = LayerPlan(module="h.12.fc", signature=("row",))
    text = HybridPlan(mesh=(2,), layers=(*layers, odd)).describe()
    assert "h.0-11.fc" in text
    assert "h.12.fc" in text
    assert text.count("fc") == 2

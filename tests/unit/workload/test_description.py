"""Describing a module from its parameters, and the names that its variables get."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload import describe, shared_parameters, variable_names


class Tied(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 4, sparse=sparse)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.tokens.weight


def names_of(module: nn.Module) -> list[str]:
    return [name for name, _ in variable_names(module)]


def test_names_leave_frozen_ones_out_and_list_tied_ones_once() -> None:
    model = Tied()
    model.body.bias.requires_grad_(False)
    assert names_of(model) == ["tokens.weight", "body.weight"]
    assert variable_names(model)[0][1] is model.head.weight


def test_compiling_changes_no_name() -> None:
    model = Tied()
    plain = names_of(model)
    assert names_of(torch.compile(model)) == plain
    model.body = torch.compile(model.body)
    assert any("_orig_mod" in name for name, _ in model.named_parameters())
    assert names_of(model) == plain


def test_a_compiled_model_keeps_its_title() -> None:
    assert describe(torch.compile(Tied())).name == "Tied"


def test_describe_gives_shapes_dtypes_and_no_times() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(torch.bfloat16)
    workload = describe(model, "tower")
    assert workload.name == "tower"
    assert [(v.name, v.shape, v.dtype, v.ready) for v in workload.variables] == [
        ("0.weight", (8, 3, 3, 3), "bfloat16", None),
        ("0.bias", (8,), "bfloat16", None),
        ("1.weight", (8,), "bfloat16", None),
        ("1.bias", (8,), "bfloat16", None),
    ]
    assert (workload.forward_time, workload.backward_time, workload.optimizer_time) == (0, 0, 0)


def test_describe_finds_sparse_embeddings() -> None:
    model = nn.ModuleList([nn.Embedding(9, 2, sparse=True), nn.EmbeddingBag(9, 2, sparse=True), nn.Embedding(9, 2)])
    assert [variable.kind for variable in describe(model).variables] == ["sparse", "sparse", "dense"]


def test_a_sparse_embedding_tied_to_a_dense_layer_is_dense() -> None:
    assert describe(Tied(sparse=True)).variable("tokens.weight").kind == "dense"


def test_nothing_trainable_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="Linear: has no trainable parameter"):
        describe(nn.Linear(2, 2).requires_grad_(False))


def test_a_lazy_module_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="LazyLinear: has lazy parameters"):
        describe(nn.LazyLinear(3))


def test_a_complex_parameter_is_described_as_reals() -> None:
    weight, bias = describe(nn.Linear(2, 3, dtype=torch.complex64)).variables
    assert (weight.shape, weight.dtype) == ((3, 2, 2), "float32")
    assert (bias.shape, bias.dtype) == ((3, 2), "float32")


def test_a_parameter_of_another_dtype_is_an_error() -> None:
    module = nn.Linear(2, 2).to(torch.float8_e4m3fn)
    with pytest.raises(WorkloadError, match="variable 'weight': dtype float8_e4m3fn is not one of float64"):
        describe(module)


def test_a_tied_parameter_is_ignored_by_all_of_its_names() -> None:
    """As by DDP, which looks at a module that occurs twice under its first name only."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("a", "b", "c")})
    model["b"].weight = model["a"].weight
    model["again"] = model["c"]
    for ignored, left in (
        (["a.weight"], ["a.weight", "c.weight"]),
        (["a.weight", "b.weight"], ["c.weight"]),
        (["c.weight"], ["a.weight"]),
    ):
        model._ddp_params_and_buffers_to_ignore = ignored
        assert [name for name, _ in shared_parameters(model)] == left

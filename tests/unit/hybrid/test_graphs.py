"""Graphs of unmodified modules: operators, edges, axes, and what is to be chosen."""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning
import pytest
import torch
import torch.nn.functional as F
from planned_models import IMAGES, MODELS, TOKENS, Classifier, Gated, Residual, gpt2, graph_of, mlp, vgg
from sweeps import sweep
from torch import Tensor, nn

from lightning_autosync.errors import WorkloadError
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.graph import INPUT, Graph
from lightning_autosync.hybrid.structure import structure
from lightning_autosync.hybrid.tracing import _Tracer


def _operator(graph: Graph, name: str) -> int:
    return next(index for index, operator in enumerate(graph.operators) if operator.name == name)


def _sources(graph: Graph, name: str) -> list[str]:
    edges = graph.operators[_operator(graph, name)].inputs
    return ["input" if edge.source == INPUT else graph.operators[edge.source].name for edge in edges]


def test_a_chain_has_its_layers_in_order() -> None:
    graph = capture(vgg(), IMAGES)
    assert [operator.name for operator in graph.operators] == ["0", "3", "7", "10"]
    assert [operator.kind for operator in graph.operators] == ["convolution"] * 2 + ["linear"] * 2
    assert [operator.inputs[0].source for operator in graph.operators] == [INPUT, 0, 1, 2]
    # Of 256 features after flattening, pieces are whole channels.
    assert graph.operators[2].inputs[0].units == 16
    assert graph.operators[2].inputs[0].value.shape == (4, 256)
    assert graph.outputs == (3,)
    assert graph.notes == ()


def test_work_is_that_of_the_forward_pass() -> None:
    graph = capture(mlp(width=64, layers=2, last=16), torch.zeros(8, 64))
    first, last = graph.operators
    assert first.work.flops == 2 * 8 * 64 * 64
    assert last.work.flops == 2 * 8 * 64 * 16
    assert first.work.kept == 4 * 8 * 64  # its input
    assert first.after.kept == 4 * 8 * 64  # ReLU's output
    assert last.work.kept == 0  # which is that same tensor
    assert first.after.calls == 1
    assert graph.weight_bytes == 4 * (64 * 64 + 64 + 64 * 16 + 16)


def test_residual_branches_meet() -> None:
    graph = capture(nn.Sequential(nn.Linear(32, 32), Residual(), Residual()), torch.zeros(4, 7, 32))
    assert _sources(graph, "1#1") == ["0", "1.down"]
    assert _sources(graph, "2.norm") == ["1#1"]
    assert _sources(graph, "2#1") == ["1#1", "2.down"]
    # All that meets there lies alike.
    found = structure(graph)
    assert [len(members) for members in found.values] == [5]


def test_a_loss_gets_whole_results_of_own_samples() -> None:
    graph = capture(Classifier(), torch.zeros(4, 64))
    loss = graph.operators[-1]
    assert (loss.module, list(loss.rules)) == (None, ["dp"])
    assert [edge.value.shape for edge in loss.inputs] == [(4, 16)]
    assert graph.outputs == (3,)


def test_layers_that_meet_are_split_alike() -> None:
    graph = capture(nn.Sequential(nn.Linear(32, 32), Gated(), Gated()), torch.zeros(4, 32))
    found = structure(graph)
    gate, up, down = (found.layer_of[_operator(graph, f"2.{name}")] for name in ("gate", "up", "down"))
    assert gate == up != down
    assert found.values == ()  # gate and up take the same tensor of one layer
    flows = {(flow.source, flow.target) for flow in found.flows}
    assert flows == {(0, gate), (gate, down), (down, gate), (down, None)}


def test_bert_is_understood() -> None:
    graph = graph_of("bert")
    layer = "bert.encoder.layer.0"
    assert _sources(graph, f"{layer}.attention.self#1") == [
        f"{layer}.attention.self.{name}" for name in ("query", "key", "value")
    ]
    output = graph.operators[_operator(graph, f"{layer}.attention.output.dense")]
    assert output.inputs[0].units == 4  # heads
    positions = graph.operators[_operator(graph, "bert.embeddings.position_embeddings")]
    assert positions.output.batch_axis is None
    assert graph.operators[_operator(graph, "bert.embeddings.token_type_embeddings")].output.batch_axis == 0
    found = structure(graph)
    query = found.layer_of[_operator(graph, f"{layer}.attention.self.query")]
    assert len(found.layers[query]) == 2 * 3
    assert len(structure(graph, collapse=False).layers) > len(found.layers)


def test_gpt2_has_queries_keys_and_values_in_one_projection() -> None:
    graph = graph_of("gpt2")
    fused = graph.operators[_operator(graph, "transformer.h.1.attn.c_attn")]
    assert fused.kind == "transposed_linear"
    assert fused.parts == 3
    assert graph.operators[_operator(graph, "transformer.h.1.attn.c_proj")].inputs[0].units == 4
    assert graph.operators[_operator(graph, "lm_head")].weights[0].path == "transformer.wte.weight"


def test_the_size_of_a_graph_does_not_change_what_is_to_be_chosen() -> None:
    small, large = structure(graph_of("gpt2")), structure(capture(gpt2(3), TOKENS))
    assert len(small.layers) == len(large.layers)
    assert len(small.flows) == len(large.flows)


def test_attention_is_one_operator() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    graph = capture(nn.Sequential(nn.Linear(32, 32), layer), torch.zeros(4, 7, 32))
    attention = graph.operators[_operator(graph, "1.self_attn")]
    assert attention.kind == "attention"
    assert attention.heads == 4
    assert [weight.name for weight in attention.weights][-1] == "out_proj.bias"
    assert _sources(graph, "1.self_attn") == ["0"]
    assert _sources(graph, "1#1") == ["0", "1.self_attn"]


def test_samples_may_lie_along_another_axis() -> None:
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)

    graph = capture(Swapped(), torch.zeros(4, 7, 8))
    assert graph.operators[0].output.batch_axis == 1


@pytest.mark.parametrize("name", sweep(["bert", "gpt2"], ["bert"]))
def test_a_single_sample_lies_where_several_do(name: str) -> None:
    model, batch = MODELS[name]
    one, several = capture(model(), batch[:1]), graph_of(name)
    for single, known in zip(one.operators, several.operators, strict=True):
        # A table of positions without samples looks like one of a single sample.
        if known.output.batch_axis is not None:
            assert single.output.batch_axis == known.output.batch_axis, known.name


def test_unknown_modules_are_named() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0] * self.scale

    model = Recurrent()
    inputs = torch.randn(4, 7, 8)
    before = model(inputs)
    graph = capture(model, inputs)
    assert graph.notes == ("LSTM cannot be split by this release, only data parallelism is possible (lstm)",)
    assert set(graph.operators[0].rules) == {"dp"}
    assert graph.operators[0].output.shape == (4, 7, 8)
    assert [(loose.module, loose.weights[0].path) for loose in graph.loose] == [("", "scale")]
    assert torch.equal(model(inputs), before)


def test_a_model_that_cannot_be_exported_is_taken_as_a_chain() -> None:
    class Result:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Result:
            return Result(self.body(x))

    graph = capture(Wrapped(), torch.zeros(4, 64))
    assert graph.notes[0].startswith(
        "the model cannot be exported, so layers are assumed to form a chain in the order of their calls: "
    )
    assert [operator.inputs[0].source for operator in graph.operators] == [INPUT, 0, 1]
    assert graph.operators[1].inputs[0].units == 64


def test_lightning_modules_are_modules() -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    assert [operator.name for operator in capture(Module(), torch.zeros(2, 64)).operators] == [
        "net.0",
        "net.2",
        "net.4",
    ]


def test_training_modes_and_parameters_stay() -> None:
    model = vgg().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    capture(model, IMAGES)
    assert not any(part.training for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_followed_is_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    with pytest.raises(WorkloadError, match="Branching: its forward pass needs the values of tensors"):
        capture(Branching(), torch.zeros(4, 8))
    with pytest.raises(WorkloadError, match="Linear: its forward pass gets no tensor"):
        capture(nn.Linear(8, 8))
    with pytest.raises(WorkloadError, match="ReLU: its forward pass calls no module"):
        capture(nn.ReLU(), torch.zeros(4, 8))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu by hand": lambda x: 0.5 * x * (1 + torch.tanh(x + 0.1 * x**3)),
    "flattened": lambda x: x.flatten(1),
    "heads": lambda x: x.view(*x.shape[:2], -1, 4).transpose(1, 2),
    "heads and back": lambda x: x.view(*x.shape[:2], -1, 4).transpose(1, 2).transpose(1, 2).flatten(2),
    "softmax over features": lambda x: x.softmax(-1),
    "softmax over tokens": lambda x: x.softmax(1),
    "mean over tokens": lambda x: x.mean(1),
    "mean over features": lambda x: x.mean(-1, keepdim=True) * torch.ones(1),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "first token": lambda x: x[:, 0],
    "some features": lambda x: x[..., 2:6],
    "some tokens": lambda x: x[:, 1:3],
    "permuted": lambda x: x.permute(2, 0, 1),
    "longer": lambda x: x[:, :, None].expand(-1, -1, 3, -1),
    "squeezed": lambda x: x.unsqueeze(1).squeeze(1),
    "two parts": lambda x: torch.mul(*x.chunk(2, dim=-1)),
    "three parts": lambda x: F.scaled_dot_product_attention(
        *(part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in x.chunk(3, dim=-1))
    ),
    "scores of heads": lambda x: (lambda h: h @ h.transpose(-1, -2))(x.view(*x.shape[:2], -1, 4).transpose(1, 2)),
    "products of features": lambda x: x @ x.transpose(1, 2),
    "joined tokens": lambda x: torch.cat([x, x], 1),
    "joined features": lambda x: torch.cat([x, -x], -1),
    "normalized": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rotated": lambda x: (lambda h: torch.cat([-h[..., 2:], h[..., :2]], -1))(x.view(*x.shape[:2], -1, 4)),
    "dropped": lambda x: F.dropout(x, 0.0),
    "pooled": lambda x: F.avg_pool1d(x.transpose(1, 2), 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_axes_follow_what_functions_do(name: str) -> None:
    """Where features are said to be cut, a function of pieces gives pieces of the function; likewise for samples."""
    function = FUNCTIONS[name]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.layer(x))

    value = torch.randn(4, 5, 24)
    exported = torch.export.export(Model(), (torch.zeros(4, 5, 8),), strict=False)
    tracer = _Tracer(Model(), exported)
    tracer.run()
    axes = tracer._flows[next(node for node in exported.graph.nodes if node.op == "output").all_input_nodes[0]].axes
    whole = function(value)
    assert axes.batch is not None
    torch.testing.assert_close(torch.cat([function(part) for part in value.split(2)], axes.batch), whole)
    mixes = any(word in name for word in ("features", "centred", "flattened", "normalized"))
    assert (axes.features is None) == mixes
    if axes.features is None:
        return
    ranks = math.gcd(axes.units, 12)
    assert ranks > 1
    parts = tracer._nodes[0].parts or axes.parts
    inputs = _pieces(value, -1, ranks, max(parts, axes.parts))
    made = torch.cat([function(piece) for piece in inputs], axes.features)
    torch.testing.assert_close(made, whole)


def _pieces(value: Tensor, axis: int, ranks: int, parts: int) -> list[Tensor]:
    """Each rank's piece of every part."""
    chunks = [part.chunk(ranks, axis) for part in value.chunk(parts, axis)]
    return [torch.cat([chunk[rank] for chunk in chunks], axis) for rank in range(ranks)]

"""An optimizer that runs on slices, spread over servers, does what it does on whole parameters."""

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples
from torch import Tensor, nn

from lightning_autosync.engine.exchanges.rows import Rows
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.servers import Piece, Shard
from lightning_autosync.relaxed.server.gradients import DenseGradient, Gradients
from lightning_autosync.relaxed.server.optimizer import ELEMENTWISE, OptimizerRule, hyperparameters
from lightning_autosync.relaxed.server.store import ShardStore

SHAPES = {"scalar": (), "bias": (7,), "kernel": (3, 2, 4), "matrix": (5, 6)}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("Adam", {"amsgrad": True, "fused": True}),
    ("Adam", {"betas": (0.8, 0.9), "maximize": True}),
    ("AdamW", {"foreach": True}),
    ("NAdam", {}),
    ("RAdam", {"decoupled_weight_decay": True}),
    ("Adamax", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.3, "fused": True}),
    ("Adadelta", {"foreach": True}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("ASGD", {"t0": 2.0, "lambd": 0.1}),
    ("Rprop", {}),
]
Model = dict[str, nn.Parameter]


def model(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in SHAPES.items()
    }


def optimizer_of(name: str, options: dict[str, Any], parameters: Model) -> torch.optim.Optimizer:
    """Two parameter groups, the second with a weight decay (where there is one) and a rate of its own."""
    kind = ELEMENTWISE[name]
    decay = {"weight_decay": 0.1} if "weight_decay" in inspect.signature(kind).parameters else {}
    first, second = [parameters["kernel"], parameters["scalar"]], [parameters["bias"], parameters["matrix"]]
    return kind([{"params": first}, {"params": second, "lr": 0.03, **decay}], lr=0.05, **options)


def shards_of(cuts: dict[str, list[int]], servers: int) -> list[Shard]:
    """Every piece of every variable, dealt to shards of two pieces and to servers in turn."""
    pieces = [
        Piece(name, start, stop)
        for name, parameter in model(0).items()
        for start, stop in pairwise([0, *cuts[name], parameter.numel()])
        if stop > start
    ]
    return [
        Shard(number, f"group{number}", number % servers, "float64", tuple(pieces[2 * number : 2 * number + 2]))
        for number in range((len(pieces) + 1) // 2)
    ]


def slices(shard: Shard, tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[piece.variable].detach().reshape(-1)[piece.start : piece.stop] for piece in shard.pieces])


def gradients_at(step: int, missing: list[str]) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: None if name in missing else gradient for name, gradient in drawn.items()}


@st.composite
def cuttings(draw: st.DrawFn) -> dict[str, list[int]]:
    return {
        name: sorted(draw(st.lists(st.integers(0, parameter.numel()), max_size=3)))
        for name, parameter in model(0).items()
    }


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@examples(12)
@given(cuts=cuttings(), servers=st.integers(1, 3), skipped=st.lists(st.sampled_from([*SHAPES, ""]), min_size=5))
def test_slices_are_updated_as_the_whole(
    name: str, options: dict[str, Any], cuts: dict[str, list[int]], servers: int, skipped: list[str]
) -> None:
    whole = model(0)
    optimizer = optimizer_of(name, options, whole)
    rule = OptimizerRule.of(optimizer, {parameter: name for name, parameter in whole.items()})
    rule = OptimizerRule.from_dict(rule.to_dict())
    shards = shards_of(cuts, servers)
    stores = [
        ShardStore(own, rule, {shard.index: slices(shard, dict(whole)) for shard in own})
        for own in ([shard for shard in shards if shard.owner == server] for server in range(servers))
    ]
    for step in range(5):
        gradients = gradients_at(step, [skipped[step]])
        for parameter, gradient in zip(whole.values(), gradients.values(), strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
        for server, store in enumerate(stores):
            store.update(dense(shards, server, gradients), hyperparameters(optimizer))
        optimizer.step()
    for shard in shards:
        expected = slices(shard, dict(whole))
        assert float((stores[shard.owner].values(shard.index) - expected).abs().max()) <= 1e-12
    check_states(stores, optimizer, whole)


def dense(shards: list[Shard], server: int, gradients: dict[str, Tensor | None]) -> Gradients:
    return {shard.index: of_shard(shard, gradients) for shard in shards if shard.owner == server}


def of_shard(shard: Shard, gradients: dict[str, Tensor | None]) -> DenseGradient:
    parts = []
    for piece in shard.pieces:
        gradient = gradients[piece.variable]
        parts.append(None if gradient is None else gradient.reshape(-1)[piece.start : piece.stop].clone())
    return DenseGradient(tuple(parts), tuple(int(part is not None) for part in parts))


def check_states(stores: list[ShardStore], optimizer: torch.optim.Optimizer, whole: Model) -> None:
    """The state on all servers together is the whole one's, value by value and in bytes of what is elementwise."""
    for store in stores:
        for (variable, start, key), tensor in store.states():
            expected = torch.as_tensor(optimizer.state[whole[variable]][key])
            if expected.numel() > 1 or tensor.dim():
                expected = expected.reshape(-1)[start : start + tensor.numel()]
            assert torch.allclose(tensor, expected, rtol=1e-12, atol=1e-12)
    sliced = sum(tensor.nbytes for store in stores for _, tensor in store.states() if tensor.dim())
    assert sliced == sum(
        value.nbytes
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == torch.float64
    )


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_loaded_state_goes_on_as_the_old_one(name: str, options: dict[str, Any]) -> None:
    whole = model(0)
    optimizer = optimizer_of(name, options, whole)
    rule = OptimizerRule.of(optimizer, {parameter: name for name, parameter in whole.items()})
    shards = shards_of({name: [] for name in SHAPES}, 1)
    first = ShardStore(shards, rule, {shard.index: slices(shard, dict(whole)) for shard in shards})
    for step in range(2):
        first.update(dense(shards, 0, gradients_at(step, [])), hyperparameters(optimizer))
    second = ShardStore(shards, rule, {shard.index: first.values(shard.index).clone() for shard in shards})
    second.load_states(dict(first.states()))
    for store in (first, second):
        store.update(dense(shards, 0, gradients_at(2, [])), hyperparameters(optimizer))
    for shard in shards:
        assert torch.equal(first.values(shard.index), second.values(shard.index))


TABLE = Shard(0, "items", 0, "float64", (Piece("items", 6, 24),), width=3)


def table_store(kind: str, sparse: bool, **options: Any) -> tuple[ShardStore, nn.Parameter, torch.optim.Optimizer]:
    """Rows 2 to 7 of a table of 8 rows on a server, beside the whole table."""
    table = nn.Parameter(torch.arange(24, dtype=torch.float64).view(8, 3))
    optimizer = ELEMENTWISE[kind]([table], lr=0.1, **options)
    shard = Shard(**{**TABLE.__dict__, "sparse": sparse})
    store = ShardStore([shard], OptimizerRule.of(optimizer, {table: "items"}), {0: table.detach().view(-1)[6:].clone()})
    return store, table, optimizer


def row_step(store: ShardStore, table: nn.Parameter, optimizer: torch.optim.Optimizer, rows: list[int]) -> None:
    indices = torch.tensor(rows)
    values = torch.full((len(rows), 3), 0.5, dtype=torch.float64)
    store.update({0: Rows(indices, values, gradients=1)}, hyperparameters(optimizer))
    gradient = torch.sparse_coo_tensor(indices[None], values, (8, 3), check_invariants=True)
    table.grad = gradient if optimizer.__class__.__name__ == "SparseAdam" else gradient.to_dense()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "sparse", "options"),
    [
        ("SGD", True, {}),
        ("Adagrad", True, {}),
        ("SparseAdam", True, {}),
        ("SGD", False, {"momentum": 0.9, "weight_decay": 0.1}),
        ("Adam", False, {}),
    ],
)
def test_rows_are_updated_as_in_the_whole_table(kind: str, sparse: bool, options: dict[str, Any]) -> None:
    store, table, optimizer = table_store(kind, sparse, **options)
    for rows in ([2, 5], [3], [2, 3, 7]):
        row_step(store, table, optimizer, rows)
    assert float((store.values(0) - table.detach().view(-1)[6:]).abs().max()) <= 1e-12


def test_only_rows_that_changed_are_handed_out() -> None:
    store, table, optimizer = table_store("SGD", sparse=False)
    row_step(store, table, optimizer, [2, 5])
    row_step(store, table, optimizer, [5, 7])
    assert store.changed_rows(0, since=0).indices.tolist() == [2, 5, 7]
    assert store.changed_rows(0, since=1).indices.tolist() == [5, 7]
    assert store.changed_rows(0, since=2).indices.tolist() == []
    found = store.changed_rows(0, since=1)
    assert torch.equal(found.values, table.detach()[[5, 7]])


def test_rows_that_momentum_moves_have_changed() -> None:
    store, table, optimizer = table_store("SGD", sparse=False, momentum=0.9)
    row_step(store, table, optimizer, [2])
    row_step(store, table, optimizer, [4])
    assert store.changed_rows(0, since=1).indices.tolist() == [2, 4]


class Shifted(torch.optim.SGD):
    """Might do anything."""


REFUSED = {
    "lbfgs": (lambda p: torch.optim.LBFGS([p]), "LBFGS cannot update slices of parameters"),
    "adafactor": (lambda p: torch.optim.Adafactor([p]), "Adafactor cannot update slices of parameters"),
    "own": (lambda p: Shifted([p], lr=0.1), "Shifted cannot update slices of parameters"),
    "differentiable": (lambda p: torch.optim.Adam([p], differentiable=True), "differentiable=True"),
    "stranger": (
        lambda p: torch.optim.SGD([nn.Parameter(torch.ones(3, 1))]),
        r"param_groups[0] contains a parameter of",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_optimizers_are_refused(case: str) -> None:
    build, message = REFUSED[case]
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(PlanError, match=re.escape(message)):
        OptimizerRule.of(build(parameter), {parameter: "weight"})


@pytest.mark.parametrize(
    ("kind", "options"), [("Adam", {}), ("SGD", {"momentum": 0.9}), ("SGD", {"weight_decay": 0.1})]
)
def test_optimizers_that_take_no_sparse_gradients_are_refused(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="does not accept the sparse gradients"):
        table_store(kind, True, **options)


def test_rates_that_are_tensors_become_numbers() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.25), betas=(0.5, 0.75))
    assert hyperparameters(optimizer)[0]["lr"] == 0.25
    assert hyperparameters(optimizer)[0]["betas"] == [0.5, 0.75]

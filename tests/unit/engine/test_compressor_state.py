"""What compressors remember, by variable: layouts, scales, steps that are taken back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_autosync.engine.compressor_state import CompressorState, ParameterState, ParameterStates
from lightning_autosync.engine.exchanges.low_rank import _orthonormal
from lightning_autosync.plan import Compressor
from lightning_autosync.plan.codecs.powersgd import low_rank_layout
from lightning_autosync.plan.schedule import AllReduce, Message, Round


def message(parameters: dict[str, nn.Parameter], compressor: Compressor, axis: int = 0) -> Message:
    numel = sum(parameter.numel() for parameter in parameters.values())
    length = numel + len(parameters)
    return Message(
        index=0,
        name="all",
        variables=tuple(parameters),
        numel=numel,
        dtype="float32",
        axis=axis,
        rows=0,
        compressor=compressor,
        priority=0,
        rounds=(Round(length, (AllReduce(0, length),)),),
    )


def memory_of(
    parameters: dict[str, nn.Parameter], compressor: Compressor, axis: int = 0
) -> tuple[CompressorState, dict[str, torch.Tensor]]:
    described = message(parameters, compressor, axis)
    tensors = {"residual": torch.arange(described.numel + described.tail, dtype=torch.float32)}
    if compressor.kind == "powersgd":
        shapes = [tuple(parameter.shape) for parameter in parameters.values()]
        tensors["factors"] = torch.arange(low_rank_layout(shapes, compressor.rank)[1][1], dtype=torch.float32)
    return CompressorState([(described, list(parameters.values()))], {"all": tensors}), tensors


def test_an_axis_that_was_moved_to_the_front_moves_back() -> None:
    parameters = {"w": nn.Parameter(torch.zeros(2, 3, 4))}
    state, tensors = memory_of(parameters, Compressor(kind="int8"), axis=1)
    found = state.state_dict()["w"].tensors["residual"]
    assert torch.equal(found.movedim(1, 0).reshape(-1), tensors["residual"][:24])


def test_low_rank_factors_belong_to_their_matrices() -> None:
    parameters = {"w": nn.Parameter(torch.zeros(20, 30)), "b": nn.Parameter(torch.zeros(20))}
    state, tensors = memory_of(parameters, Compressor(kind="powersgd", rank=2))
    state = state.state_dict()
    assert torch.equal(state["w"].tensors["factor"], tensors["factors"].view(30, 2))
    assert set(state["b"].tensors) == {"residual"}


def test_residuals_have_the_unit_of_the_scaled_gradients() -> None:
    parameters = {"w": nn.Parameter(torch.zeros(3))}
    state, tensors = memory_of(parameters, Compressor(kind="topk"))
    plain = state.state_dict()["w"].tensors["residual"].clone()
    state.begin_step(8.0)
    state.begin_step(32.0)
    assert torch.equal(tensors["residual"][:3], 32 * plain)
    assert torch.equal(state.state_dict()["w"].tensors["residual"], plain)
    assert (
        state.load_state_dict({"w": ParameterState(Compressor(kind="topk").model_dump(), {"residual": plain + 1})})
        == []
    )
    assert torch.equal(tensors["residual"][:3], 32 * (plain + 1))
    state.begin_step(None)
    assert torch.equal(tensors["residual"][:3], plain + 1)


def test_a_step_can_be_taken_back() -> None:
    parameters = {"w": nn.Parameter(torch.zeros(20, 30))}
    state, tensors = memory_of(parameters, Compressor(kind="powersgd"))
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    state.begin_step(1.0)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    state.undo_step()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, before[key])


@pytest.mark.parametrize(
    "other",
    [
        {"gone": ParameterState(Compressor(kind="int8").model_dump(), {"residual": torch.ones(3)})},
        {"w": ParameterState(Compressor(kind="int8", block=7).model_dump(), {"residual": torch.ones(3)})},
        {"w": ParameterState(Compressor(kind="int8").model_dump(), {"residual": torch.ones(4)})},
        {"w": ParameterState(Compressor(kind="int8").model_dump(), {})},
    ],
    ids=["unknown variable", "other compressor", "other shape", "nothing"],
)
def test_what_does_not_fit_is_named_and_changes_nothing(other: ParameterStates) -> None:
    state, tensors = memory_of({"w": nn.Parameter(torch.zeros(3))}, Compressor(kind="int8"))
    before = tensors["residual"].clone()
    assert state.load_state_dict(other) == list(other)
    assert torch.equal(tensors["residual"], before)


@pytest.mark.parametrize("rows", [2, 7, 40])
def test_bases_do_not_depend_on_the_librarys_choice_of_signs(rows: int) -> None:
    columns = torch.randn(rows, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    basis = _orthonormal(columns)
    assert torch.allclose(basis.t() @ basis, torch.eye(2, dtype=torch.float64))
    assert torch.allclose(basis @ (basis.t() @ columns), columns)
    # The first is the first column's own direction, and not its opposite.
    assert torch.allclose(basis[:, 0], columns[:, 0] / columns[:, 0].norm())


def test_a_basis_of_nothing_is_a_basis() -> None:
    basis = _orthonormal(torch.zeros(5, 2))
    assert torch.allclose(basis.t() @ basis, torch.eye(2))

"""Parts of split parameters are found in a `state_dict()`, whatever a module's own hooks make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from collective_traffic import pretended_job
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.optim import SGD

from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.checkpoint import model_state
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.sharded_checkpoint import (
    ShardedTensorView,
    _make_states,
    _model_tensors,
    save_sharded,
)
from lightning_autosync.hybrid.execution.split_model import SplitModel

PLAN = HybridPlan(
    mesh=(2,), layers=(LayerPlan(module="0", signature=("col",)), LayerPlan(module="1", signature=("row",)))
)
SHAPES = {"0.weight": (8, 4), "0.bias": (8,), "1.weight": (2, 8), "1.bias": (2,)}


@contextmanager
def split_with(hook: Callable[[str, Tensor], tuple[str, Tensor]]) -> Iterator[SplitModel]:
    """A split model whose `state_dict()` passes each name and tensor through ``hook``."""

    def changed(_: nn.Module, state: dict[str, Any], prefix: str, about: Any) -> None:
        entries = [hook(name, value) for name, value in state.items()]
        state.clear()
        state.update(entries)

    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with pretended_job(2):
        split = SplitModel(module, PLAN, LiveMesh(PLAN))
        split.split()
        module._register_state_dict_hook(changed)
        yield split


HOOKS = {
    "none": lambda name, value: (name, value),
    "copies": lambda name, value: (name, value.detach().half().cpu()),
    "other names": lambda name, value: (f"net.{name}", value),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_parts_are_put_together(hook: str) -> None:
    with split_with(HOOKS[hook]) as split:
        found = model_state(split, True)
        assert {name.removeprefix("net."): tuple(value.shape) for name, value in found.items()} == SHAPES
        assert {value.dtype for value in found.values()} == {torch.half if hook == "copies" else torch.float32}
        described = _model_tensors(split.module.state_dict(keep_vars=True), split)
        assert {name for name, value in described.items() if isinstance(value, ShardedTensorView)} == {
            f"state_dict.{'net.' if hook == 'other names' else ''}{name}" for name in SHAPES if name != "1.bias"
        }


def test_what_is_whole_already_stays() -> None:
    whole = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with split_with(lambda name, value: (name, whole[name])) as split:
        assert all(torch.equal(value, whole[name]) for name, value in model_state(split, True).items())


def test_a_part_of_another_shape_is_refused() -> None:
    with (
        split_with(lambda name, value: (name, value.detach().flatten().clone())) as split,
        pytest.raises(PlanError, match=r"state_dict: '0.weight' has shape \(16,\); allowed for this split parameter"),
    ):
        model_state(split, True)


def test_optimizer_state_of_another_shape_is_refused() -> None:
    with split_with(HOOKS["none"]) as split:
        optimizer = SGD(split.module.parameters(), lr=0.1)
        optimizer.state[next(split.module.parameters())] = {"step": torch.ones(()), "rows": torch.ones(4)}
        with (
            mock.patch.object(dcp, "save") as save,
            pytest.raises(PlanError, match=r"its state 'rows' has shape \(4,\), but the split parameter's part has"),
        ):
            save_sharded("folder", split.module, [optimizer], split)
        assert not save.called


@pytest.mark.parametrize("kind", ["fused", "capturable", "plain"])
def test_loaded_step_counts_lie_where_the_optimizer_reads_them(kind: str) -> None:
    module = nn.Linear(2, 2, device="meta")
    optimizer = SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0][kind] = True
    about = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(()), [])
    _make_states(0, module, optimizer, {}, {f"optimizer_0.state.weight.{key}": about for key in ("step", "mu_product")})
    state = optimizer.state[module.weight]
    assert state["step"].device.type == ("cpu" if kind == "plain" else "meta")
    assert state["mu_product"].is_meta


def test_ranks_share_the_work_of_writing_but_buffers_come_from_the_first() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    with mock.patch.object(dcp, "save") as save:
        save_sharded("folder", module, [], None)
    plans = _plans_of(save.call_args.kwargs["planner"], save.call_args.args[0])
    written = [{item.index.fqn.removeprefix("state_dict.") for item in plan.items} for plan in plans]
    assert written[0] | written[1] == set(module.state_dict())
    assert not written[0] & written[1]
    assert written[0] >= {name for name, _ in module.named_buffers()}
    assert {"0.weight", "2.weight"} - written[0], "the first rank does not write both"


def _plans_of(planner: SavePlanner, tensors: dict[str, Any]) -> list[SavePlan]:
    """What each of two ranks with the same tensors writes."""
    planner.set_up_planner(tensors, is_coordinator=True)
    own = planner.create_local_plan()
    return planner.create_global_plan([own, own])[0]

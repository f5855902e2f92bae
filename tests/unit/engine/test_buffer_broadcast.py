"""A module is searched for its buffers only if one was replaced, added or removed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from collective_traffic import TrafficLog, pretended_job
from torch import Tensor, nn

from lightning_autosync.engine import collectives
from lightning_autosync.engine.collectives import BufferBroadcast


def network() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module.register_buffer("later", None)
    return module


def _replace(module: nn.Module) -> None:
    module[1].running_mean = torch.ones(4)


def _give_a_value(module: nn.Module) -> None:
    module.later = torch.ones(5)


def _add(module: nn.Module) -> None:
    module[2].register_buffer("mask", torch.ones(6))


def _add_module(module: nn.Module) -> None:
    module.add_module("last", nn.BatchNorm1d(2))


def _remove(module: nn.Module) -> None:
    del module[1].running_var


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that were searched for buffers."""
    found: list[nn.Module] = []
    search = collectives.shared_buffers

    def note(module: nn.Module) -> object:
        found.append(module)
        return search(module)

    monkeypatch.setattr(collectives, "shared_buffers", note)
    return found


@pytest.mark.parametrize("module", [network(), nn.Linear(3, 4)], ids=["buffers", "none"])
def test_forward_passes_do_not_search_a_module_that_does_not_change(
    module: nn.Module, searches: list[nn.Module]
) -> None:
    with pretended_job(2):
        buffers = BufferBroadcast(module)
        for _ in range(3):
            assert buffers.due == bool([*module.buffers()])
            buffers.before_forward(True)
    assert len(searches) == 1


@pytest.mark.parametrize("change", [_replace, _give_a_value, _add, _add_module, _remove])
def test_buffers_that_changed_are_broadcast_as_they_are(
    change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, sent = network(), list[Tensor]()
    monkeypatch.setattr(collectives, "broadcast_tensors", lambda tensors, group: sent.extend(tensors))
    monkeypatch.setattr(collectives, "gather_json", lambda value, group: [value, value])
    with pretended_job(2, rank=1):
        buffers = BufferBroadcast(module)
        buffers.before_forward(True)
        change(module)
        buffers._agreed = collectives._forms(collectives.shared_buffers(module))  # the other rank's changed, too
        sent.clear()
        buffers.before_forward(True)
    assert [one.data_ptr() for one in sent[1:]] == [one.data_ptr() for one in module.buffers()]


def test_scripted_modules_are_searched_each_time(searches: list[nn.Module]) -> None:
    """They may replace their buffers unseen."""
    scripted = nn.Sequential(torch.jit.script(nn.BatchNorm1d(4)))
    with pretended_job(2):
        buffers = BufferBroadcast(scripted)
        buffers.before_forward(True)
        buffers.before_forward(True)
    assert len(searches) == 3


def test_a_module_without_buffers_makes_no_collective_call() -> None:
    with pretended_job(2), TrafficLog() as log:
        BufferBroadcast(nn.Linear(3, 4)).before_forward(True)
    assert log.collectives == []

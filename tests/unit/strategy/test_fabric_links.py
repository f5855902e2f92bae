"""Which links a module of Fabric is planned for: one process, without replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_autosync import AutoSyncFabricStrategy
from lightning_autosync.strategy import fabric
from lightning_autosync.strategy.exact import ExactReplica


class Replica:
    """A replica that knows the links that it was given, or has measured "first" ones."""

    awaits_backward = True
    may_measure_again = ExactReplica.may_measure_again

    def __init__(self, module: nn.Module, settings: Any, nodes: int, devices: int, group: Any, _: bool, links: Any):
        self.module, self.given, self.links = module, links, links or "first"
        self._group = group

    def join_others(self) -> None: ...

    def notice_change(self) -> None: ...

    def replace(self) -> None: ...


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> AutoSyncFabricStrategy:
    monkeypatch.setattr(fabric, "ExactReplica", Replica)
    monkeypatch.setattr(fabric, "new_group", lambda _: "a group of its own")
    monkeypatch.setattr(fabric, "gather_json", lambda own: [own])
    return AutoSyncFabricStrategy(parallel_devices=[torch.device("cpu")])


def set_up(strategy: AutoSyncFabricStrategy, module: nn.Module | None = None) -> Any:
    """The replica of a module; None sets up a new one."""
    return strategy.setup_module(nn.Linear(1, 1) if module is None else module).replica


def test_a_later_module_is_planned_for_the_links_as_they_are_now(strategy: AutoSyncFabricStrategy) -> None:
    one = nn.Linear(1, 1)
    first = set_up(strategy, one)
    assert first.given is None
    assert set_up(strategy).given == "first"
    first.links = "slower"  # measured again while it trained
    assert set_up(strategy, one).given == "slower"
    # The first replica is gone, and the second one still has the links of its setup.
    assert set_up(strategy).given == "slower"


def test_a_first_module_that_needs_no_links_hides_none(strategy: AutoSyncFabricStrategy) -> None:
    first = set_up(strategy)
    first.links = strategy._links = None
    assert set_up(strategy).given is None
    assert set_up(strategy).given == "first"

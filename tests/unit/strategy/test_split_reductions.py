"""Plans for the gradients of split models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.split import _reduction_settings
from lightning_autosync.workload import describe


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_on_accelerators_only_the_backend_is_chosen(device: str) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    star = ClusterSpec.star(bandwidths=["400 Mbit/s", "100 Mbit/s", "100 Mbit/s", "100 Mbit/s"])
    choose = _reduction_settings(StrategySettings(cluster=star), module.to(torch.device(device))).choose
    assert choose is not None
    topologies = {group.topology for group in choose(describe(module), star, True).groups}
    assert (topologies == {"native"}) == (device != "cpu")

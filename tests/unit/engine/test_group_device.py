"""The device of a group's messages: that of the group, not that of the calling thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_autosync.engine.collectives import group_device

BOUND = torch.device("cuda", 1)


@pytest.mark.parametrize("as_default", [True, False])
def test_the_device_to_which_the_group_is_bound(as_default: bool) -> None:
    group: Any = SimpleNamespace(bound_device_id=BOUND)
    with (
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch.object(dist, "group", SimpleNamespace(WORLD=group if as_default else None)),
        mock.patch("torch.cuda.current_device", return_value=0),
    ):
        assert group_device(None if as_default else group) == BOUND


def test_the_threads_device_if_the_group_has_none() -> None:
    group: Any = SimpleNamespace(bound_device_id=None)
    with (
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch("torch.cuda.current_device", return_value=2),
    ):
        assert group_device(group) == torch.device("cuda", 2)

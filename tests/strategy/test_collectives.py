"""Collective calls are refused by name, on one thread, for a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_autosync.strategy.process_group import NAMES, refused_collectives


def test_each_is_refused_by_name_and_restored_whatever_happens() -> None:
    before = {name: getattr(dist, name) for name in NAMES}
    for name in NAMES:
        with pytest.raises(KeyError, match=f"torch.distributed.{name}"), refused_collectives(KeyError):
            getattr(dist, name)(torch.ones(1))
    assert {name: getattr(dist, name) for name in NAMES} == before


def test_one_inside_the_other_restores_too() -> None:
    before = dist.barrier
    with refused_collectives(KeyError):
        with refused_collectives(ValueError), pytest.raises(ValueError, match="barrier"):
            dist.barrier()
        with pytest.raises(KeyError):
            dist.barrier()
    assert dist.barrier is before


def test_other_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(dist, "barrier", called.append)
    with refused_collectives(KeyError):
        other = threading.Thread(target=lambda: dist.barrier("elsewhere"))
        other.start()
        other.join()
    assert called == ["elsewhere"]

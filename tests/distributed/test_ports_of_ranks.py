"""Ranks connect on the ports of the range."""

from __future__ import annotations

import port_calls
import pytest
from ports import free_port

from lightning_autosync.measure.workers import WorkerError


def test_connections_and_meshes_keep_to_the_range(pool) -> None:
    first = free_port()
    allowed = set(range(first, first + 40))
    for ports in pool.run(port_calls.connected, first=first, last=first + 39):
        assert ports
        assert set(ports) <= allowed
    meshes = [port for ports in pool.run(port_calls.in_mesh, first=first, last=first + 39) for port in ports]
    assert len(set(meshes)) == len(meshes) == 5
    assert set(meshes) <= allowed


def test_a_range_that_is_used_up_is_told_on_every_rank(pool) -> None:
    first = free_port()
    with pytest.raises(WorkerError, match=f"cannot listen for its peers: no port is free from {first} to {first + 1}"):
        pool.run(port_calls.connected, first=first, last=first + 1)

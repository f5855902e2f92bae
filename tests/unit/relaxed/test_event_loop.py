"""Calls left for the mesh's thread, also those that come too late."""

from __future__ import annotations

import select
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from strangers import SECRET

from lightning_autosync.errors import ExchangeError, MeshTimeout
from lightning_autosync.relaxed.transport.event_loop import CallQueue
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import OutgoingMessage, Sent, as_bytes, encode_head


def _is_woken(calls: CallQueue) -> bool:
    return bool(select.select([calls.readable], [], [], 0)[0])


def test_calls_behind_one_that_raises_are_made_at_the_next_wake() -> None:
    def fail() -> None:
        raise ValueError("no luck")

    calls, made = CallQueue(), []
    try:
        calls.submit(fail)
        calls.submit(lambda: made.append(1))
        with pytest.raises(ValueError, match="no luck"):
            calls.run_all()
        assert made == []
        assert _is_woken(calls)
        calls.run_all()
        assert made == [1]
        assert not _is_woken(calls)
    finally:
        calls.close()


def test_nothing_can_be_left_in_a_closed_queue() -> None:
    calls, made = CallQueue(), []
    calls.submit(lambda: made.append(0))
    (left,) = calls.close()
    with pytest.raises(ExchangeError, match="the mesh is closed"):
        calls.submit(lambda: made.append(1))
    assert made == []
    left()
    assert made == [0]


def test_a_message_that_comes_too_late_for_the_meshs_thread_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread sends it while the mesh is being closed: its thread has ended, the queue still takes calls."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        opening = [
            pool.submit(Mesh.open, store, rank, 2, secret=SECRET, address="127.0.0.1", timeout=10.0) for rank in (0, 1)
        ]
        meshes = [opened.result() for opened in opening]
    late = OutgoingMessage(encode_head("late", {}), as_bytes([torch.zeros(100_000)]), Sent())
    loop = meshes[0]._loop
    stop = loop._connections.stop

    def send_then_stop() -> None:
        assert not loop._thread.is_alive()
        loop.post(1, late)
        stop()

    monkeypatch.setattr(loop._connections, "stop", send_then_stop)
    meshes[0].close()
    with pytest.raises(ExchangeError) as caught:
        late.sent.wait(1.0)
    assert not isinstance(caught.value, MeshTimeout)
    with pytest.raises(ExchangeError, match="the mesh is closed"):
        loop.post(1, late)
    meshes[1].close()

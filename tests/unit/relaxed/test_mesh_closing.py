"""What becomes of messages when a mesh closes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from strangers import SECRET

from lightning_autosync.errors import ExchangeError, MeshTimeout
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Message, Sent, as_bytes, encode_head


def test_a_message_that_comes_too_late_for_the_meshs_thread_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread sends it while the mesh is being closed: its thread has ended, the queue still takes calls."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        opening = [
            pool.submit(Mesh.open, store, rank, 2, secret=SECRET, address="127.0.0.1", timeout=10.0) for rank in (0, 1)
        ]
        meshes = [opened.result() for opened in opening]
    late = Message(encode_head("late", {}), as_bytes([torch.zeros(100_000)]), Sent())
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

"""What a process that knows the secret and says nonsense does to the others: they lose it, and nobody else."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch.distributed as dist
from strangers import SECRET

from lightning_autosync.relaxed.controller import Controller, ControllerClient
from lightning_autosync.relaxed.coordinator import Coordinator
from lightning_autosync.relaxed.grouping import Grouping
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.strategy.shared_data import SharedWork

_HEAD = struct.Struct("<BIQ")
_SMALL, _LARGE, _PIECE = range(3)


def small(kind: Any, header: Any) -> bytes:
    return raw(json.dumps([kind, header]).encode())


def raw(text: bytes) -> bytes:
    return _HEAD.pack(_SMALL, len(text), 0) + text


_NOTE = {"iteration": 1, "samples": 1, "elements": 1}
NONSENSE = {
    "a frame of no type": _HEAD.pack(9, 0, 0),
    "a huge header": _HEAD.pack(_SMALL, 2**32 - 1, 0),
    "a huge payload": _HEAD.pack(_LARGE, 10, 2**63),
    "a piece of nothing": _HEAD.pack(_PIECE, 0, 5) + b"12345",
    "no text": raw(b"\xff\xfe\x00"),
    "no JSON": raw(b"hello"),
    "deep JSON": raw(b"[" * 20_000),
    "another JSON": raw(b"17"),
    "a kind that is a number": small(3, {}),
    "a header that is a list": small("mesh.lost", []),
    "a loss of nobody": small("mesh.lost", {}),
    "a loss of text": small("mesh.lost", {"peer": "one", "incarnation": 1, "why": ""}),
    "a doubt without an incarnation": small("mesh.suspect", {"peer": 1}),
    "a note without fields": small("controller.ready", {}),
    "a note of text": small("controller.ready", {**_NOTE, "elements": "many"}),
    "a note of a truth": small("controller.arrive", {**_NOTE, "iteration": True}),
    "a note of averages": small("controller.ready", {**_NOTE, "averages": 3}),
    "a group of a list": small("controller.complete", {"generation": [1]}),
    "a breach of nothing": small("controller.broken", {}),
    "a question of nothing": small("work?", {"epoch": 1}),
    "a question of more": small("work?", {"epoch": 1, "length": 4, "count": 1, "extra": 1}),
    "what its handler cannot use": small("test.numbers", {"number": "many"}),
    "a part of nothing": small("average.part", {"generation": 1, "chunk": -1}),
}


def await_true(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20.0
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_nonsense_ends_its_senders_connection_only() -> None:
    """One after the other, for meshes are few and cases are many: each is of a sender that has come anew."""
    store = dist.HashStore()
    first: list[Any] = [None, None]

    def begin(rank: int) -> None:
        first[rank] = Mesh.open(store, rank, 3, secret=SECRET, address="127.0.0.1", timeout=20.0)

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    sender = Mesh.open(store, 2, 3, secret=SECRET, address="127.0.0.1", timeout=20.0)
    for thread in threads:
        thread.join()
    with closing(first[0]) as victim, closing(first[1]) as other:
        controller = Controller(victim, Coordinator(2, Grouping(2)))
        work = SharedWork(victim, 3, timeout=20.0)
        victim.subscribe("test.numbers", lambda mail: int(mail.header["number"]))
        for name, data in NONSENSE.items():
            sender._loop.perform(lambda data=data, sender=sender: sender._loop._connections.by_rank[0].sock.send(data))
            await_true(lambda: 2 not in victim.live, f"rank 0 does not mind {name}")
            await_true(lambda: 2 not in other.live, f"rank 1 hears nothing of {name}")
            sender.close()
            assert victim.error is None, f"{name}: {victim.error}"
            assert other.error is None, f"{name}: {other.error}"
            sender = Mesh.open(store, 2, 3, secret=SECRET, address="127.0.0.1", timeout=20.0, rejoin=True)
        sender.close()
        # The coordinator serves on.
        for mesh in (victim, other):
            ControllerClient(mesh, 20.0).send("start")
        assert ControllerClient(other, 20.0).receive("take")[0] == "take"
        controller.close()
        work.close()


def test_nonsense_that_came_before_its_handler_ends_its_senders_connection_only() -> None:
    store = dist.HashStore()
    first: list[Any] = []
    thread = threading.Thread(
        target=lambda: first.append(Mesh.open(store, 0, 2, secret=SECRET, address="127.0.0.1", timeout=20.0))
    )
    thread.start()
    sender = Mesh.open(store, 1, 2, secret=SECRET, address="127.0.0.1", timeout=20.0)
    thread.join()
    with closing(first[0]) as victim, closing(sender):
        sender.send(0, "test.numbers", {"number": "many"})
        sender.send(0, "test.after").wait(20.0)
        victim.receive("test.after", timeout=20.0)
        victim.subscribe("test.numbers", lambda mail: int(mail.header["number"]))
        await_true(lambda: 1 not in victim.live, "rank 0 does not mind")
        assert victim.error is None

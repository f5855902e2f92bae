"""A process that comes back: whom it must meet, whom it need not wait for, and whose model it takes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strangers import SECRET

from lightning_autosync.engine.secret import seal
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.averaging_worker import _MODEL, PartialReduce
from lightning_autosync.relaxed.model_state import ModelTensors
from lightning_autosync.relaxed.periodic import Periodic
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import as_bytes, payload_size
from lightning_autosync.relaxed.transport.payload import pack

HOST = "127.0.0.1"
PATIENT = HeartbeatSettings(interval=0.5, shortest=20.0, longest=30.0)


def open_all(store: dist.Store, size: int) -> list[Mesh]:
    meshes: list[Any] = [None] * size

    def run(rank: int) -> None:
        meshes[rank] = Mesh.open(store, rank, size, secret=SECRET, address=HOST, heartbeat=PATIENT, timeout=20.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return meshes


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """Where one can connect, and nobody ever answers."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()


def test_who_comes_back_does_not_wait_for_one_that_is_gone(black_hole: tuple[str, int]) -> None:
    store = dist.HashStore()
    first, second, third = open_all(store, 3)
    second.close()
    third.close()
    store.set("mesh/1/address/1", seal(SECRET, "address of rank 1 in mesh 1", json.dumps(black_hole)))
    begun = time.monotonic()
    again = Mesh.open(store, 2, 3, secret=SECRET, address=HOST, heartbeat=PATIENT, timeout=60.0, rejoin=True)
    assert time.monotonic() - begun < 20.0
    assert again.live == {0, 2}
    begun = time.monotonic()
    again.close()
    assert time.monotonic() - begun < 20.0
    first.close()


def test_who_comes_back_does_not_settle_for_a_part_of_the_living(black_hole: tuple[str, int]) -> None:
    store = dist.HashStore()
    first, second, third = open_all(store, 3)
    third.close()
    store.set("mesh/1/address/1", seal(SECRET, "address of rank 1 in mesh 1", json.dumps(black_hole)))
    with pytest.raises(ExchangeError, match="rank 2 could not connect to its peers: rank 1"):
        Mesh.open(store, 2, 3, secret=SECRET, address=HOST, heartbeat=PATIENT, timeout=1.5, rejoin=True)
    second.close()
    first.close()


def test_a_model_for_a_predecessor_is_not_taken() -> None:
    donor, taker = open_all(dist.HashStore(), 2)
    module = torch.nn.Linear(2, 1, bias=False)
    settings = Consistency(mode="partial_reduce", group_size=2, weighting="constant")
    worker = PartialReduce(taker, ModelTensors.of(module), settings, timeout=20.0)
    nothing = pack({})
    size = payload_size(as_bytes(nothing))
    for visit in (1, 2):
        header = {"iteration": visit, "facts": {}, "visit": visit, "optimizer": size}
        donor.send(1, _MODEL, header, [*nothing, torch.full((2,), float(visit))])
    worker._take(0, 2)
    assert module.weight.tolist() == [[2.0, 2.0]]
    assert worker.progress == 2
    donor.close()
    worker.close()
    taker.close()


def test_who_comes_back_steps_as_its_donor_does() -> None:
    """Adam's first steps would be of full size, whatever it had come to before."""
    meshes = open_all(dist.HashStore(), 2)
    settings = Consistency(mode="partial_reduce", group_size=2, weighting="constant")
    modules = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1) for module in modules]
    donor, taker = (
        PartialReduce(mesh, ModelTensors.of(module), settings, timeout=20.0)
        for mesh, module in zip(meshes, modules, strict=True)
    )

    def step(rank: int, worker: PartialReduce, scale: float) -> None:
        for parameter in modules[rank].parameters():
            parameter.grad = torch.full_like(parameter, scale)
        worker._step_locally(optimizers[rank], 1)

    for scale in (100.0, -30.0, 1.0):
        step(0, donor, scale)
    donor._donate([[1, 2]], steps_back=0)
    taker._take(0, 2)
    assert taker.progress == 3
    for scale in (0.5, 2.0):
        for rank, worker in enumerate((donor, taker)):
            step(rank, worker, scale)
        for ours, theirs in zip(modules[1].parameters(), modules[0].parameters(), strict=True):
            assert torch.equal(ours, theirs)
    for worker, mesh in ((taker, meshes[1]), (donor, meshes[0])):
        worker.close()
        mesh.close()


def test_a_checkpoint_has_one_copy_of_the_outer_state_which_all_take() -> None:
    meshes = open_all(dist.HashStore(), 2)
    settings = Consistency(mode="periodic", period=2, outer="diloco")
    workers = [Periodic(mesh, ModelTensors.of(torch.nn.Linear(3, 2)), settings, timeout=20.0) for mesh in meshes]
    states = [worker.state_dict() for worker in workers]
    assert "outer" not in states[1]
    assert [worker.state_bytes for worker in workers] == [2 * 4 * 8] * 2
    states[0]["outer"][0]["momentum"].fill_(3.0)
    for worker, state in zip(workers, states, strict=True):
        worker.load_state_dict(state)
    threads = [threading.Thread(target=worker.start, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    for worker, mesh in zip(workers, meshes, strict=True):
        assert worker._outer[0].state["momentum"].tolist() == [3.0] * 8
        assert torch.equal(worker._outer[0].state["anchor"], workers[0]._outer[0].state["anchor"])
        worker.close()
        mesh.close()

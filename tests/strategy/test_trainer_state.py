"""Who came back asks rank 0 where training is, which tells what held when the pass at hand began."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from strangers import SECRET

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.strategy.trainer_state import TrainerStateServer, request_trainer_state

PATIENT = HeartbeatSettings(interval=0.5, shortest=20.0, longest=30.0)


@pytest.fixture
def meshes() -> Iterator[list[Mesh]]:
    store, opened = dist.HashStore(), {}

    def run(rank: int) -> None:
        opened[rank] = Mesh.open(store, rank, 2, secret=SECRET, address="127.0.0.1", heartbeat=PATIENT, timeout=20.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    yield [opened[0], opened[1]]
    for mesh in opened.values():
        mesh.close()


def packed(content: object, folder: object) -> bytes:
    path = f"{folder}/content"
    torch.save(content, path)
    with open(path, "rb") as file:
        return file.read()


def test_it_is_told_at_once_during_a_pass_and_from_its_begin(meshes: list[Mesh], tmp_path) -> None:  # type: ignore[no-untyped-def]
    epoch = [3]
    server = TrainerStateServer(meshes[0], lambda: packed({"epoch": epoch[0]}, tmp_path))
    server.resume(7)
    epoch[0] = 4
    assert request_trainer_state(meshes[1], 7, 20.0) == {"epoch": 3}
    server.close()


@pytest.mark.parametrize("between", [True, False], ids=["between passes", "in a pass before the meeting"])
def test_it_waits_for_a_pass_after_the_meeting_that_its_model_is_of(
    meshes: list[Mesh], tmp_path, between: bool
) -> None:  # type: ignore[no-untyped-def]
    epoch = [3]
    server = TrainerStateServer(meshes[0], lambda: packed({"epoch": epoch[0]}, tmp_path))
    server.resume(7)
    if between:
        server.pause()
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(request_trainer_state(meshes[1], 8, 20.0)))
    asking.start()
    time.sleep(0.3)
    assert not found
    epoch[0] = 4
    server.resume(8)
    asking.join(20.0)
    assert found == [{"epoch": 4}]


class Odd:
    """No plain value."""


@pytest.mark.parametrize("pickles", [True, False])
def test_what_cannot_be_sent_is_an_error_of_who_came_back_alone(meshes: list[Mesh], tmp_path, pickles: bool) -> None:  # type: ignore[no-untyped-def]
    content = {"callbacks": Odd() if pickles else (lambda: None)}
    server = TrainerStateServer(meshes[0], lambda: packed(content, tmp_path))
    server.resume(7)
    with pytest.raises(
        ExchangeError, match="cannot rejoin: the states of callbacks and schedulers may contain only plain"
    ):
        request_trainer_state(meshes[1], 7, 20.0)


def test_an_answer_to_a_predecessor_is_not_taken_for_the_own(meshes: list[Mesh], tmp_path) -> None:  # type: ignore[no-untyped-def]
    server = TrainerStateServer(meshes[0], lambda: packed({"epoch": 5}, tmp_path))
    server.resume(7)
    meshes[1].send(0, "trainer_state?", {"name": "of one that was lost", "drain": 0})
    assert request_trainer_state(meshes[1], 7, 20.0) == {"epoch": 5}


def test_a_rank_zero_that_leaves_is_an_error(meshes: list[Mesh]) -> None:
    TrainerStateServer(meshes[0], lambda: b"")
    threading.Timer(0.3, meshes[0].close).start()
    with pytest.raises(ExchangeError, match="rank 0"):
        request_trainer_state(meshes[1], 7, 20.0)

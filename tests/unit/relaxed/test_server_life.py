"""Servers and workers of threads in one process: bad messages, returns at bad moments, buffers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strangers import SECRET

from lightning_autosync.errors import ExchangeError, Expelled, PlanError
from lightning_autosync.plan import Consistency, Group, Partition, SyncPlan
from lightning_autosync.plan.servers import server_layout
from lightning_autosync.relaxed.server import ParameterServer
from lightning_autosync.relaxed.server import server as server_module
from lightning_autosync.relaxed.server.clock import Barrier
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.payload import pack
from lightning_autosync.workload import describe, variable_names

PATIENT = HeartbeatSettings(interval=0.5, shortest=20.0, longest=30.0)
TIMEOUT = 20.0


class Worker:
    """One worker of a linear model whose weights lie on ranks 0 and 1."""

    def __init__(
        self, store: dist.Store, rank: int, mode: str, workers: int = 3, rejoin: bool = False, timeout: float = TIMEOUT
    ) -> None:
        module = torch.nn.Linear(4, 3)
        module.register_buffer("mean", torch.full((2,), float(rank)))
        module.register_buffer("count", torch.tensor(rank))
        group = Group(
            name="all",
            variables=tuple(variable.name for variable in describe(module).variables),
            architecture="parameter_server",
            topology="star",
            partition=Partition(shards=2),
            placement=(0, 1),
        )
        consistency = Consistency(mode=mode, staleness=1 if mode == "bounded_staleness" else None)
        plan = SyncPlan(world_size=workers, consistency=consistency, groups=(group,))
        self.rank, self.module = rank, module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.mesh = Mesh.open(
            store, rank, workers, secret=SECRET, address="127.0.0.1", heartbeat=PATIENT, timeout=TIMEOUT, rejoin=rejoin
        )
        self.running = ParameterServer(
            self.mesh,
            variable_names(module),
            server_layout(plan, describe(module)),
            self.optimizer,
            consistency,
            buffers=list(module.named_buffers()),
            timeout=timeout,
        )

    def step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.running.step(self.optimizer, 1)

    def close(self) -> None:
        self.running.close()
        self.mesh.close()

    @property
    def weight(self) -> float:
        return float(self.module.weight.detach()[0, 0])


def play(*parts: Callable[[], Any]) -> list[Any]:
    """Run them in threads of their own; what each returned."""
    found: list[Any] = [None] * len(parts)

    def run(place: int) -> None:
        try:
            found[place] = parts[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


SETTINGS = {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
HEADER = {"step": 0, "workers": 1, "settings": [SETTINGS], "since": 0}
HEADERS = {
    "payload": HEADER,
    "header": {"nonsense": True},
    "step": {**HEADER, "step": "none"},
    "workers": {**HEADER, "workers": 0},
    "version": {**HEADER, "since": "now"},
    "groups": {**HEADER, "settings": []},
    "group": {**HEADER, "settings": [{**SETTINGS, "params": []}]},
    "setting": {**HEADER, "settings": [{**SETTINGS, "lr": "fast"}]},
}
"""Headers of a push, by what is wrong; ``payload`` comes with a payload that is none."""


@pytest.mark.parametrize("damage", HEADERS)
def test_what_one_worker_sends_does_not_end_the_others(damage: str) -> None:
    store = dist.HashStore()

    def good(rank: int) -> float:
        worker = Worker(store, rank, "asynchronous")
        worker.running.start()
        worker.step()
        store.wait(["sent"])
        for _ in range(3):
            worker.step()
        worker.running.drain()
        found = worker.weight
        worker.close()
        return found

    def bad() -> str:
        worker = Worker(store, 2, "asynchronous")
        worker.running.start()
        parts = [memoryview(b"noise")] if damage == "payload" else pack({}, {})
        for server in (0, 1):
            worker.mesh.send(server, "server.push", HEADERS[damage], parts)
        store.set("sent", "")
        with pytest.raises(ExchangeError, match="rank 2 sent an invalid message"):
            worker.step()
        worker.close()
        return ""

    first, second, _ = play(lambda: good(0), lambda: good(1), bad)
    assert first == second


def test_a_worker_that_comes_back_between_two_servers_barriers_blocks_nobody() -> None:
    """Server 0 counts it in before its barrier, server 1 after: both waited for each other until the time-out."""
    store = dist.HashStore()
    held = threading.Event()

    def stays(rank: int) -> float:
        worker = Worker(store, rank, "bounded_staleness")
        worker.running.start()
        store.wait(["gone"])
        while 2 in worker.mesh.live:
            time.sleep(0.01)
        if rank == 1:
            # Its server hears of the newcomer only after the barrier.
            hold_joins(worker.running, held)
        store.add("ready", 1)
        store.wait(["joined"])
        time.sleep(0.2)
        worker.step()
        worker.running.drain()
        worker.running.resume()
        worker.step()
        worker.running.drain()
        found = worker.weight
        worker.close()
        return found

    def comes_back() -> float:
        worker = Worker(store, 2, "bounded_staleness")
        worker.running.start()
        worker.close()
        store.set("gone", "")
        while store.add("ready", 0) < 2:
            time.sleep(0.01)
        worker = Worker(store, 2, "bounded_staleness", rejoin=True)
        threading.Timer(0.1, lambda: store.set("joined", "")).start()
        threading.Timer(2.0, held.set).start()
        worker.running.start()
        worker.step()
        worker.running.drain()
        found = worker.weight
        worker.close()
        return found

    begun = time.monotonic()
    assert len(set(play(lambda: stays(0), lambda: stays(1), comes_back))) == 1
    assert time.monotonic() - begun < TIMEOUT


def test_in_step_all_learn_who_left_while_they_go_on() -> None:
    """They went on with fewer workers, as if each step were still that of all."""
    store = dist.HashStore()

    def stays(rank: int, ends: bool) -> str:
        worker = Worker(store, rank, "synchronous")
        worker.running.start()
        worker.step()
        if ends:
            store.wait(["left"])
        with pytest.raises(ExchangeError) as caught:
            (worker.running.drain if ends else worker.step)()
        store.set(f"told {rank}", "")
        store.wait(["told 0", "told 1"])
        worker.close()
        return str(caught.value)

    def leaves() -> str:
        worker = Worker(store, 2, "synchronous")
        worker.running.start()
        worker.step()
        worker.close()
        store.set("left", "")
        return ""

    found = play(lambda: stays(0, False), lambda: stays(1, True), leaves)[:2]
    assert all("rank 2 has left, and synchronous steps need every worker" in error for error in found)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_barrier_tells_who_was_there(mode: str) -> None:
    store = dist.HashStore()

    def stays(rank: int) -> list[set[int]]:
        worker = Worker(store, rank, mode)
        worker.running.start()
        worker.step()
        worker.running.drain()
        met = [set(worker.running.last_drain.starts)]
        if mode == "asynchronous":
            store.wait(["left"])
            worker.step()
            worker.running.drain()
            met.append(set(worker.running.last_drain.starts))
        worker.close()
        return met

    def leaves() -> list[set[int]]:
        worker = Worker(store, 2, mode)
        worker.running.start()
        worker.step()
        worker.running.drain()
        worker.close()
        store.set("left", "")
        return [set(worker.running.last_drain.starts)]

    later = [{0, 1}] if mode == "asynchronous" else []
    assert play(lambda: stays(0), lambda: stays(1), leaves) == [[{0, 1, 2}, *later], [{0, 1, 2}, *later], [{0, 1, 2}]]


@pytest.mark.slow
def test_a_slow_worker_that_still_pushes_is_waited_for_at_a_barrier() -> None:
    store = dist.HashStore()

    def train(rank: int) -> float:
        worker = Worker(store, rank, "asynchronous", workers=2, timeout=2.0)
        worker.running.start()
        for _ in range(1 + 7 * rank):
            time.sleep(0.4 * rank)
            worker.step()
        worker.running.drain()
        found = worker.weight
        worker.close()
        return found

    first, second = play(lambda: train(0), lambda: train(1))
    assert first == second


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"bend": {"momentum_buffer": torch.zeros(3)}}, "checkpoint: it has optimizer state of 'bend', but the"),
        (
            {"bias": {"momentum_buffer": torch.zeros(4)}},
            r"'momentum_buffer' of 'bias' has shape \[4\], but the parameter",
        ),
    ],
)
def test_every_worker_refuses_the_state_of_another_model(state: Any, message: str) -> None:
    store = dist.HashStore()

    def load(rank: int) -> None:
        worker = Worker(store, rank, "asynchronous", workers=2)
        with pytest.raises(PlanError, match=message):
            worker.running.load_state_dict({"step": 0, "progress": 0.0, "optimizer": state})
        store.set(f"refused {rank}", "")
        store.wait(["refused 0", "refused 1"])
        worker.mesh.close()
        worker.running.close()

    play(lambda: load(0), lambda: load(1))


def hold_joins(running: ParameterServer, held: threading.Event) -> None:
    """Let this worker's server take a ``server.join`` only later."""
    server = running.server
    assert server is not None
    put, later = server._events._events.put, []

    def deliver(mail: Any) -> None:
        if held.is_set() or getattr(mail, "kind", "") != "server.join":
            put(mail)
            return
        later.append(mail)
        threading.Thread(target=lambda: (held.wait(), put(later.pop())), daemon=True).start()

    running._mesh._handlers["server.join"] = deliver


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_buffers_follow_rank_0_in_step_and_are_averaged_out_of_step(mode: str) -> None:
    store = dist.HashStore()

    def train(rank: int) -> list[float]:
        worker = Worker(store, rank, mode, workers=2)
        worker.running.start()
        began = [*worker.module.mean.tolist(), int(worker.module.count)]
        assert began == [0.0, 0.0, 0]
        worker.step()
        worker.module.mean.fill_(4.0 + rank)
        worker.module.count.fill_(7 + rank)
        worker.running.drain()
        found = [*worker.module.mean.tolist(), int(worker.module.count)]
        worker.close()
        return found

    first, second = play(lambda: train(0), lambda: train(1))
    if mode == "synchronous":
        assert first == second == [4.0, 4.0, 7]
    else:
        # Counters stay each worker's own.
        assert (first, second) == ([4.5, 4.5, 7], [4.5, 4.5, 8])


def test_a_barrier_averages_only_what_was_brought() -> None:
    barrier = Barrier({"mean": torch.zeros(1), "count": torch.tensor(0)})
    barrier.arrive(0, 3, 0, {"mean": torch.tensor([1.0])})
    barrier.arrive(1, 1, 0, {"mean": torch.tensor([5.0])})
    barrier.arrive(2, 0, 0, {})
    arrived, averages = barrier.leave()
    assert arrived.keys() == {0, 1, 2}
    assert averages == {"mean": torch.tensor([2.0])}
    assert barrier.passed == 1


def test_who_made_no_step_does_not_count_at_a_barrier() -> None:
    mask = torch.tensor([0.0, float("-inf")])
    barrier = Barrier({"mask": torch.zeros(2)})
    barrier.arrive(0, 3, 0, {"mask": mask})
    barrier.arrive(1, 0, 0, {"mask": mask})
    assert torch.equal(barrier.leave()[1]["mask"], mask)
    for rank in (0, 1):
        barrier.arrive(rank, 0, 0, {"mask": torch.tensor([float(rank), 1.0])})
    assert barrier.leave()[1]["mask"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(("expelled", "failure"), [("rank 4 was expelled", ""), ("", "rank 0 is lost (killed)")])
def test_a_server_only_process_says_why_it_could_not_go_on(
    monkeypatch: pytest.MonkeyPatch, expelled: str, failure: str
) -> None:
    class Given:
        error: ExchangeError | None = Expelled(expelled) if expelled else None

        def close(self) -> None: ...

    class Server:
        def __init__(self, mesh: Any) -> None:
            self.failure = failure

        def wait(self) -> None: ...

    heartbeats: list[Any] = []
    monkeypatch.setattr(
        server_module.Mesh, "open", lambda *_, **given: heartbeats.append(given["heartbeat"]) or Given()
    )
    monkeypatch.setattr(server_module, "ShardServer", Server)
    with pytest.raises(ExchangeError, match=re.escape(expelled or failure)):
        server_module.serve(dist.HashStore(), 4, 5, secret=SECRET, heartbeat=PATIENT)
    assert heartbeats == [PATIENT]

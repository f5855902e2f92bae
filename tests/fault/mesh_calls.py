"""What the processes of a `crew.Crew` do in the tests of meshes and group averages."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from crew import drop_on_signal
from strangers import SECRET
from torch import Tensor

from lightning_autosync.errors import ExchangeError, Expelled, GroupBroken, MeshTimeout, PeerLost
from lightning_autosync.relaxed.group_average import GroupAverage
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh

QUICK = HeartbeatSettings(interval=0.1, shortest=2.0, longest=4.0, redial=2.0)


def join(store: dist.Store, rank: int, size: int, rejoin: bool) -> Mesh:
    mesh = Mesh.open(
        store, rank, size, secret=SECRET, address="127.0.0.1", heartbeat=QUICK, timeout=30.0, rejoin=rejoin
    )
    drop_on_signal(mesh, rank, store)
    store.add("joined", 1)
    return mesh


def watch(store: dist.Store, rank: int, size: int, rejoin: bool, peer: int, seconds: float) -> dict[str, Any]:
    """Wait for a message of ``peer`` that never comes; says when (wall clock) and how the waiting ended."""
    mesh = join(store, rank, size, rejoin)
    if rank == peer:
        try:
            mesh.receive("nothing", timeout=seconds)
        except (Expelled, MeshTimeout) as error:
            return {"error": type(error).__name__, "why": str(error), "live": sorted(mesh.live)}
    try:
        mesh.receive("nothing", sender=peer, timeout=seconds)
    except (PeerLost, MeshTimeout) as error:
        ended = time.time()
        # A rank that ended earlier would be missing among those that live.
        _meet(store, "saw the loss", size - 1, seconds)
        live = sorted(mesh.live)
        _meet(store, "read who lives", size - 1, seconds)
        return {"error": type(error).__name__, "why": str(error), "at": ended, "live": live}
    raise AssertionError("unreachable")


def _meet(store: dist.Store, what: str, count: int, seconds: float) -> None:
    """Wait until ``count`` ranks came here, but no longer than ``seconds``."""
    store.add(what, 1)
    deadline = time.monotonic() + seconds
    while store.add(what, 0) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def chatter(store: dist.Store, rank: int, size: int, rejoin: bool, messages: int, floats: int) -> dict[str, Any]:
    """Send numbered messages, large and small, to all; says what came, in which order, and with what content."""
    mesh = join(store, rank, size, rejoin)
    large = torch.arange(floats, dtype=torch.float32)
    others = sorted(mesh.live - {rank})

    def talk() -> None:
        for number in range(messages):
            sent = [mesh.send(peer, "large", {"number": number}, [large + number]) for peer in others]
            for peer in others:
                mesh.send(peer, "small", {"number": number})
            for one in sent:
                one.wait(30.0)
            if number == 1:
                store.add("talking", 1)

    speaker = threading.Thread(target=talk)
    speaker.start()
    numbers: dict[str, list[int]] = {f"{kind}{peer}": [] for kind in ("large", "small") for peer in others}
    intact = True
    for _ in range(2 * messages * len(others)):
        mail = mesh.receive("large", "small", timeout=30.0)
        numbers[f"{mail.kind}{mail.sender}"].append(mail.header["number"])
        if mail.kind == "large":
            intact &= torch.equal(torch.frombuffer(mail.payload, dtype=torch.float32), large + mail.header["number"])
    speaker.join()
    mesh.close()
    return {"intact": intact, "in_order": all(found == list(range(messages)) for found in numbers.values())}


def averages(store: dist.Store, rank: int, size: int, rejoin: bool, elements: int, timeout: float) -> dict[str, Any]:
    """Average among all live ranks until the test adds to "finish", then once more until all have the same."""
    begin = time.monotonic()
    mesh = join(store, rank, size, rejoin)
    if rank == 0:
        threading.Thread(target=_lead, args=(mesh, store), daemon=True).start()
    model = torch.full((elements,), float(rank))
    rejoined, broken, completed, slowest = int(rejoin), 0, 0, 0.0
    average = GroupAverage(mesh, timeout)
    done = False
    while True:
        try:
            mesh.send(0, "ready", {"done": done})
            order = mesh.receive("group", "end", sender=0, timeout=4 * timeout)
            if order.kind == "end":
                break
            members, last = order.header["members"], order.header["last"]
            begun = time.monotonic()
            done = False
            try:
                model.copy_(average.run(order.header["generation"], members, [1 / len(members)] * len(members), model))
                completed, done = completed + 1, last
            except GroupBroken:
                broken += 1
            slowest = max(slowest, time.monotonic() - begun)
            if not done:
                model += torch.randn(elements) * 1e-3
                time.sleep(0.005)  # other tests want some of the cores
        except Expelled:
            mesh.close()
            mesh = join(store, rank, size, True)
            average, rejoined, done = GroupAverage(mesh, timeout), rejoined + 1, False
        except PeerLost as error:
            return {"error": str(error), "finite": _finite(model), "seconds": time.monotonic() - begin}
    live = sorted(mesh.live)
    mesh.close()
    return {
        "digest": hashlib.sha256(model.numpy().tobytes()).hexdigest(),
        "finite": _finite(model),
        "live": live,
        "completed": completed,
        "broken": broken,
        "rejoined": rejoined,
        "slowest": slowest,
    }


def _finite(model: Tensor) -> bool:
    return bool(torch.isfinite(model).all())


def _lead(mesh: Mesh, store: dist.Store) -> None:
    """Put all live ranks that are ready into a group, until the last group has succeeded on all of them."""
    ready: dict[int, bool] = {}
    generation = 0
    while True:
        try:
            mail = mesh.receive("ready", timeout=0.05)
            ready[mail.sender] = mail.header["done"]
        except MeshTimeout:
            pass
        except ExchangeError:
            return
        members = sorted(mesh.live)
        if not set(members) <= set(ready):
            continue
        done = all(ready[member] for member in members)
        generation += 1
        header = {"generation": generation, "members": members, "last": store.add("finish", 0) > 0}
        ready.clear()
        # Itself last: its process may end at once.
        for member in reversed(members):
            try:
                mesh.send(member, "end" if done else "group", header)
            except PeerLost:
                continue
        if done:
            return

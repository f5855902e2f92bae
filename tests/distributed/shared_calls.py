"""What ranks do in tests of sums in shared memory."""

from __future__ import annotations

import errno
import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from training import Net, batches, distance, engine, subgroup, train

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.engine.connections import connect_pairs
from lightning_autosync.engine.exchanges.shared_memory import sharing_fault
from lightning_autosync.errors import AutoSyncError, ExchangeError
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.workload import describe, variable_names


def _plan(module: nn.Module, size: int, bucket_bytes: int = 2**20) -> tuple[SyncPlan, ClusterSpec]:
    cluster = ClusterSpec.uniform(1, devices=size)
    return builders.shared_memory(describe(module), cluster, bucket_bytes=bucket_bytes), cluster


def _backward(module: nn.Module, steps: int = 1, dtype: torch.dtype = torch.float32) -> None:
    for images, labels in batches(dist.get_rank(), steps, dtype):
        nn.functional.cross_entropy(module(images), labels).backward()


def summed(dtype: str, values: list[float], bucket_bytes: int = 2**20) -> dict[str, Any] | None:
    """Gradients when rank ``r`` has ``values[r]`` everywhere, and the same by the backend."""
    group = subgroup(len(values))
    if group is None:
        return None
    kind = getattr(torch, dtype)
    module = nn.Sequential(nn.Linear(300, 333), nn.Linear(333, 7)).to(kind)
    plan, cluster = _plan(module, len(values), bucket_bytes)
    own = values[dist.get_rank(group)]
    with engine(module, plan, cluster, group) as running:
        sum((parameter * own).sum() for parameter in module.parameters()).backward()
        found = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        messages = len(running.schedule.messages)
    everywhere = [torch.zeros_like(found, dtype=torch.float64) for _ in values]
    dist.all_gather(everywhere, found.double(), group=group)
    equal = all(torch.equal(other.nan_to_num(-1.0), everywhere[0].nan_to_num(-1.0)) for other in everywhere)
    return {"unique": found.double().unique().tolist(), "equal": equal, "messages": messages}


def side_by_side(engines: int) -> list[float]:
    """How far several models, trained in turn by engines that live side by side, end from one trained alone."""
    torch.manual_seed(0)
    modules = [Net().double() for _ in range(engines + 1)]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    size, rank = dist.get_world_size(), dist.get_rank()
    plan, cluster = _plan(modules[0], size, 1000)
    with engine(modules[0], plan, cluster, None):
        train(modules[0], modules[0], rank, 3, torch.float64)
    schedule = compile_plan(plan, describe(modules[0]), cluster)
    running = [Engine(variable_names(module), schedule, timeout=20.0) for module in modules[1:]]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in modules[1:]]
    for images, labels in batches(rank, 3, torch.float64):
        for module, optimizer in zip(modules[1:], optimizers, strict=True):
            nn.functional.cross_entropy(module(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one in running:
        one.close()
    return [distance(module, modules[0]) for module in modules[1:]]


def rebuilt(trials: int) -> tuple[list[bool], int]:
    """Whether gradients outlive their engine, engine after engine; and by how many descriptors the process grew.

    Counted over the second half: the backend opens its own connections when they are first used. Its threads may close
    one a moment later than the call that ends it returns.
    """
    module = Net()
    kept, descriptors = [], 0
    for trial in range(trials):
        plan, cluster = _plan(module, dist.get_world_size())
        with engine(module, plan, cluster, None):
            _backward(module)
        kept.append(all(bool(torch.isfinite(parameter.grad).all()) for parameter in module.parameters()))
        module.zero_grad()
        gc.collect()  # an engine and its hooks refer to each other
        if trial <= trials // 2:
            descriptors = _descriptors()
    deadline = time.monotonic() + 10
    while _descriptors() > descriptors and time.monotonic() < deadline:
        time.sleep(0.05)
    return kept, max(0, _descriptors() - descriptors)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def many_messages(engine_steps: int) -> int:
    """Steps of a model with more messages than a socket holds records unread."""
    module = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(1000)])
    plan, cluster = _plan(module, dist.get_world_size(), 1)
    done = 0
    with engine(module, plan, cluster, None) as running:
        assert len(running.schedule.messages) == 1000
        for _ in range(engine_steps):
            sum(parameter.sum() for parameter in module).backward()
            done += all(parameter.grad.tolist() == [1.0, 1.0] for parameter in module)
            module.zero_grad()
    return done


def traces() -> list[str]:
    """What of a running engine has a name outside of its process: files, and sockets that listen."""
    module = Net()
    plan, cluster = _plan(module, dist.get_world_size())
    with engine(module, plan, cluster, None):
        _backward(module)
        mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        files = [name for name in mapped if name.startswith("/dev/shm/")]
        accepting = 0x10000  # __SO_ACCEPTCON
        sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        own = _own_sockets()  # other jobs may run on this machine
        listening = [parts[7:] for parts in sockets if int(parts[3], 16) & accepting and parts[6] in own]
        found = files + [name for names in listening for name in names if name.startswith("@autosync")]
        dist.barrier()
    return found


def _own_sockets() -> set[str]:
    """Inodes of the sockets that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the directory itself
            found.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return found


@contextmanager
def _little_room(rank: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def _alone() -> Iterator[None]:
    def refuse(*arguments: Any) -> Any:
        for connection in connect_pairs(*arguments).values():
            connection.close()
        raise ExchangeError("the network is down")

    with mock.patch("lightning_autosync.engine.exchanges.shared_memory.connect_pairs", refuse):
        yield


def refused(how: str, rank: int) -> str:
    """The error when ``rank`` has no connection, may make no large files, is elsewhere, or finds the memory full; and
    then a good end."""
    module = Net()
    plan, cluster = _plan(module, dist.get_world_size())
    schedule = compile_plan(plan, describe(module), cluster)
    here = dist.get_rank() == rank
    # The trial finds room, and what is asked for then does not.
    full = mock.patch("os.posix_fallocate", side_effect=[None, OSError(errno.ENOSPC, "No space left on device")])
    elsewhere = mock.patch("lightning_autosync.engine.exchanges.shared_memory._machine", return_value=["another"])
    context = {"limit": _little_room(rank), "full": full, "elsewhere": elsewhere, "alone": _alone()}[how]
    error = "no error"
    if here or how == "limit":
        with context:
            error = _start(module, schedule)
    else:
        error = _start(module, schedule)
    assert _start(module, schedule) == "no error"
    return error


def _start(module: nn.Module, schedule: Any) -> str:
    try:
        Engine(variable_names(module), schedule, timeout=10.0).close()
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fault(size: int, cramped: int) -> list[str]:
    """Why ranks cannot share memory: without a reason, and with a small limit on one rank."""
    free = sharing_fault(size)
    with _little_room(cramped):
        return [free, sharing_fault(size)]

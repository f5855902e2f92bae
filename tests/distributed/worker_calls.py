"""What the tests of the workers let their ranks do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.errors import DocumentError


def echo(**arguments: Any) -> dict[str, Any]:
    return {"rank": dist.get_rank(), **arguments}


def tell(report: Callable[[int, int, str], None], fails: bool = False) -> str:
    rank = dist.get_rank()
    for done in range(3):
        report(done, 3, f"rank {rank}")
    if fails:
        raise ValueError("no luck")
    return "fine"


def interrupt_yourself() -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return "fine"


def sum_of_ranks(elements: int = 1) -> float:
    tensor = torch.full((elements,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor.mean().item()


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        print("about to fail")
        raise ValueError(f"no luck on {rank}")
    return "fine"


def refuse(by_rank: bool) -> None:
    raise DocumentError(f"model.data: missing{f' on rank {dist.get_rank()}' if by_rank else ''}")


def fail_before_all_reduce(rank: int) -> float:
    fail_on(rank)
    return sum_of_ranks()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sys.exit(3)


def die_during_all_reduce(rank: int) -> float:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return sum_of_ranks()


def sleep_on(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


def shout(lines: int) -> None:
    for line in range(lines):
        print(f"line {line}")
    raise RuntimeError("enough")


def unspeakable() -> object:
    return object()


def settings() -> dict[str, Any]:
    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
    tasks = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []
    policies = [os.sched_getscheduler(int(task)) for task in tasks]
    return {
        "threads": torch.get_num_threads(),
        "colour": os.environ.get("COLOUR"),
        "policy": policy,
        "policies": policies,
        "port": os.environ["MASTER_PORT"],
    }


def start_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def send_in_pairs(pairs: list[list[int]], amount: int) -> float:
    """Seconds until this rank's sending or receiving of ``amount`` bytes is done."""
    tensor = torch.zeros(amount // 4)
    rank = dist.get_rank()
    for source, target in pairs:  # the first message of a pair opens its connection
        if rank in (source, target):
            dist.send(tensor[:1], target) if rank == source else dist.recv(tensor[:1], source)
    dist.barrier()
    start = time.perf_counter()
    for source, target in pairs:
        if rank in (source, target):
            dist.send(tensor, target) if rank == source else dist.recv(tensor, source)
    return time.perf_counter() - start


def round_trip() -> float:
    """Least seconds in which a number goes from rank 0 to rank 1 and back."""
    tensor, other, trips = torch.zeros(1), 1 - dist.get_rank(), []
    dist.barrier()
    for _ in range(3):
        start = time.perf_counter()
        for sender in (0, 1):
            dist.send(tensor, other) if dist.get_rank() == sender else dist.recv(tensor, other)
        trips.append(time.perf_counter() - start)
    return min(trips)


def place() -> dict[str, str]:
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
        congestion_control = file.read().strip()
    return {
        "LOCAL_RANK": os.environ["LOCAL_RANK"],
        "GROUP_RANK": os.environ["GROUP_RANK"],
        "namespace": os.readlink("/proc/self/ns/net"),
        "congestion_control": congestion_control,
    }

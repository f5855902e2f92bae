"""Costs of a job's hosts in little time: every rank calls `host_constants`, and all get the same answer."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.cpu_scheduling import one_thread
from lightning_autosync.measure.conditions import machine, usable_cores, windows_restart
from lightning_autosync.replay.constants import CodecRates, Constants, DecodeRates

REFERENCE = 290e-6
"""Core-seconds of `_small_work` on the server on which `COSTS` were measured, at the same time."""
COSTS = {
    "message_cost": 90e-6,
    "message_delay": 5e-6,
    "pair_cost": 120e-6,
    "collective_cost": 72e-6,
    "frame_cost": 13e-6,
    "wake_up": 18e-6,
    "exchange_cost": 35e-6,
    "gradient_cost": 46e-6,
    "pass_cost": 0.8e-3,
    "finish_cost": 14e-6,
    "unpack_cost": 4.5e-6,
    "step_cost": 72e-6,
    "due_cost": 11e-6,
    "host_cost": 0.8e-9,
}
"""Costs and delays of `Constants` there: medians of probes among four and eight ranks on two cores, under the system's
scheduling policy (see `tests/benchmarks/host_costs.py`)."""
_CODING = 0.38
"""Rates of compression there, relative to the defaults."""
_ROUNDS = 40
_PAUSE = 1e-3
"""Seconds between two rounds. After a pause the caches of a core hold other data, as between the layers of a model."""
_ELEMENTS = 1 << 22
"""Elements of a buffer that is larger than caches."""
_COPIES = 3
_FRAME = 256


def host_constants() -> Constants:
    """The costs of the default process group's hosts; collective.

    Ranks measure at the same time, since ranks that share cores slow each other down. Only local work is measured:
    small operations, autograd, local sockets and memory. The costs of communication are those of a known server, scaled
    by the time of small work. That is less accurate than ``autosync probe``, but it uses no link, and takes as long for
    many ranks as for few. The slowest machine counts, with the mean of its ranks. If a rank cannot measure, all ranks
    take the default costs.

    Ranks share cores only if all are on one machine. Otherwise each is taken to have its own.
    """
    dist.barrier()
    found = gather_json([machine()[0], _cores(), _measured(), windows_restart()])
    system = {
        "cores": _shared([(place, cores) for place, cores, _, _ in found]),
        "restarts": any(each[3] for each in found),
    }
    if not all(measured is not None and min(measured) > 0 for _, _, measured, _ in found):
        return Constants(**system)
    by_machine = defaultdict[str, list[Sequence[float]]](list)
    for place, _, measured, _ in found:
        by_machine[place].append(measured)
    means = [[statistics.mean(values) for values in zip(*ranks, strict=True)] for ranks in by_machine.values()]
    work, copy, add = zip(*means, strict=True)
    return _scaled(max(work) / REFERENCE, min(copy), min(add), system)


def shared_cores() -> int | None:
    """Number of cores that the ranks of the default process group share; collective.

    It is None unless all ranks are on one machine, and for a single rank.
    """
    return _shared(gather_json([machine()[0], _cores()]))


def host_costs() -> dict[str, Any]:
    """What `host_constants` returns, as plain data; collective."""
    return host_constants().to_dict()


def _scaled(factor: float, copy: float, add: float, system: Mapping[str, Any]) -> Constants:
    """Constants of a host that takes ``factor`` times as long for small work as the known server."""
    usual = Constants()
    rate = _CODING / factor
    coders: dict[str, Any] = {
        name: kind(**{codec: rate * value for codec, value in getattr(usual, name)})
        for name, kind in (("encode", CodecRates), ("decode", DecodeRates))
    }
    return Constants(
        **{name: factor * cost for name, cost in COSTS.items()},
        **coders,
        merge_cost=factor * usual.merge_cost,
        scan_rate=usual.scan_rate / factor,
        copy_rate=copy,
        reduce_rate=add,
        **system,
    )


def _shared(found: Sequence[tuple[str, Sequence[int]]]) -> int | None:
    """Number of cores that all ranks share, from the machine and the cores of each rank; None if they share none."""
    if len(found) == 1 or len({place for place, _ in found}) > 1:
        return None
    return len({core for _, cores in found for core in cores})


def _cores() -> list[int]:
    """The cores on which this rank may run."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cores()))


def _measured() -> list[float] | None:
    """Core-seconds of small work, and bytes/s of copying and of adding; None if this rank cannot measure them."""
    try:
        with one_thread(), torch.enable_grad():  # whose time is measured
            return [_small_work(), *_memory_rates()]
    except (OSError, RuntimeError, MemoryError, ArithmeticError):
        return None


def _small_work() -> float:
    """Core-seconds of this thread for a small forward and backward pass and a few frames; median of the rounds."""
    parameters = [torch.nn.Parameter(torch.zeros(16, device="cpu", dtype=torch.float32)) for _ in range(3)]
    arrived: list[torch.Tensor | None] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda each: arrived.append(each.grad))
    payload, target = bytes(_FRAME), bytearray(_FRAME)
    with ExitStack() as opened:
        one, other = (opened.enter_context(each) for each in socket.socketpair())

        def work() -> None:
            torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
            for parameter in parameters:
                parameter.grad = None
                one.sendall(payload)
                other.recv_into(target)
            arrived.clear()

        times = []
        for _ in range(_ROUNDS):
            times.append(core_seconds(work))
            time.sleep(_PAUSE)
    return statistics.median(times)


def _memory_rates() -> tuple[float, float]:
    """Bytes/s at which one core copies, and at which it adds to a buffer."""
    one, other = (torch.ones(_ELEMENTS, device="cpu", dtype=torch.float32) for _ in range(2))
    size = one.numel() * one.itemsize

    def rate(action: Callable[[], object]) -> float:
        return size / statistics.median(core_seconds(action) for _ in range(_COPIES))

    return rate(lambda: one.copy_(other)), rate(lambda: one.add_(other))


def core_seconds(action: Callable[[], object]) -> float:
    """Core-seconds of this thread for an action."""
    start = time.thread_time()
    action()
    return time.thread_time() - start

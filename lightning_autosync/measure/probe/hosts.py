"""Costs of a job's hosts in a tenth of a second: every rank calls `host_constants`, and all get the same answer."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.measure.conditions import boot_id, usable_cores
from lightning_autosync.replay.constants import Constants

REFERENCE = 290e-6
"""Core-seconds of `_small_work` on a server where `COSTS` were measured in the same hour, by `measure_costs`."""
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
    "host_cost": 0.8e-9,
}
"""Costs of `Constants` there: medians over four and eight ranks on two cores, under the system's scheduling policy."""
_ROUNDS = 40
_PAUSE = 1e-3
"""Seconds between two rounds. After a pause, the caches of a core hold what other ranks use, as in training."""
_ELEMENTS = 1 << 22
"""Elements of a buffer that is larger than caches."""
_COPIES = 3
_FRAME = 256


def host_constants() -> Constants:
    """The costs of the default process group's hosts; collective.

    Ranks measure at the same time, since a core does less in a second of its own time while its neighbours are busy.
    Only local work is measured: small operations, autograd, loopback sockets and memory. The costs of communication are
    those of a known server, scaled by the speed at which this one does small work. That is less accurate than
    ``autosync probe``, but takes no time on the links, and as long for many ranks as for few. Costs of touched rows and
    of compression are the defaults.
    """
    own = [boot_id() or socket.gethostname(), _small_work(), *_memory_rates()]
    machines, work, copy, add = zip(*gather_json(own), strict=True)
    factor = statistics.mean(work) / REFERENCE
    shared = len(set(machines)) == 1 and dist.get_world_size() > 1
    return Constants(
        **{name: factor * cost for name, cost in COSTS.items()},
        copy_rate=statistics.mean(copy),
        reduce_rate=statistics.mean(add),
        cores=usable_cores() if shared else None,
    )


def _small_work() -> float:
    """Core-seconds of this thread for a small forward and backward pass and a few frames; median of the rounds."""
    parameters = [torch.nn.Parameter(torch.zeros(16)) for _ in range(3)]
    arrived: list[torch.Tensor] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda each: arrived.append(each.grad))
    payload, target = bytes(_FRAME), bytearray(_FRAME)
    with ExitStack() as open_sockets:
        one, other = (open_sockets.enter_context(each) for each in socket.socketpair())

        def work() -> None:
            with torch.enable_grad():
                torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
            for parameter in parameters:
                parameter.grad = None
                one.sendall(payload)
                other.recv_into(target)
            arrived.clear()

        times = []
        for _ in range(_ROUNDS):
            times.append(_core_seconds(work))
            time.sleep(_PAUSE)
    return statistics.median(times)


def _memory_rates() -> tuple[float, float]:
    """Bytes/s at which one core copies, and at which it adds to a buffer."""
    one, other = torch.ones(_ELEMENTS), torch.ones(_ELEMENTS)
    size = one.numel() * one.itemsize

    def rate(action: Callable[[], object]) -> float:
        return size / statistics.median(_core_seconds(action) for _ in range(_COPIES))

    return rate(lambda: one.copy_(other)), rate(lambda: one.add_(other))


def _core_seconds(action: Callable[[], object]) -> float:
    start = time.thread_time()
    action()
    return time.thread_time() - start

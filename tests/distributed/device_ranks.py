"""Ranks that share one device, for tests of paths for accelerators; without a device, the same ranks on the CPU.

NCCL refuses several ranks on one GPU, unless each looks like a node of its own; they then talk over sockets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist

from lightning_autosync.measure.launches.launch import LocalLaunch
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.measure.workers.calls import find_function, function_name

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WORLDS = [
    pytest.param(("cpu", "gloo"), marks=pytest.mark.slow, id="cpu"),
    pytest.param(("cuda", "gloo"), marks=needs_gpu, id="cuda-gloo"),
    pytest.param(("cuda", "nccl"), marks=needs_gpu, id="cuda-nccl"),
]
"""Devices of ranks, and the backends of their default process groups."""
TIMEOUT = 90.0
TESTS = Path(__file__).parent.parent


class OneDevice(LocalLaunch):
    """Each rank is a node of its own with one device, which is the same for all."""

    def environment(self, rank: int) -> dict[str, str]:
        own = {"LOCAL_RANK": "0", "GROUP_RANK": str(rank), "NCCL_HOSTID": f"place-{rank}"}
        # Few channels, because the kernels of all ranks must find room on the device at once.
        nccl = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_MAX_NCHANNELS": "2"}
        return {**super().environment(rank), **own, **nccl}

    def environments(self, size: int, port: int) -> list[dict[str, str]]:
        """The environments of ranks that are started without a pool."""
        paths = os.pathsep.join(map(str, [TESTS, TESTS / "distributed", TESTS.parent]))
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": self.address, "MASTER_PORT": str(port), "PYTHONPATH": paths}
        return [{**os.environ, **common, "RANK": str(rank), **self.environment(rank)} for rank in range(size)]


class DeviceRanks:
    """A pool of ranks on one device that starts at its first order, and again after a test that broke it.

    Args:
        size: number of ranks.
        device: ``cpu`` or ``cuda``.
        backend: of the default process group.
    """

    def __init__(self, size: int, device: str, backend: str) -> None:
        self.size, self.device, self.backend = size, device, backend
        self._pool: WorkerPool | None = None

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """The results of ``function(device, **arguments)`` on all ranks."""
        order = {"function": function_name(function), "device": self.device, "backend": self.backend}
        return self._live().run(called, **order, arguments=arguments)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _live(self) -> WorkerPool:
        if self._pool is None or self._pool.closed:
            if self.device != "cpu":
                forked.start_workers()  # forks of a process that has asked for devices cannot use them
            try:
                self._pool = WorkerPool(
                    self.size,
                    OneDevice(),
                    timeout=TIMEOUT,
                    extra_paths=[TESTS, TESTS / "distributed"],
                    process_group=False,
                )
            finally:
                forked.fork_workers()
        return self._pool


def called(function: str, device: str, backend: str, arguments: dict[str, Any]) -> Any:
    """What a function returns on this rank, in a default process group of this backend."""
    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": os.environ["RANK"]}
    if not dist.is_initialized():
        bound = None
        if backend == "nccl":  # bound as by Lightning, so that NCCL connects the ranks at once
            bound = torch.device("cuda", 0)
            torch.cuda.set_device(bound)
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT - 30), device_id=bound)
    return find_function(function)(device, **arguments)

"""Compares group averages of partial reduces with those of cached gloo process groups.

    python -m tests.benchmarks.group_averages [RATE]

Measures both in turns between processes on this machine, over the loopback interface, and prints a table. With a rate,
such as ``1Gbit/s``, each process is behind an emulated link (needs root).
The speedup is gloo's time divided by the mesh's, since DDP averages no groups.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.secret import common_secret
from lightning_autosync.errors import ExchangeError
from lightning_autosync.measure.figures import numbers_table
from lightning_autosync.measure.interleaving import alternating_rounds
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.relaxed.group_average import GroupAverage
from lightning_autosync.relaxed.transport.mesh import Mesh

RANKS = 4
SIZES = (2, 4)
MEGABYTES = (1.0, 25.0)
ROUNDS = 25
WARM_UP = 3
"""Rounds that are not counted, since they open connections and create groups."""
_TIMEOUT = timedelta(seconds=60)


def main(rate: str | None = None) -> None:
    """Measure and print; ``rate`` is the rate of emulated links, None means loopback."""
    cluster = ClusterSpec.uniform(RANKS, bandwidth=rate)
    where = LaunchSettings(kind="local" if rate is None else "emulated")
    with where.open(cluster) as launch, WorkerPool(RANKS, launch) as pool:
        rows = [
            (size, megabytes, compare(pool, size, megabytes, ROUNDS, f"groups-{size}-{megabytes:g}"))
            for size in SIZES
            for megabytes in MEGABYTES
        ]
    links = "loopback" if rate is None else f"emulated links of {rate}"
    Console(width=100).print(groups_table(f"average of a group, {RANKS} processes on {links}", rows))


def groups_table(title: str, rows: Sequence[tuple[int, float, list[tuple[float, float]]]]) -> Table:
    """A row for each size of groups (members) and of the model (MB), with the seconds of both ways in each round."""
    headings = ("members", "MB", "mesh, ms", "cached gloo, ms", "speedup over gloo", "quartiles")
    table = numbers_table(f"{title}, {ROUNDS} rounds in turns", (), headings)
    for size, megabytes, rounds in rows:
        low, middle, high = statistics.quantiles((gloo / mesh for mesh, gloo in rounds), n=4)
        mesh, gloo = (statistics.median(way) for way in zip(*rounds, strict=True))
        cells = (f"{1e3 * mesh:.2f}", f"{1e3 * gloo:.2f}", f"{middle:.2f}x", f"{low:.2f} .. {high:.2f}")
        table.add_row(str(size), f"{megabytes:g}", *cells)
    return table


def compare(pool: WorkerPool, size: int, megabytes: float, rounds: int, key: str) -> list[tuple[float, float]]:
    """For each round, the seconds of the slowest member for the mesh's average and for gloo's."""
    found = pool.run(measure, size=size, megabytes=megabytes, rounds=rounds, key=key)
    return [
        (max(rank[number][0] for rank in found), max(rank[number][1] for rank in found)) for number in range(rounds)
    ]


def measure(size: int, megabytes: float, rounds: int, key: str) -> list[list[float]]:
    """In a worker: for each round, this rank's seconds in the mesh's and in gloo's average; 0 if it is no member.

    Args:
        size: number of members of a group; each round has another group.
        megabytes: size of the model in MB, in single precision.
        rounds: number of counted rounds.
        key: unique key in the life of the process group.

    Raises:
        ExchangeError: the two averages differ.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(key, dist.distributed_c10d._get_default_store())
    mesh = Mesh.open(store, rank, ranks, secret=common_secret())
    ways: list[Any] = [_MeshWay(mesh), _GlooWay(store, rank)]
    model = torch.randn(int(megabytes * 1e6 / 4), generator=torch.Generator().manual_seed(rank))
    found = []
    for number, turns in zip(range(WARM_UP + rounds), alternating_rounds(lambda: (0, 1)), strict=False):
        # Neighbouring ranks in turn, since the groups of partial reduces change all the time.
        members = sorted((number + place) % ranks for place in range(size))
        results: list[Tensor] = []  # of both ways, or empty if this rank is no member
        seconds = [0.0, 0.0]
        for way in turns:
            dist.barrier()
            if rank in members:
                begin = time.perf_counter()
                average = ways[way].average(number + 1, members, model)
                seconds[way] = time.perf_counter() - begin
                results.append(average.clone())
        if results and not torch.allclose(results[0], results[1], atol=1e-5):
            raise ExchangeError(f"members {members}: the averages of mesh and gloo differ")
        found.append(seconds)
    dist.barrier()
    ways[0].close()
    mesh.close()
    return found[WARM_UP:]


class _MeshWay:
    def __init__(self, mesh: Mesh) -> None:
        self._average = GroupAverage(mesh, _TIMEOUT.total_seconds())
        self.close = self._average.close

    def average(self, generation: int, members: Sequence[int], model: Tensor) -> Tensor:
        return self._average.run(generation, members, [1 / len(members)] * len(members), model)


class _GlooWay:
    """A process group for each set of members, created on first use."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        @cache
        def group_of(members: tuple[int, ...]) -> Any:
            own = dist.PrefixStore(f"group-{'-'.join(map(str, members))}", store)
            return dist.ProcessGroupGloo(own, members.index(rank), len(members), _TIMEOUT)

        self._group_of = group_of
        self._scratch = torch.empty(0)

    def average(self, generation: int, members: Sequence[int], model: Tensor) -> Tensor:
        if self._scratch.shape != model.shape:
            self._scratch = torch.empty_like(model)
        torch.mul(model, 1 / len(members), out=self._scratch)
        self._group_of(tuple(members)).allreduce([self._scratch]).wait()
        return self._scratch


if __name__ == "__main__":
    # Workers import functions of this module by name, which `__main__` is not. So run the imported module.
    from tests.benchmarks import group_averages

    group_averages.main(*sys.argv[1:2])

"""Shares of the bound that the default reaches on emulated links; needs root and an idle machine, takes 8 minutes.

    python -m tests.benchmarks.bound_shares [MIB ...] [CLUSTER ...]

Without arguments, messages of 8 and of 32 MiB on seven clusters, which `clusters` names. A step is one synchronization
of one vector, without computation. All sizes of a cluster take turns in the same live processes. The table has, for
each: the bound; the median of the rounds' step times; the bound divided by it, with the range over rounds; the share
that the replay predicts; the cores that other processes kept busy; and the plan that the default takes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.measure.bench.preparation import Preparation, prepare
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.hosts import emulated_hosts, least_step
from lightning_autosync.measure.interleaving import alternating_rounds
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.session import Contender, MeasurementSession
from lightning_autosync.measure.step_time import step_time
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.replay import Replay

SIZES = (8.0, 32.0)
WARM_UP, ROUNDS, STEPS = 2, 5, 2
DEFAULT = {"builder": "lightning_autosync.strategy.choice:choose_plan", "known": True}
MBIT = 1e6 / 8


def uneven_racks() -> ClusterSpec:
    """Three racks of two nodes, whose uplinks have different rates."""
    uplinks = {"rack0": 400 * MBIT, "rack1": 200 * MBIT, "rack2": 100 * MBIT}
    links = [{"a": rack, "b": "core", "bandwidth": rate, "latency": 50e-6} for rack, rate in uplinks.items()]
    for node in range(6):
        links.append({"a": f"node{node}", "b": f"rack{node // 2}", "bandwidth": 400 * MBIT, "latency": 50e-6})
    return document("three_racks", [f"node{node}" for node in range(6)], ["core", *uplinks], links)


def chain_of_four() -> ClusterSpec:
    """Four nodes in a row, with a slow link in the middle."""
    nodes = [f"node{node}" for node in range(4)]
    rates = [400 * MBIT, 200 * MBIT, 400 * MBIT]
    ends = zip(nodes, nodes[1:], rates, strict=False)
    return document(
        "chain_of_four", nodes, [], [{"a": a, "b": b, "bandwidth": r, "latency": 50e-6} for a, b, r in ends]
    )


def document(name: str, nodes: list[str], switches: list[str], links: list[dict[str, Any]]) -> ClusterSpec:
    made = {"name": name, "nodes": [{"name": node} for node in nodes], "switches": switches, "links": links}
    return ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, **made})


def clusters() -> Iterator[tuple[str, ClusterSpec, str]]:
    """Name, cluster and order of ranks."""
    yield "fat_star_8", resolve_cluster("fat_node_star_8"), "natural"
    yield "two_racks", resolve_cluster("two_racks_2to1"), "natural"
    yield "two_racks_interleaved", resolve_cluster("two_racks_2to1"), "interleaved"
    yield "ring_of_four", resolve_cluster("ring_of_four"), "natural"
    yield "chain_of_four", chain_of_four(), "natural"
    yield "three_racks", uneven_racks(), "natural"
    rates = [400 * MBIT, 200 * MBIT, 200 * MBIT, 100 * MBIT, 100 * MBIT]
    yield "star_of_five", ClusterSpec.star(rates, latency=50e-6, name="star_of_five"), "natural"


NAMES = [name for name, _, _ in clusters()]


@dataclass
class Measured:
    """The default on one cluster for one size of message.

    Attributes:
        bound: seconds of the least step.
        predicted: seconds of a step by the replay with its default constants for this machine's cores.
        reason: the default's reason for its plan.
        times, foreign: by round, seconds of a step and cores that other processes kept busy.
    """

    contender: Contender
    bound: float
    predicted: float
    reason: str
    times: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)

    @staticmethod
    def of(preparation: Preparation, mib: float) -> Measured:
        order, cluster = preparation.orders["autosync"], preparation.cluster
        plan = SyncPlan.from_dict(order["plan"])
        schedule = compile_plan(plan, preparation.workload, cluster)
        return Measured(
            Contender(f"{mib:g} MiB", order),
            least_step(preparation.workload, cluster).seconds,
            Replay(preparation.workload, cluster, emulated_hosts()).predict(schedule).step_time,
            preparation.reasons["autosync"].partition(",")[0],
        )


def prepared(cluster: ClusterSpec, order: str, mib: float) -> Preparation:
    return prepare(
        BenchSettings.parse(
            {
                "cluster": cluster.to_dict(),
                "rank_order": order,
                "launch": {"kind": "emulated"},
                "model": {"kind": "flat", "mib": mib},
                "contenders": {"autosync": DEFAULT},
            }
        )
    )


def measure(cluster: ClusterSpec, order: str, sizes: Sequence[float]) -> list[Measured]:
    """Measure all sizes in turns."""
    preparations = [prepared(cluster, order, mib) for mib in sizes]
    found = [Measured.of(one, mib) for one, mib in zip(preparations, sizes, strict=True)]
    with MeasurementSession(preparations[0].cluster, LaunchSettings(kind="emulated"), timeout=120.0) as session:
        for one in found:
            session.measure(one.contender, WARM_UP)
        for turns in islice(alternating_rounds(lambda: found), ROUNDS):
            for one in turns:
                load = session.watch_load()
                one.times.append(step_time(session.measure(one.contender, STEPS)))
                one.foreign.append(load.foreign_cores() or 0.0)
    return found


def main(*arguments: str) -> None:
    sizes = [float(each) for each in arguments if each not in NAMES] or SIZES
    chosen = [each for each in arguments if each in NAMES] or NAMES
    headings = ("cluster", "ranks", "MiB", "bound ms", "median ms", "of bound", "range", "predicted", "busy cores")
    table = Table(*headings, "default", title=f"{ROUNDS} rounds of {STEPS} steps, after {WARM_UP}")
    for name, cluster, order in clusters():
        if name not in chosen:
            continue
        for mib, one in zip(sizes, measure(cluster, order, sizes), strict=True):
            shares = [one.bound / seconds for seconds in one.times]
            row = [name, str(cluster.world_size), f"{mib:g}", f"{1e3 * one.bound:.1f}"]
            row += [f"{1e3 * statistics.median(one.times):.1f}", f"{statistics.median(shares):.1%}"]
            row += [f"{min(shares):.1%} .. {max(shares):.1%}", f"{one.bound / one.predicted:.1%}"]
            row += [f"{statistics.mean(one.foreign):.2f}", one.reason]
            print(" | ".join(row), flush=True)
            table.add_row(*row)
    Console(width=170).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])

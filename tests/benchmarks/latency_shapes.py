"""Exchanges between pairs against all other exact plans, by the replay: for small messages among equal ranks.

    python -m tests.benchmarks.latency_shapes [RANKS ...]

One message among ranks on one switch, each with a core of its own and the default constants; nothing is measured. The
table has the milliseconds of a step by the fastest other builder or topology, by recursive doubling, and by halving and
doubling, and how many times the fastest other takes as long as the faster of these two. Takes a minute of a core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import SyncPlan, builders, compile_plan, topologies
from lightning_autosync.replay import Replay
from lightning_autosync.workload import Variable, Workload

RANKS = (4, 5, 8, 16, 32, 64)
KIBIBYTES = (1, 8, 32, 128, 1024)
LINKS = (("1 Gbit/s", 50), ("10 Gbit/s", 10), ("1 Gbit/s", 5000))
"""Rates, and the microseconds from one rank to another."""
PAIRS = ("recursive_doubling", "halving_doubling")


def plans(workload: Workload, cluster: ClusterSpec) -> Iterator[tuple[str, SyncPlan]]:
    """The plans of all topologies and builders that can be used, with their names."""
    for builder, arguments in [
        *((name, {}) for name in builders.names()),
        *(("all_reduce", {"topology": name}) for name in topologies.names()),
    ]:
        try:
            plan = builders.build(builder, workload, cluster, **arguments)
            compile_plan(plan, workload, cluster)
        except PlanError:  # it needs one node, or rows
            continue
        if plan.semantics == "exact":
            yield arguments.get("topology", builder), plan


def main(ranks: tuple[int, ...]) -> None:
    table = Table("link", "one way", "ranks", "KiB", "fastest other", "ms", *PAIRS, "ratio")
    for rate, hop in LINKS:
        for nodes in ranks:
            cluster = ClusterSpec.uniform(nodes, bandwidth=rate, latency=f"{hop / 2} us")
            for size in KIBIBYTES:
                workload = Workload(name="one", variables=(Variable(name="weight", shape=(256 * size,)),))
                replay = Replay(workload, cluster)
                found = {
                    name: 1e3 * replay.predict(compile_plan(plan, workload, cluster)).step_time
                    for name, plan in plans(workload, cluster)
                }
                pairs = [found.pop(name) for name in PAIRS]
                best = min(found, key=lambda name: found[name])
                cells = [f"{nodes}", f"{size:,}", best, *(f"{one:.3f}" for one in (found[best], *pairs))]
                table.add_row(rate, f"{hop} us", *cells, f"{found[best] / min(pairs):.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or RANKS)

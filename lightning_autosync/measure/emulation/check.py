"""Measure the emulated links of a cluster.

``python -m lightning_autosync.measure.emulation.check cluster=NAME cluster_scale=0.5``
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings

from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster.files import resolve_cluster
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import AutoSyncError, DocumentError
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.emulation.link_check import LinkCheck, check_links
from lightning_autosync.measure.launches.local import Launch

ALLOWED_DEVIATION = 0.1
MEGABIT = 1e6 / 8


def links_table(cluster: ClusterSpec, checks: list[LinkCheck]) -> Table:
    """A table of the rates in Mbit/s; links off by more than ``ALLOWED_DEVIATION`` stand out."""
    table = Table(title=f"{cluster.name}: emulated links", caption="Mbit/s on the wire, framing included")
    for heading in ("from", "to"):
        table.add_column(heading)
    for heading in ("setting", "measured", "deviation"):
        table.add_column(heading, justify="right")
    for check in checks:
        style = "bold red" if abs(check.deviation) > ALLOWED_DEVIATION else None
        rates = (
            f"{check.setting / MEGABIT:.1f}",
            f"{check.measured / MEGABIT:.1f}",
            f"{check.deviation:+.1%}",
        )
        table.add_row(check.source, check.target, *rates, style=style)
    return table


def measured_links(launch: Launch) -> list[LinkCheck]:
    """What each emulated link carries, half a second and more for each; none where links are not emulated.

    Warns if some are off: it takes a busy or slow machine.

    Raises:
        LaunchError: nothing passes a link.
    """
    if not isinstance(launch, EmulatedLaunch):
        return []
    checks = check_links(launch)
    off = [check for check in checks if abs(check.deviation) > ALLOWED_DEVIATION]
    if off:
        worst = max(off, key=lambda check: abs(check.deviation))
        warnings.warn(
            f"cluster '{launch.cluster.name}': {len(off)} emulated links are off by more than {ALLOWED_DEVIATION:.0%}, "
            f"the one from {worst.source} to {worst.target} by {worst.deviation:+.0%}; slow the cluster down",
            stacklevel=2,
        )
    return checks


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0 if every link is as set, 1 if one is off, 2 if the links cannot be made."""
    parser = argparse.ArgumentParser(description="Emulate a cluster on this machine and measure its links.")
    parser.add_argument("cluster", metavar="cluster=NAME", help="a shipped cluster's name, or a file's path")
    parser.add_argument(
        "scale", nargs="?", default="1", metavar="cluster_scale=FACTOR", help="on every rate of it, as for a bench"
    )
    chosen = parser.parse_args(arguments)
    try:
        cluster = resolve_cluster(chosen.cluster.removeprefix("cluster="))
        with EmulatedLaunch(cluster.scaled(_positive(chosen.scale.removeprefix("cluster_scale=")))) as launch:
            checks = check_links(launch)
    except AutoSyncError as error:
        print(error, file=sys.stderr)
        return 2
    Console().print(links_table(launch.cluster, checks))
    return int(any(abs(check.deviation) > ALLOWED_DEVIATION for check in checks))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise DocumentError(f"cluster_scale: '{text}': expected a factor above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())

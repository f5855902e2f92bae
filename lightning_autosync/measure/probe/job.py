"""The probe inside a job: every rank calls `probe_ranks` and all get the same answer."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning_autosync.engine.scheduling import set_batch_scheduling
from lightning_autosync.measure.probe.constants import fit_constants
from lightning_autosync.measure.probe.costs import measure_collectives, measure_costs
from lightning_autosync.measure.probe.links import measure_links
from lightning_autosync.measure.probe.meter import Meter

FORMAT = "autosync-probe/1"
_PRIORITY = -10
"""Of a probe's ranks, as of ``nice``: other load can only make links look slower and hosts dearer."""


def probe_ranks(
    name: str,
    scheduling: str,
    head: float,
    window: float,
    every_pair: bool | None,
    constants: bool,
    accelerated: bool,
    addresses: bool,
    timeout: float,
) -> dict[str, Any]:
    """Measure links and hosts of the default process group; collective.

    Args:
        name: of the cluster found.
        scheduling: ``batch`` puts the ranks under SCHED_BATCH once links are measured, for which ranks must wake soon.
        head, window, every_pair, constants, accelerated: as in `Settings`.
        addresses: whether the nodes' addresses belong into the cluster.
        timeout: seconds in which two ranks must reach each other.

    Returns:
        Plain data: what `measure_links` returns, ``constants`` (the document; None unless asked for) with the ``costs``
        that they come from, and the effort.
    """
    begin = time.perf_counter()
    _go_first()
    small = {"none": measure_collectives()} if constants else {}
    meter = Meter(head, window, timeout)
    answer: dict[str, Any] = {"format": FORMAT, **measure_links(meter, name, every_pair, addresses), "constants": None}
    if constants:
        if scheduling == "batch":
            set_batch_scheduling()
            small["batch"] = measure_collectives()
        costs = measure_costs([members[0] for members in meter.nodes])
        answer["costs"] = {**costs, "small_collectives": small}
        devices = [len(members) for members in meter.nodes]
        answer["constants"] = fit_constants(answer, scheduling, meter.machines, devices, accelerated).to_dict()
    return {**answer, "transfers": meter.transfers, "seconds": time.perf_counter() - begin}


def probe_hosts(leaders: Sequence[int], scheduling: str) -> dict[str, Any]:
    """What the hosts of the default process group cost, without a look at its links; collective.

    Args:
        leaders: the first rank of each node.
        scheduling: the policy that the ranks are under.

    Returns:
        What `fit_constants` takes for a probe, of links without latency.
    """
    costs = measure_costs(leaders)
    small = {scheduling: measure_collectives()}
    return {"costs": {**costs, "small_collectives": small}, "pairs": [], "sharing": None, "burst": None}


def _go_first() -> None:
    """Put other work on this machine behind the probe, where the kernel lets it."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)

"""The replay's constants fitted to micro-measurements, none of which is a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_autosync.cluster import FRAMING
from lightning_autosync.measure.probe.costs import PIECES
from lightning_autosync.replay.constants import CodecRates, Constants


def fit_constants(
    probe: Mapping[str, Any], scheduling: str, machines: int, devices: Sequence[int], accelerated: bool
) -> Constants:
    """The constants of a probe's measurements, under its scheduling policy; each comes from one measurement.

    Args:
        probe: the probe's answer.
        scheduling: which of the small messages count.
        machines: number of different machines.
        devices: ranks of each node.
        accelerated: what the job says.
    """
    costs, ranks = probe["costs"], sum(devices)
    constants = Constants(
        **_of_cores(costs, shared=machines == 1 and ranks > 1), **_of_links(probe), accelerated=accelerated
    )
    if ranks == 1:
        return constants
    latency = _latency(probe)
    return constants.model_copy(
        update={
            **_of_collectives(costs, scheduling, ranks, constants.crowd(ranks), latency),
            **_of_frames(costs, latency),
            "gradient_cost": costs["gradient_core"],
        }
    )


def _of_cores(costs: Mapping[str, Any], shared: bool) -> dict[str, Any]:
    """What a core does by itself.

    - ``copy_rate``, ``scan_rate``, ``reduce_rate``, ``encode``, ``decode``: buffers of some MiB on every rank at once.
    - ``merge_cost``: core-seconds of each of several small sets of rows merged.
    - ``cores``: those that the system lets a rank use; only where all ranks share one machine.
    - ``collectives``: threads of the backend.
    """
    return {
        "copy_rate": costs["copy_rate"],
        "scan_rate": costs["scan_rate"],
        "reduce_rate": costs["reduce_rate"],
        "encode": CodecRates(**costs["encode"]),
        "decode": CodecRates(**costs["decode"]),
        "merge_cost": costs["merge_core"],
        "cores": costs["cores"] if shared else None,
        "collectives": costs["collectives"],
    }


def _of_links(probe: Mapping[str, Any]) -> dict[str, Any]:
    """What links let through.

    - ``sharing_loss``: everybody sends to everybody; what full links are short of their rates, for each further full
      link on the way.
    - ``burst``: bytes at the beginning of a flow that came above its rate.
    """
    return {
        "framing": FRAMING,
        "sharing_loss": _sharing_loss(probe["sharing"]),
        "burst": max(0.0, probe["burst"] or 0.0),
    }


def _latency(probe: Mapping[str, Any]) -> float:
    """Seconds of the longest way: half of a round trip, less what threads need to wake."""
    trips = [pair["round_trip"]["least"] for pair in probe["pairs"]]
    return max(0.0, max(trips) - probe["own_trip"]) / 2 if trips else 0.0


def _of_collectives(
    costs: Mapping[str, Any], scheduling: str, ranks: int, crowd: float, latency: float
) -> dict[str, float]:
    """What the backend's messages cost.

    - ``collective_cost``: core-seconds of the main thread for one more collective in a backward pass.
    - ``message_cost``: core-seconds of a small all-reduce, without its launch. Over n ranks it is 2 (n - 1) steps one
      after the other, each of them two pieces that are sent and received.
    - ``message_delay``: what a step of it takes beyond the links' latency and the cores' time, for each piece.
    - ``pair_cost``: core-seconds of an all-to-all of one number a pair, without its launch.
    """
    ring, exchange = (costs["small_collectives"][scheduling][kind] for kind in ("ring", "all_to_all"))
    launch, steps = costs["launch_core"], 2 * (ranks - 1)
    message = max(0.0, ring["core"] - launch) / (2 * PIECES * steps)
    beyond = (ring["seconds"] - crowd * launch) / steps - latency - 2 * PIECES * crowd * message
    return {
        "collective_cost": launch,
        "message_cost": message,
        "message_delay": max(0.0, beyond) / (PIECES * crowd),
        "pair_cost": max(0.0, exchange["core"] - launch) / steps,
    }


def _of_frames(costs: Mapping[str, Any], latency: float) -> dict[str, float]:
    """What the transport's frames cost.

    - ``frame_cost``: core-seconds of each of many small frames under way on a tree.
    - ``wake_up``: what a lone frame takes beyond the link's latency and the cores' time.
    - ``host_cost``: core-seconds a byte of large frames on a tree, less those of the frames and of adding up.
    """
    return {
        "frame_cost": costs["frame_core"],
        "wake_up": max(0.0, costs["lone"] - latency - 2 * costs["lone_core"]),
        "host_cost": costs["byte_core"],
    }


def _sharing_loss(sharing: Mapping[str, float] | None) -> float:
    """By stretch = 1 + loss x (full links - 1); nothing is lost where no flow crosses two."""
    if sharing is None or "everybody" not in sharing or sharing["crowding"] <= 1:
        return 0.0
    return max(0.0, (1 / sharing["everybody"] - 1) / (sharing["crowding"] - 1))

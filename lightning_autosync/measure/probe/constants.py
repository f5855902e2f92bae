"""Fits the replay's constants to micro-measurements. No plan is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_autosync.cluster import FRAMING
from lightning_autosync.measure.probe.costs import PIECES
from lightning_autosync.replay.constants import CodecRates, Constants, DecodeRates


def fit_constants(
    probe: Mapping[str, Any], scheduling: str, machines: int, devices: Sequence[int], accelerated: bool
) -> Constants:
    """Constants from a probe's measurements. Each constant comes from one measurement.

    Args:
        scheduling: the scheduling policy whose measurements of small collectives are used.
        devices: number of ranks on each node.
        accelerated: whether the job computes its gradients on an accelerator.
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
            "pass_cost": costs["pass_core"],
            "finish_cost": costs["finish_core"],
            "unpack_cost": costs["unpack_core"],
            "step_cost": costs["step_core"],
            "due_cost": costs["due_core"],
        }
    )


def _of_cores(costs: Mapping[str, Any], shared: bool) -> dict[str, Any]:
    """Constants of a core's local work, and of the system.

    - ``copy_rate``, ``scan_rate``, ``reduce_rate``, ``encode``, ``decode``: bytes/s over buffers of some MiB, measured
      on all ranks at once; those of rows with empty caches.
    - ``merge_cost``: half of the core-seconds to unpack a small set of rows, add it to another one, and pack the sum;
      a few in a row.
    - ``cores``: number of cores that a rank may use; None unless all ranks share one machine.
    - ``collectives``: number of threads of the backend.
    - ``restarts``: whether the kernel of any rank makes windows of idle connections smaller.
    """
    return {
        "copy_rate": costs["copy_rate"],
        "scan_rate": costs["scan_rate"],
        "reduce_rate": costs["reduce_rate"],
        "encode": CodecRates(**costs["encode"]),
        "decode": DecodeRates(**costs["decode"]),
        "merge_cost": costs["merge_core"],
        "cores": costs["cores"] if shared else None,
        "collectives": costs["collectives"],
        "restarts": costs["restarts"],
    }


def _of_links(probe: Mapping[str, Any]) -> dict[str, Any]:
    """Constants of the links.

    - ``sharing_loss``: loss of full links for each further full link on a flow's route, while all nodes send to all.
    - ``burst``: bytes at the beginning of a flow that arrived in excess of its rate.
    """
    return {
        "framing": FRAMING,
        "sharing_loss": _sharing_loss(probe["sharing"]),
        "burst": max(0.0, probe["burst"] or 0.0),
    }


def _latency(probe: Mapping[str, Any]) -> float:
    """One-way seconds between the most distant nodes: half a round trip, without the wake-up time of threads."""
    trips = [pair["round_trip"]["least"] for pair in probe["pairs"]]
    return max(0.0, max(trips) - probe["own_trip"]) / 2 if trips else 0.0


def _of_collectives(
    costs: Mapping[str, Any], scheduling: str, ranks: int, crowd: float, latency: float
) -> dict[str, float]:
    """Costs of the backend's collectives.

    - ``collective_cost``: core-seconds of the main thread for one more collective in a backward pass.
    - ``message_cost``: core-seconds for sending or receiving one piece of a small ring all-reduce, without the launch.
      Over n ranks the ring takes 2 (n - 1) consecutive steps. Each step sends and receives `PIECES` pieces.
    - ``message_delay``: seconds for each piece of a step beyond the links' latencies and the cores' time. A step has
      two latencies: the receiver's notice that it is ready, then the data.
    - ``pair_cost``: core-seconds for sending or receiving one pair's number in an all-to-all, without the launch.
    """
    ring, exchange = (costs["small_collectives"][scheduling][kind] for kind in ("ring", "all_to_all"))
    launch, steps = costs["launch_core"], 2 * (ranks - 1)
    message = max(0.0, ring["core"] - launch) / (2 * PIECES * steps)
    beyond = (ring["seconds"] - crowd * launch) / steps - 2 * latency - 2 * PIECES * crowd * message
    return {
        "collective_cost": launch,
        "message_cost": message,
        "message_delay": max(0.0, beyond) / (PIECES * crowd),
        "pair_cost": max(0.0, exchange["core"] - launch) / steps,
    }


def _of_frames(costs: Mapping[str, Any], latency: float) -> dict[str, float]:
    """Costs of the transport's frames.

    - ``frame_cost``: core-seconds for each small frame when many are in flight on a tree.
    - ``wake_up``: seconds that a single frame takes beyond the link's latency and the cores' time for one of many.
    - ``exchange_cost``: core-seconds of a rank to start and complete a message on trees, without its frames.
    - ``host_cost``: core-seconds for each byte of large frames on a tree, without the cost of frames and additions.
    """
    return {
        "frame_cost": costs["frame_core"],
        "wake_up": max(0.0, costs["lone"] - latency - 2 * costs["frame_core"]),
        "exchange_cost": costs["exchange_core"],
        "host_cost": costs["byte_core"],
    }


def _sharing_loss(sharing: Mapping[str, float] | None) -> float:
    """The loss in ``stretch = 1 + loss * (full links - 1)``; 0 where no flow crosses two full links."""
    if sharing is None or "everybody" not in sharing or sharing["crowding"] <= 1:
        return 0.0
    return max(0.0, (1 / sharing["everybody"] - 1) / (sharing["crowding"] - 1))

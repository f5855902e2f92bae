"""The traffic of emulated links."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.errors import LaunchError


def bytes_on_links(launch: EmulatedLaunch) -> dict[str, int]:
    """Bytes, with framing, sent so far over each direction of an emulated link, by its name ``a > b``.

    The counters are those of the kernel's token buckets. They count the headers of every frame, even if the kernel
    forwards several frames in one piece.

    Raises:
        LaunchError: ``tc`` failed, for example because the network was removed.
    """
    network = launch.network
    counted = [_sent(namespace) for namespace in launch.namespaces]
    return {
        f"{network.places[port.place]} > {network.places[peer.place]}": counted[port.place][port.interface]
        for pair in zip(network.ports[::2], network.ports[1::2], strict=True)
        for port, peer in (pair, pair[::-1])
    }


def busy_shares(launch: EmulatedLaunch, bytes_of_step: Mapping[str, float], step_time: float) -> dict[str, float]:
    """Shares of a step (0 to 1) for which its bytes keep links busy, by name ``a > b``."""
    rates = [port.rate for port in launch.network.ports]
    return {
        name: min(1.0, max(0.0, sent) / rate / step_time)
        for (name, sent), rate in zip(bytes_of_step.items(), rates, strict=True)
    }


def _sent(namespace: str) -> dict[str, int]:
    """Bytes sent so far, by interface of the namespace."""
    command = ["tc", "-n", namespace, "-s", "-j", "qdisc", "show"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise LaunchError(f"namespace {namespace}: tc: {' '.join(finished.stderr.split()) or finished.returncode}")
    return {one["dev"]: int(one["bytes"]) for one in json.loads(finished.stdout) if one["kind"] == "tbf"}

"""Measure the emulated links of a cluster.

``python -m lightning_autosync.measure.emulation.check cluster=NAME cluster_scale=0.5``
"""

from __future__ import annotations

import argparse
import math
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import PAYLOAD_SHARE
from lightning_autosync.cluster.files import resolve_cluster
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import AutoSyncError, DocumentError
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.emulation.network import Port
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.figures import numbers_table
from lightning_autosync.measure.launches.launch import Launch
from lightning_autosync.measure.tcp_info import bytes_received

BURST = 256 * 1024  # bytes that pass before the clock starts, so that the token bucket is empty by then
SECONDS = 0.25
LEAST = 512 * 1024
POLL = 0.002
CHUNK = 64 * 1024
TRIES = 3
TOLERANCE = 0.03
TIMEOUT = 60.0
PINGS = 5
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ALLOWED_DEVIATION = 0.1
ALLOWED_DELAY = 0.5e-3
MEGABIT = 1e6 / 8


@dataclass(frozen=True)
class LinkCheck:
    """One direction of a link.

    Attributes:
        setting: configured rate in bytes/s, framing included.
        measured: measured rate in bytes/s, framing included.
        latency: configured one-way seconds; 0 if they are not emulated.
        delay: measured one-way seconds; 0 if ``latency`` is.
    """

    source: str
    target: str
    setting: float
    measured: float
    latency: float = 0.0
    delay: float = 0.0

    @property
    def deviation(self) -> float:
        """How far the measured rate is above the setting, relative to the setting."""
        return self.measured / self.setting - 1

    @property
    def off(self) -> bool:
        """Whether the rate or the delay is not as set."""
        allowed = max(ALLOWED_DEVIATION * self.latency, ALLOWED_DELAY)
        return abs(self.deviation) > ALLOWED_DEVIATION or abs(self.delay - self.latency) > allowed


def check_links(launch: EmulatedLaunch) -> list[LinkCheck]:
    """Measure every link between its two ends, one direction after the other.

    A link that seems too slow is measured again, and the best measurement counts: other load on the machine can only
    make a link seem slower than it is.

    Raises:
        LaunchError: hardly any bytes pass a link; the message names it.
    """
    return [_check_channel(launch, channel) for channel in range(len(launch.network.ports))]


def _check_channel(launch: EmulatedLaunch, channel: int) -> LinkCheck:
    sender, receiver = launch.network.ports[channel], launch.network.ports[channel ^ 1]
    source, target = launch.network.places[sender.place], launch.network.places[receiver.place]
    measured = 0.0
    try:
        delay = _measure_delay(launch, sender, receiver) if sender.delay else 0.0
        for _ in range(TRIES):
            measured = max(measured, _measure(launch, sender, receiver))
            if measured > (1 - TOLERANCE) * sender.rate:
                break
    except TimeoutError as error:
        raise LaunchError(f"cluster '{launch.cluster.name}': link from {source} to {target}: {error}") from None
    return LinkCheck(source, target, sender.rate, measured, sender.delay, delay)


def _measure_delay(launch: EmulatedLaunch, sender: Port, receiver: Port) -> float:
    """Least seconds that a byte takes from one port to the other; this process has both ends, and so one clock."""
    delays = []
    with _connection(launch, sender, receiver) as (source, target):
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            start = time.perf_counter()
            source.sendall(b"\0")
            target.recv(1)
            delays.append(time.perf_counter() - start)
    return min(delays)


def _measure(launch: EmulatedLaunch, sender: Port, receiver: Port) -> float:
    """Bytes/s on the wire from one port to the other.

    The kernel counts the received bytes, so delays in scheduling this process do not distort the rate.
    """
    amount = max(LEAST, round(sender.rate * SECONDS))
    # TCP starts slowly: it takes several round trips to fill a long link.
    before = BURST + round(4 * _under_way(sender))
    patience = TIMEOUT + 2 * (before + amount) / sender.rate
    with _connection(launch, sender, receiver) as (source, target):
        threads = [
            threading.Thread(target=_send, args=(source,)),
            threading.Thread(target=_drain, args=(target,)),
        ]
        for thread in threads:
            thread.start()
        try:
            first, start = _wait_for(target, before, patience)
            last, end = _wait_for(target, first + amount, patience)
        finally:
            source.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
    return (last - first) / PAYLOAD_SHARE / (end - start)


def _wait_for(target: socket.socket, amount: int, patience: float) -> tuple[int, float]:
    """Wait until ``amount`` bytes have arrived; returns the number of bytes and the time of the count.

    Raises:
        TimeoutError: fewer bytes arrived within ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        received, now = bytes_received(target), time.perf_counter()
        if received >= amount:
            return received, now
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {received} bytes passed in {patience:.0f} s")
        time.sleep(POLL)


@contextmanager
def _connection(launch: EmulatedLaunch, sender: Port, receiver: Port) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection between two ports, bound to their interfaces so that it takes their link whatever the routes."""
    window = round(1.5 * _under_way(sender)) + CHUNK if sender.delay else 0
    with _socket_at(launch, receiver, window) as listener, _socket_at(launch, sender, window) as source:
        listener.bind((receiver.address, 0))
        listener.listen()
        source.connect(listener.getsockname())
        target, _ = listener.accept()
        with target:
            target.settimeout(TIMEOUT)
            yield source, target


def _under_way(port: Port) -> float:
    """Bytes that a port sends in a round trip over its link."""
    return 2 * port.delay * port.rate


def _socket_at(launch: EmulatedLaunch, port: Port, window: int) -> socket.socket:
    """A TCP socket; if ``window`` is not 0, with buffers for so many bytes, which may exceed the system's limits."""
    made = netns.socket_in(launch.namespaces[port.place])
    made.settimeout(TIMEOUT)
    if window:
        made.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, window)
        made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, window)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, port.interface.encode())
    return made


def _send(source: socket.socket) -> None:
    chunk = bytes(CHUNK)
    with suppress(OSError):  # `_measure` shuts the socket down when it is done
        while True:
            source.sendall(chunk)


def _drain(target: socket.socket) -> None:
    buffer = bytearray(CHUNK)
    with suppress(OSError):
        while target.recv_into(buffer):
            pass


def links_table(cluster: ClusterSpec, checks: list[LinkCheck]) -> Table:
    """A table of rates in Mbit/s, and of delays if there are any; links that are `LinkCheck.off` stand out."""
    delayed = any(check.latency for check in checks)
    caption = "Mbit/s on the wire, framing included" + ("; one-way delays in ms" if delayed else "")
    headings = ("setting", "measured", "deviation", *(("latency", "delay") if delayed else ()))
    table = numbers_table(f"{cluster.name}: emulated links", ("from", "to"), headings, caption, wrap=True)
    for check in checks:
        cells = [f"{check.setting / MEGABIT:.1f}", f"{check.measured / MEGABIT:.1f}", f"{check.deviation:+.1%}"]
        if delayed:
            cells += [f"{check.latency * 1e3:.2f}", f"{check.delay * 1e3:.2f}"] if check.latency else ["", ""]
        table.add_row(check.source, check.target, *cells, style="bold red" if check.off else None)
    return table


def measured_links(launch: Launch) -> list[LinkCheck]:
    """Measure each emulated link, for half a second or more; empty if links are not emulated.

    Warns if links deviate from their settings, which happens on a busy or slow machine.

    Raises:
        LaunchError: hardly any bytes pass a link.
    """
    if not isinstance(launch, EmulatedLaunch):
        return []
    checks = check_links(launch)
    off = [check for check in checks if check.off]
    if off:
        worst = max(off, key=lambda check: abs(check.deviation))
        late = f" (delay {worst.delay * 1e3:.2f} instead of {worst.latency * 1e3:g} ms)" if worst.latency else ""
        warnings.warn(
            f"cluster '{launch.cluster.name}': {len(off)} emulated links deviate by more than {ALLOWED_DEVIATION:.0%} "
            f"from their settings, the one from {worst.source} to {worst.target} by {worst.deviation:+.0%}{late}; this "
            "machine is too slow, so reduce the rates with cluster_scale",
            stacklevel=2,
        )
    return checks


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns 0 if every link is as set, 1 if one deviates, 2 if the links cannot be created."""
    parser = argparse.ArgumentParser(description="Emulate a cluster on this machine and measure its links.")
    parser.add_argument("cluster", metavar="cluster=NAME", help="a shipped cluster's name, or a file's path")
    parser.add_argument(
        "scale",
        nargs="?",
        default="1",
        metavar="cluster_scale=FACTOR",
        help="factor for all rates of the cluster, as for a bench",
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
    return int(any(check.off for check in checks))


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

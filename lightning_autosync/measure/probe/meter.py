"""`Meter`: measurements between the nodes of a live job. All its methods are collective."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict

import torch.distributed as dist

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.connections import connect_pairs, own_address
from lightning_autosync.measure.conditions import boot_id
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.probe.flows import Arrival, RoundTrip, echo, loop, ping, ping_for, send_at_once, stream
from lightning_autosync.measure.probe.survey import Flow
from lightning_autosync.measure.tcp_info import smoothed_round_trip
from lightning_autosync.ports import with_free_port

_DATAGRAM = 1472
"""Payload bytes that fill an Ethernet frame of 1514 bytes."""
_FRAME = 1514
UNDER_WAY = 512 * 1024
"""Bytes in flight of a flow beyond its bandwidth-delay product, to keep links busy while processes wait for a core."""
QUEUED = 0.08
"""Limit on the bytes in flight, in seconds of the flow's rate. More could overflow a queue, and TCP would pause."""
LEAST_UNDER_WAY = 32 * 1024
_TRIES = 5
_PINGS = 100
_AGREEMENT = 0.02
_STEADY = 0.04
"""Relative difference that is allowed between the halves of a window."""
PACKET = 64 * 1024
"""Bytes that arrive at once where hosts merge packets (receive offload)."""
_SETTLE = 0.05
"""Seconds between the barrier and the first byte, so that early ranks do not slow down others in the barrier."""
_SCOUT = 0.5
"""Factor on head and window for a first estimate of a flow's rate."""
FASTEST = 1.25e9
"""Bytes/s of the fastest distant link that a single flow is expected to fill."""


class Meter:
    """Measures rates and round trips between ranks. The first rank of a node measures for the node.

    Args:
        head: seconds at the beginning of each transfer that are not counted.
        window: seconds of each transfer that are counted.
        timeout: seconds within which ranks must reach each other.
        report: called with the number of transfers after each.

    Attributes:
        nodes: ranks of each node, sorted by first rank. Ranks of one network namespace share a node.
        hosts: host name of each node.
        addresses: address of each node.
        machines: number of distinct machines (kernels).
        transfers: number of transfers so far.
        bursts: bytes of the burst of each single flow measured.

    Raises:
        LaunchError: on every rank, if the system is not Linux, whose kernel counts received bytes, or if a rank cannot
            read the id that tells its machine from others.
    """

    def __init__(
        self, head: float, window: float, timeout: float, report: Callable[[int], None] = lambda transfers: None
    ) -> None:
        if sys.platform != "linux":
            raise LaunchError(
                f"probe: it reads the kernel's counters of received bytes, so it needs Linux, not {sys.platform}"
            )
        self._head, self._window, self._timeout = head, window, timeout
        self._report = report
        self.rank = dist.get_rank()
        identities = gather_json([boot_id(), socket.gethostname(), _namespace(), own_address()])
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, (kernel, host, namespace, _) in enumerate(identities):
            if kernel is None:
                raise LaunchError(
                    f"probe: rank {rank} on {host} cannot read /proc/sys/kernel/random/boot_id, the id of its machine"
                )
            ranks.setdefault((kernel, namespace), []).append(rank)
        self.nodes = list(ranks.values())
        self.hosts = [identities[members[0]][1] for members in self.nodes]
        self.addresses = [identities[members[0]][3] for members in self.nodes]
        self.machines = len({kernel for kernel, _ in ranks})
        self.transfers = 0
        self.bursts: list[float] = []

    def rates(self, flows: Sequence[Flow], factor: float = 1.0) -> list[float]:
        """Bytes/s on the wire of simultaneous flows between nodes, measured for ``factor`` windows."""
        leaders = [members[0] for members in self.nodes]
        return self.rank_rates([(leaders[i], leaders[j]) for i, j in flows], factor)

    def prepare(self, sets: Sequence[Sequence[Flow]], factor: float = 1.0) -> None:
        """Does nothing: `rates` measures each set by itself."""

    def rank_rates(self, flows: Sequence[Flow], factor: float = 1.0) -> list[float]:
        """Bytes/s on the wire of simultaneous flows between ranks, measured for ``factor`` windows.

        Disturbances, such as a busy core or a lost packet, only make a transfer slower. So the best transfer counts.
        Transfers are repeated until the best was equally fast in both halves of its window and another agrees with it.
        """
        found = self._run(flows, [UNDER_WAY // len(flows)] * len(flows), _SCOUT, _SCOUT)
        limits = [min(UNDER_WAY, round(QUEUED * arrival.rate)) for arrival in found]
        runs: list[list[Arrival]] = []
        for _ in range(_TRIES):
            runs.append(self._run(flows, limits, 1.0, factor))
            best = max(runs, key=_total)
            agreeing = sum(_total(run) > (1 - _AGREEMENT) * _total(best) for run in runs)
            if agreeing > 1 and _is_steady(best, factor * self._window / 2):
                break
        if len(flows) == 1 and best[0].burst is not None:
            self.bursts.append(best[0].burst)
        return [arrival.rate for arrival in best]

    def _run(self, flows: Sequence[Flow], limits: Sequence[int], head: float, window: float) -> list[Arrival]:
        """Run all flows at once, each with at most ``limits`` bytes in flight; head and window are factors."""
        sockets = self._connect(flows)
        outgoing = {j: limit for (i, j), limit in zip(flows, limits, strict=True) if i == self.rank}
        for peer, limit in outgoing.items():
            _limit(sockets[peer], limit)
        sources = [i for i, j in flows if j == self.rank]
        dist.barrier()
        time.sleep(_SETTLE)
        arrivals = stream(sockets, outgoing, sources, head * self._head, window * self._window)
        found = gather_json({str(source): asdict(arrival) for source, arrival in arrivals.items()})
        self._count()
        return [Arrival(**found[j][str(i)]) for i, j in flows]

    def pace(self, node: int) -> float:
        """Bytes/s at which a node's own port sends, whatever its peers can receive.

        It sends datagrams, which only the node's own port slows down: UDP has no flow control.
        """
        with socket.socket(_family(self.addresses[node]), socket.SOCK_DGRAM) as own:
            with_free_port(lambda port: own.bind((self.addresses[self._node], port)))
            ports = gather_json(own.getsockname()[1])
            leaders = [members[0] for members in self.nodes]
            targets = [(self.addresses[k], ports[leaders[k]]) for k in range(len(leaders)) if k != node]
            pace = self._flood(own, targets) if self.rank == leaders[node] else 0.0
            return float(gather_json(pace)[leaders[node]])

    def round_trips(self, pairs: Iterable[Flow]) -> dict[Flow, RoundTrip]:
        """Round trips of tiny messages between pairs of ranks, one pair after the other."""
        pairs = sorted(pairs)
        sockets = self._connect(pairs)
        own: dict[str, list[float]] = {}
        for pair in pairs:
            dist.barrier()
            if self.rank in pair:
                first, second = pair
                connection = sockets[second if self.rank == first else first]
                send_at_once(connection)
                connection.settimeout(self._timeout)
                times = ping(connection, _PINGS, begins=self.rank == first)
                if self.rank == first:
                    own[f"{first} {second}"] = times
        dist.barrier()
        for connection in sockets.values():
            connection.close()
        return _gather_trips(own, pairs)

    def loaded_trips(self, flows: Iterable[Flow]) -> dict[Flow, RoundTrip]:
        """Round trips from node to node while the first node sends to the second at full rate, one flow at a time.

        Unlike in `rates`, the bytes in flight are not limited, as in any program. So the round trips include the queue
        in front of the narrowest link.
        """
        flows = sorted(flows)
        own: dict[str, list[float]] = {}
        for i, j in flows:
            times = self._ping_beside((self.nodes[i][0], self.nodes[j][0]))
            if times:
                own[f"{i} {j}"] = times
        return _gather_trips(own, flows)

    def _ping_beside(self, flow: Flow) -> list[float]:
        """Round-trip seconds beside a flow between ranks, on the rank that sends it; empty on other ranks."""
        pings, streams = self._connect([flow]), self._connect([flow])
        dist.barrier()
        time.sleep(_SETTLE)
        self._count()
        if not pings:
            return []
        ((peer, connection),) = pings.items()
        begins = self.rank == flow[0]
        targets, sources = ([peer], []) if begins else ([], [peer])
        times: list[float] = []
        with connection, ThreadPoolExecutor(1) as background:
            flowing = background.submit(stream, streams, targets, sources, self._head, self._window)
            send_at_once(connection)
            connection.settimeout(self._timeout)
            if begins:
                time.sleep(self._head)
                times = ping_for(connection, self._window, self._timeout)
                connection.shutdown(socket.SHUT_WR)  # ends `echo` at the other end
            else:
                echo(connection)
            flowing.result()
        return times

    def own_trip(self) -> float:
        """Least round-trip seconds of a few bytes within rank 0: the wake-up time of threads, without a wire."""
        least = min(loop(2 * _PINGS)) if self.rank == 0 else 0.0
        return float(gather_json(least)[0])

    def _count(self) -> None:
        self.transfers += 1
        self._report(self.transfers)

    @property
    def _node(self) -> int:
        return next(node for node, members in enumerate(self.nodes) if self.rank in members)

    def _connect(self, flows: Iterable[Flow]) -> dict[int, socket.socket]:
        edges = sorted({(min(flow), max(flow)) for flow in flows})
        return connect_pairs(edges, None, None, self._timeout)

    def _flood(self, own: socket.socket, targets: Sequence[tuple[str, int]]) -> float:
        datagram = bytes(_DATAGRAM)
        begin = time.perf_counter()
        start, sent = begin, 0
        counting = False
        while (now := time.perf_counter()) < begin + self._head + self._window:
            if not counting and now > begin + self._head:
                counting, start, sent = True, now, 0
            with suppress(ConnectionError):
                own.sendto(datagram, targets[sent % len(targets)])
                sent += 1
        return sent * _FRAME / (time.perf_counter() - start)


def _gather_trips(own: Mapping[str, Sequence[float]], flows: Iterable[Flow]) -> dict[Flow, RoundTrip]:
    """Round trips by flow, gathered from the ranks that measured them."""
    found = {key: times for rank in gather_json(own) for key, times in rank.items()}
    return {(i, j): RoundTrip.of(found[f"{i} {j}"]) for i, j in flows}


def _total(found: Sequence[Arrival]) -> float:
    return sum(arrival.rate for arrival in found)


def _is_steady(found: Sequence[Arrival], half: float) -> bool:
    """Whether neither half of the window (``half`` seconds each) was disturbed.

    The last merged packet of each flow may fall into either half, so it is allowed for.
    """
    first, second = (sum(arrival.halves[part] for arrival in found) for part in range(2))
    return abs(first - second) < _STEADY * max(first, second) + len(found) * PACKET / half


def _limit(connection: socket.socket, amount: int) -> None:
    """Limit a flow's bytes in flight to ``amount`` beyond the bandwidth-delay product of the route."""
    distance = round(FASTEST * smoothed_round_trip(connection))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(LEAST_UNDER_WAY, amount) + distance)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _namespace() -> str:
    """An id of the network namespace. Its ranks share its links, and reach other ranks through a network."""
    return str(os.stat("/proc/self/ns/net").st_ino)

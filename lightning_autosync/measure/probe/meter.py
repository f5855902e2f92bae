"""`Meter`: measurements between the nodes of a live job; all its methods are collective."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.connections import connect_pairs, own_address
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.probe.flows import Arrival, RoundTrip, echo, loop, ping, ping_for, send_at_once, stream
from lightning_autosync.measure.probe.survey import Flow
from lightning_autosync.measure.tcp_info import smoothed_round_trip

_DATAGRAM = 1472
"""Payload bytes that fill an Ethernet frame of 1514 bytes."""
_FRAME = 1514
_UNDER_WAY = 512 * 1024
"""Bytes under way in a flow, in addition to what the distance holds: enough to keep links busy while processes wait for
a core."""
_QUEUED = 0.08
"""Seconds of a flow's rate that may be under way: few enough to overflow no queue, after which TCP would pause."""
_LEAST_UNDER_WAY = 32 * 1024
_TRIES = 5
_AGREEMENT = 0.02
_STEADY = 0.04
"""Share by which the halves of a window may differ."""
_PACKET = 64 * 1024
"""Bytes that arrive at once where hosts merge packets."""
_SETTLE = 0.05
"""Seconds between the barrier and the first byte, so that early ranks do not delay others in the barrier."""
_SCOUT = 0.5
"""Part of head and window that a first look at a flow's rate takes."""
_FASTEST = 1.25e9
"""Bytes/s of the fastest link that a single flow is expected to fill at a distance."""


class Meter:
    """Rates, round trips and the like between ranks, one rank a node where nodes are meant.

    Args:
        head: seconds of each transfer that are not counted.
        window: seconds that are.
        timeout: seconds in which ranks must reach each other.

    Attributes:
        nodes: the ranks of each node, both in order of first rank; ranks of one network namespace share a node.
        hosts: the host name of each node.
        machines: how many different machines (kernels) there are.

    Raises:
        LaunchError: on every rank, where the kernel does not count what arrives.
    """

    def __init__(self, head: float, window: float, timeout: float) -> None:
        if sys.platform != "linux":
            raise LaunchError(f"probe: it needs Linux, whose kernel counts what arrives; this is {sys.platform}")
        self._head, self._window, self._timeout = head, window, timeout
        self.rank = dist.get_rank()
        identities = gather_json([_machine(), _namespace(), socket.gethostname(), own_address()])
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, (machine, namespace, _, _) in enumerate(identities):
            ranks.setdefault((machine, namespace), []).append(rank)
        self.nodes = list(ranks.values())
        self.hosts = [identities[members[0]][2] for members in self.nodes]
        self.addresses = [identities[members[0]][3] for members in self.nodes]
        self.machines = len({machine for machine, _ in ranks})
        self.transfers = 0
        self.bursts: list[float] = []

    def rates(self, flows: Sequence[Flow], factor: float = 1.0) -> list[float]:
        """Bytes/s on the wire of flows between nodes that run at the same time, for ``factor`` windows."""
        leaders = [members[0] for members in self.nodes]
        return self.rank_rates([(leaders[i], leaders[j]) for i, j in flows], factor)

    def rank_rates(self, flows: Sequence[Flow], factor: float = 1.0) -> list[float]:
        """The same between ranks.

        Whatever disturbs a transfer, a busy core or a lost packet, makes it slower. So it is repeated until the best
        one was as fast in both of its halves and another agrees with it, and the best counts.
        """
        found = self._run(flows, [_UNDER_WAY // len(flows)] * len(flows), _SCOUT, _SCOUT)
        limits = [min(_UNDER_WAY, round(_QUEUED * arrival.rate)) for arrival in found]
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
        """Each flow, with at most ``limits`` bytes of it under way. Shares of head and window."""
        sockets = self._connect(flows)
        outgoing = {j: limit for (i, j), limit in zip(flows, limits, strict=True) if i == self.rank}
        for peer, limit in outgoing.items():
            _limit(sockets[peer], limit)
        sources = [i for i, j in flows if j == self.rank]
        dist.barrier()
        time.sleep(_SETTLE)
        arrivals = stream(sockets, outgoing, sources, head * self._head, window * self._window)
        found = gather_json({str(source): asdict(arrival) for source, arrival in arrivals.items()})
        self.transfers += 1
        return [Arrival(**found[j][str(i)]) for i, j in flows]

    def pace(self, node: int) -> float:
        """Bytes/s at which a node's own port sends, whatever its peers can take: datagrams that the port holds up."""
        with socket.socket(_family(self.addresses[node]), socket.SOCK_DGRAM) as own:
            own.bind((self.addresses[self._node], 0))
            ports = gather_json(own.getsockname()[1])
            leaders = [members[0] for members in self.nodes]
            targets = [(self.addresses[k], ports[leaders[k]]) for k in range(len(leaders)) if k != node]
            pace = self._flood(own, targets) if self.rank == leaders[node] else 0.0
            return float(gather_json(pace)[leaders[node]])

    def round_trips(self, pairs: Iterable[Flow], count: int = 100) -> dict[Flow, RoundTrip]:
        """Tiny messages there and back between pairs of ranks, one pair after the other."""
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
                times = ping(connection, count, begins=self.rank == first)
                if self.rank == first:
                    own[f"{first} {second}"] = times
        dist.barrier()
        for connection in sockets.values():
            connection.close()
        return _gather_trips(own, pairs)

    def loaded_trips(self, flows: Iterable[Flow]) -> dict[Flow, RoundTrip]:
        """The same from node to node and back while the first sends the second all it can, as any program would: not
        bound in what it has under way, so that what stands in front of the narrowest link counts; one after the other.
        """
        flows = sorted(flows)
        own: dict[str, list[float]] = {}
        for i, j in flows:
            times = self._ping_beside((self.nodes[i][0], self.nodes[j][0]))
            if times:
                own[f"{i} {j}"] = times
        return _gather_trips(own, flows)

    def _ping_beside(self, flow: Flow) -> list[float]:
        """Seconds of trips beside a flow between ranks, on the rank that it comes from; none on others."""
        pings, streams = self._connect([flow]), self._connect([flow])
        dist.barrier()
        time.sleep(_SETTLE)
        self.transfers += 1
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
                connection.shutdown(socket.SHUT_WR)
            else:
                echo(connection)
            flowing.result()
        return times

    def own_trip(self, count: int = 200) -> float:
        """Seconds there and back of a few bytes within rank 0: what threads need to wake, without a wire; the least."""
        least = min(loop(count)) if self.rank == 0 else 0.0
        return float(gather_json(least)[0])

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
    """Round trips by flow, of which every rank brings the times that it measured."""
    found = {key: times for rank in gather_json(own) for key, times in rank.items()}
    return {(i, j): RoundTrip.of(found[f"{i} {j}"]) for i, j in flows}


def _total(found: Sequence[Arrival]) -> float:
    return sum(arrival.rate for arrival in found)


def _is_steady(found: Sequence[Arrival], half: float) -> bool:
    """Whether neither half of the window, of so many seconds, was disturbed; a packet of each flow may be in either."""
    first, second = (sum(arrival.halves[part] for arrival in found) for part in range(2))
    return abs(first - second) < _STEADY * max(first, second) + len(found) * _PACKET / half


def _limit(connection: socket.socket, amount: int) -> None:
    """Bound what a flow has under way, beyond what the distance to the peer holds."""
    distance = round(_FASTEST * smoothed_round_trip(connection))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(_LEAST_UNDER_WAY, amount) + distance)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _machine() -> str:
    """The same in all containers of a machine until it is booted anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    """Ranks of one network namespace share its links; others reach each other through a network."""
    return str(os.stat("/proc/self/ns/net").st_ino)

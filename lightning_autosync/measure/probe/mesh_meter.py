"""`MeshMeter`: a `Meter` that needs little time, for jobs that measure their links before they train."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_autosync.engine.collectives import broadcast_json, gather_json, group_device
from lightning_autosync.errors import AutoSyncError, ExchangeError
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.probe.flows import CHUNK, discard, wire_rate
from lightning_autosync.measure.probe.meter import FASTEST, LEAST_UNDER_WAY, PACKET, QUEUED, UNDER_WAY, Meter
from lightning_autosync.measure.probe.survey import DECISIVE_WINDOWS, Flow, everybody
from lightning_autosync.measure.tcp_info import bytes_received, least_round_trip

_HEAD, _WINDOW, _TAIL = 0.08, 0.1, 0.02
_SETTLE = 0.03
"""Seconds between the barrier and the first byte, so that early ranks do not slow down others in the barrier."""
_COLLECTIVES = 0.1
"""Seconds of the collectives around slots, about."""
_TRIPS = 8
"""Round trips in which TCP fills a long route."""
_ENOUGH = 0.3
"""Seconds of a window from which on a longer one is hardly better."""
_LONG = 2e-3
"""Seconds of a round trip from which on a route is long."""
_PACKETS = 40
"""Least number of packets of a window, as large as hosts merge them."""

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")
Set = frozenset[Flow]
"""Simultaneous flows between nodes."""


class MeshMeter(Meter):
    """Measures rates between nodes over one connection for each pair of nodes, many sets of flows after each barrier.

    A set of flows is measured once for each length of its window. Any rank's fault, and a time that is over, are raised
    on all ranks alike, because they gather both together with the rates.

    Args:
        timeout: seconds within which ranks must reach each other.
        limit: seconds that all measurements may take.

    Attributes:
        latencies: one-way seconds between each pair of nodes: half the least round trip that the kernel saw.
    """

    def __init__(self, timeout: float, limit: float) -> None:
        super().__init__(_HEAD, _WINDOW, min(timeout, limit))
        self._begin = time.perf_counter()
        self._limit = limit
        self._elapsed = 0.0
        self._known: dict[tuple[Set, float], dict[Flow, float]] = {}
        self._first: dict[Flow, float] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._distance = 0.0
        self._leads = False
        self._leaders = [members[0] for members in self.nodes]
        self.latencies: dict[Flow, float] = {}

    @contextmanager
    def connected(self, slots: int | None = None) -> Iterator[MeshMeter]:
        """Connect all pairs of nodes.

        Args:
            slots: number of measurements for which there must be time; by default, those that each survey makes.

        Raises:
            LaunchError: on every rank, if there are too many nodes for the limit, or if some cannot reach each other.
        """
        nodes = range(len(self.nodes))
        least = (len(nodes) + 2 if slots is None else slots) * (_HEAD + _WINDOW + _TAIL)
        self._require_time(least)
        pairs = [(i, j) for i in nodes for j in nodes if i < j]
        fault = ""
        try:
            self._sockets = self._connect((self._leaders[i], self._leaders[j]) for i, j in pairs)
        except (AutoSyncError, OSError) as error:
            fault = str(error)
        try:
            own = {self._flow(peer): least_round_trip(connection) for peer, connection in self._sockets.items()}
            trips = self._agree(fault, everybody(len(nodes)), own)
            self.latencies = {(i, j): min(trips[i, j], trips[j, i]) / 2 for i, j in pairs}
            self._distance = 2 * max(self.latencies.values())
            self._require_time(least)
            yield self
        finally:
            for connection in self._sockets.values():
                discard(connection)

    def rates(self, flows: Sequence[Flow], factor: float = 1.0) -> list[float]:
        """Bytes/s on the wire of simultaneous flows between nodes, measured for ``factor`` windows.

        Zeros if there is no time left for a measurement that would only confirm another.
        """
        self.prepare([flows], factor)
        found = self._known.get((frozenset(flows), factor), {})
        return [found.get(flow, 0.0) for flow in flows]

    def prepare(self, sets: Sequence[Sequence[Flow]], factor: float = 1.0) -> None:
        """Measure sets of flows one after the other, without a collective in between.

        Two sets with the same flows in opposite directions are measured at once, because links are full-duplex.

        Raises:
            LaunchError: on every rank, if the limit does not suffice, or if a rank failed.
        """
        wanted = dict.fromkeys(frozenset(flows) for flows in sets if (frozenset(flows), factor) not in self._known)
        slot_of = {flows: flows | back if (back := _reversed(flows)) in wanted else flows for flows in wanted}
        slots = list(dict.fromkeys(slot_of.values()))
        seconds = sum(sum(self._times(flows, factor)) for flows in slots)
        if not slots or (factor == DECISIVE_WINDOWS and not self._has_time(seconds)):
            return
        found = self._measure(slots, factor)
        self._known |= {(flows, factor): found[slot] for flows, slot in slot_of.items()}

    def lead(self, decide: Callable[[], _Result]) -> _Result | None:
        """Measure what rank 0 decides to measure; collective.

        Decisions compare rates, and unlike processors may round differently. So only rank 0 decides, and the others
        measure what it tells them.

        Args:
            decide: called on rank 0, which may call `rates` and `prepare` in it.

        Returns:
            What ``decide`` returned, on rank 0; None on the others.

        Raises:
            LaunchError: on every rank, if the limit does not suffice, if a rank failed, or if ``decide`` fails, such as
                with the rates that were measured where a process stopped for a moment.
        """
        if self.rank == 0:
            self._leads, fault = True, ""
            cause: Exception | None = None
            try:
                found = decide()
            except (LaunchError, ExchangeError):  # on every rank
                raise
            except (ValueError, ArithmeticError) as error:
                fault, cause = f"rates were measured that do not fit each other: {error}", error
            except Exception as error:  # the others wait for the next order
                fault, cause = f"{type(error).__name__} on rank 0: {error}", error
            finally:
                self._leads = False
            broadcast_json({"fault": fault})
            if fault:
                raise LaunchError(fault) from cause
            return found
        while "fault" not in (order := broadcast_json(None)):
            self._measure([frozenset((i, j) for i, j in flows) for flows in order["sets"]], order["factor"])
        if order["fault"]:
            raise LaunchError(order["fault"])
        return None

    def _measure(self, slots: Sequence[Set], factor: float) -> dict[Set, dict[Flow, float]]:
        if self._leads:
            broadcast_json({"sets": [sorted(flows) for flows in slots], "factor": factor})
        self._require_time(sum(sum(self._times(flows, factor)) for flows in slots))
        found = dict(zip(slots, self._run_all(slots, factor), strict=True))
        if not self._first:
            self._first = found[slots[0]]
            self._widen()
        return found

    def pace(self, node: int) -> float:
        """Always 0. What a link carries beyond the rates of all others together is of no use to a job, and a job floods
        no network with datagrams to find out."""
        return 0.0

    def elapsed(self) -> float:
        """Seconds since the beginning, on this rank."""
        return time.perf_counter() - self._begin

    def _run_all(self, sets: Sequence[Set], factor: float) -> list[dict[Flow, float]]:
        slots = [self._slot(flows, factor) for flows in sets]
        fault, own = "", dict[tuple[int, Flow], float]()
        dist.barrier()
        time.sleep(_SETTLE)
        try:
            for number, rates in enumerate(run_slots(self._sockets, slots) if self._sockets else []):
                own |= {(number, self._flow(source)): rate for source, rate in rates.items()}
        except OSError as error:
            fault = str(error)
        found = self._agree(fault, [(number, flow) for number, flows in enumerate(sets) for flow in sorted(flows)], own)
        self.transfers += len(sets)
        return [{flow: found[number, flow] for flow in flows} for number, flows in enumerate(sets)]

    def _flow(self, source: int) -> Flow:
        """The flow to this rank's node from that of another leader."""
        return self._leaders.index(source), self._node

    def _slot(self, flows: Set, factor: float) -> Slot:
        targets, sources = dict[int, int | None](), list[int]()
        for flow in flows:
            one, other = (self._leaders[node] for node in flow)
            if one == self.rank:
                targets[other] = self._under_way(flow, len(flows))
            if other == self.rank:
                sources.append(one)
        return Slot(targets, sources, *self._times(flows, factor))

    def _times(self, flows: Set, factor: float) -> tuple[float, float, float]:
        """Head, window and tail of a slot. TCP needs some round trips to fill the routes, if all of them are long."""
        shortest = 2 * min(self.latencies[min(flow), max(flow)] for flow in flows)
        window = max(self._window, min(_ENOUGH, self._window * factor))
        return _HEAD + _TRIPS * shortest, window, _TAIL + self._distance

    def _under_way(self, flow: Flow, flows: int) -> int | None:
        """Limit on a flow's bytes in flight; None leaves it to TCP, which then has to find the length of the route.

        The first set has all flows, whose rates fit into the links together. So the limits of any set of flows fit into
        the queues. The kernel doubles a limit, because it counts overhead as well.
        """
        distance = 2 * self.latencies[min(flow), max(flow)]
        if distance > _LONG:
            return None
        amount = min(UNDER_WAY, QUEUED / 2 * self._first[flow]) if self._first else UNDER_WAY // flows
        return round(max(LEAST_UNDER_WAY, amount) + distance * FASTEST)

    def _widen(self) -> None:
        """Count for so long that some packets arrive from the slowest node and at the slowest node.

        Raises:
            LaunchError: on every rank, if none arrived.
        """
        nodes = range(len(self.nodes))
        slowest = min(
            sum(rate for flow, rate in self._first.items() if flow[end] == node) for end in (0, 1) for node in nodes
        )
        if slowest == 0:
            raise LaunchError("a node sends or receives nothing")
        self._window = max(self._window, _PACKETS * PACKET / slowest)

    def _agree(self, fault: str, keys: Sequence[_Key], own: Mapping[_Key, float]) -> dict[_Key, float]:
        """The sum of all ranks' numbers for each key; raises ``LaunchError`` on every rank if any has a fault.

        On distant links this takes less time than `gather_json`, which goes around all ranks twice.
        """
        numbers = [float(bool(fault)), self.elapsed(), *(own.get(key, 0.0) for key in keys)]
        mine = torch.tensor(numbers, dtype=torch.float64, device=group_device(None))
        ranks = torch.empty(dist.get_world_size(), len(numbers), dtype=torch.float64, device=mine.device)
        dist.gather(mine, list(ranks) if self.rank == 0 else None)
        dist.broadcast(ranks, src=0)
        self._elapsed = float(ranks[:, 1].max())
        if ranks[:, 0].any():
            faults = gather_json(fault)
            rank = next(rank for rank, text in enumerate(faults) if text)
            raise LaunchError(f"rank {rank}: {faults[rank]}")
        return dict(zip(keys, ranks[:, 2:].sum(dim=0).tolist(), strict=True))

    def _has_time(self, seconds: float) -> bool:
        return self._time_after(seconds) <= self._limit

    def _require_time(self, seconds: float) -> None:
        if not self._has_time(seconds):
            raise LaunchError(
                f"links of {len(self.nodes)} nodes take {self._time_after(seconds):.1f} s or more to measure, "
                f"the limit is {self._limit:g} s"
            )

    def _time_after(self, seconds: float) -> float:
        """Seconds since the beginning after slots of so many seconds, and the collectives around them."""
        return self._elapsed + _COLLECTIVES + _TRIPS * self._distance + seconds


def _reversed(flows: Set) -> Set:
    return frozenset((j, i) for i, j in flows)


@dataclass(frozen=True)
class Slot:
    """One rank's part in one transfer.

    Attributes:
        targets: peers to which the rank sends, with limits on the bytes in flight; None leaves the limit to TCP.
        sources: peers from which it receives.
        head: seconds at the beginning that are not counted. Data of the slot before and bursts pass in it.
        window: seconds that are counted.
        tail: seconds for which senders continue, so that ranks that began late measure under full load too.
    """

    targets: Mapping[int, int | None]
    sources: Sequence[int]
    head: float
    window: float
    tail: float

    @property
    def seconds(self) -> float:
        """Seconds of the slot."""
        return self.head + self.window + self.tail


def run_slots(sockets: Mapping[int, socket.socket], slots: Sequence[Slot]) -> list[dict[int, float]]:
    """Run slots one after the other; returns for each slot the bytes/s on the wire by source.

    Ranks call this at about the same time, and then keep together by their clocks.

    Raises:
        ConnectionError: a peer closed its connection.
    """
    with selectors.DefaultSelector() as selector:
        for peer, connection in sockets.items():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CHUNK)
            selector.register(connection, selectors.EVENT_READ, peer)
        begin = time.perf_counter()
        found = []
        for slot in slots:
            found.append(_run(selector, sockets, slot, begin))
            begin += slot.seconds
    return found


def _run(
    selector: selectors.BaseSelector, sockets: Mapping[int, socket.socket], slot: Slot, begin: float
) -> dict[int, float]:
    for peer, limit in slot.targets.items():
        if limit is not None:
            sockets[peer].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limit)
        selector.modify(sockets[peer], selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
    opens, closes = begin + slot.head, begin + slot.head + slot.window
    _exchange(selector, sockets, opens)
    first = _counts(sockets, slot.sources)
    _exchange(selector, sockets, closes)
    last = _counts(sockets, slot.sources)
    _exchange(selector, sockets, begin + slot.seconds)
    for peer in slot.targets:
        selector.modify(sockets[peer], selectors.EVENT_READ, peer)
    return {source: wire_rate(first[source], last[source]) for source in slot.sources}


def _exchange(selector: selectors.BaseSelector, sockets: Mapping[int, socket.socket], deadline: float) -> None:
    """Send and receive until a time of `time.perf_counter`."""
    chunk, buffer = memoryview(bytes(CHUNK)), bytearray(CHUNK)
    while (now := time.perf_counter()) < deadline:
        for key, events in selector.select(deadline - now):
            connection = sockets[key.data]
            with suppress(BlockingIOError):
                if events & selectors.EVENT_WRITE:
                    connection.send(chunk)
                if events & selectors.EVENT_READ and not connection.recv_into(buffer):
                    raise ConnectionError(f"rank {key.data} closed its connection")


def _counts(sockets: Mapping[int, socket.socket], sources: Sequence[int]) -> dict[int, tuple[float, int]]:
    """The time, and the bytes that the kernel has received from each source, even if nobody has read them."""
    return {source: (time.perf_counter(), bytes_received(sockets[source])) for source in sources}

"""Memory, exchanges and connections that an engine allocates once, for one rank and one schedule."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.engine.collectives import gather_json, require_success
from lightning_autosync.engine.compressor_state import CompressorState
from lightning_autosync.engine.connections import CONNECT_TIMEOUT, connect_pairs
from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.engine.exchanges.gathered_rows import RowGatherExchange
from lightning_autosync.engine.exchanges.low_rank import LowRankExchange
from lightning_autosync.engine.exchanges.native import (
    AllReduceExchange,
    AllToAllExchange,
    TwoLevelExchange,
    two_level_groups,
)
from lightning_autosync.engine.exchanges.pairwise import PairwiseExchange
from lightning_autosync.engine.exchanges.rows import NativeRowExchange, RowExchange, RowTreeExchange
from lightning_autosync.engine.exchanges.shared_memory import SharedMemory, SharedMemoryExchange
from lightning_autosync.engine.exchanges.staging import StagedExchange, StagedRowExchange
from lightning_autosync.engine.exchanges.trees import TreeExchange
from lightning_autosync.engine.failure_detector import open_failure_detector
from lightning_autosync.engine.gradients import DenseGradients, MessageGradients, real_view
from lightning_autosync.engine.notes import Notes, can_carry
from lightning_autosync.engine.row_gradients import RowGradients
from lightning_autosync.engine.transport import Peer, Transport
from lightning_autosync.errors import ExchangeError, OpeningError, PeerLost, PlanError
from lightning_autosync.plan.pacing import sending_needs
from lightning_autosync.plan.pairwise import PairwiseReduce
from lightning_autosync.plan.schedule import (
    AllReduce,
    AllToAll,
    Message,
    Round,
    RowBroadcast,
    Schedule,
    SharedMemoryReduce,
    TreeTransfer,
    TwoLevelAllReduce,
)
from lightning_autosync.ports import ADDRESSES

_PIECE = 1 << 20
"""Bytes of memory that are taken at once."""
_ROUNDS = 2
"""Channels per message: each of PowerSGD's two rounds needs its own."""
_Plain = AllReduce | TreeTransfer | PairwiseReduce
"""Transfers that may carry more elements than those of the message."""


class Resources:
    """Allocates and releases the resources of an engine; collective. Arguments and errors are those of `Engine`.

    With ``control``, a group of the same ranks, the collective calls go over that group. Another thread may use
    ``group`` meanwhile, so training can go on. Two-level collectives need new groups, which only the thread that trains
    can make: schedules with them are a `PlanError` then. ``rest`` is called between pieces of the work, which may last
    a few milliseconds each.

    Attributes:
        gradients: the gradients of each message, in schedule order.
        notes: numbers that travel with the first message that can carry them; None if there are none, or no such
            message.
        compressor_state: state that the messages' compressors keep from step to step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        schedule: Schedule,
        group: dist.ProcessGroup | None,
        cluster: ClusterSpec | None,
        timeout: float,
        gradient_as_bucket_view: bool = False,
        watched: bool = False,
        connect_timeout: float = CONNECT_TIMEOUT,
        control: dist.ProcessGroup | None = None,
        notes: int = 0,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._rest = rest
        self._parameters = parameters
        self._as_views = gradient_as_bucket_view
        self.group = group
        self._control = group if control is None else control
        self._timeout = timeout
        self._connect_timeout = min(timeout, connect_timeout)
        self._rank = dist.get_rank(group)
        self._world_size = schedule.world_size
        self._note_count = notes
        self.notes: Notes | None = None
        self._check_equal(schedule)
        for message in schedule.messages:
            _check_parameters(message, parameters)
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._copies: ThreadPoolExecutor | None = None
        self._shared: SharedMemory | None = None
        self._transport: Transport | None = None
        self._closing = ExitStack()
        address = None if cluster is None else cluster.nodes[cluster.rank_nodes[self._rank]].address
        try:
            if not watched and (address is not None or "MASTER_ADDR" in os.environ):
                detector = open_failure_detector(self._control, timeout, address)
                if detector is not None:
                    self._closing.callback(detector.close)
            self._make_two_level_groups(schedule)
            self._open_shared_memory(schedule)
            fault = self._open_exchanges(schedule, cluster, address)
            # No rank may send before every rank can receive.
            require_success(fault, self._control)
        except BaseException:
            self.close()
            raise

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent if self._transport is not None else 0

    def close(self) -> None:
        if self._copies is not None:
            self._copies.shutdown()
        self._closing.close()

    def _check_equal(self, schedule: Schedule) -> None:
        """Raise on every rank if schedules differ."""
        fingerprints = gather_json(schedule.fingerprint, self._control)
        if schedule.world_size != len(fingerprints):
            raise PlanError(
                f"schedule: it was made for {schedule.world_size} ranks, but the process group has {len(fingerprints)}"
            )
        for rank, fingerprint in enumerate(fingerprints):
            if fingerprint != fingerprints[0]:
                raise PlanError(
                    f"schedule: rank {rank} has a different schedule from rank 0; model, plan, cluster and package "
                    "versions must be the same on all ranks"
                )

    def _open_exchanges(self, schedule: Schedule, cluster: ClusterSpec | None, address: str | None) -> str:
        """Open connections and allocate buffers; returns why this rank could not, empty if it could.

        Raises:
            ExchangeError: (on every rank) a rank is lost, or cannot listen.
            PlanError: (on every rank) the schedule needs what the job does not have.
        """
        try:
            self._open_transport(schedule, cluster, address)
            self.gradients = []
            for message in schedule.messages:
                self._rest()
                self.gradients.append(self._gradients_of(message))
        except (OpeningError, PeerLost, PlanError):
            raise
        except (ExchangeError, OSError, MemoryError, RuntimeError) as cause:  # torch: no memory is a RuntimeError
            return str(cause) or type(cause).__name__
        self.compressor_state = CompressorState([(one.message, one.parameters) for one in self.gradients], self._kept)
        return ""

    def _open_transport(self, schedule: Schedule, cluster: ClusterSpec | None, address: str | None) -> None:
        """Connect the neighbours on trees and in pairs of all messages, if there are any."""
        if not any(message.on_trees for message in schedule.messages):
            return
        self._rest()
        sockets = self._connect(schedule, cluster, address)
        if cluster is None or not cluster.measured:
            self._transport = Transport(sockets)
        else:
            self._rest()
            links, rank = LinkGraph(cluster), self._rank
            rates = {
                peer: (links.bandwidth(rank, *peer), links.bandwidth(peer.rank, rank, peer.interface))
                for peer in sockets
            }
            needs = {
                Peer(other, interface): need
                for interface in schedule.interfaces
                for other, need in sending_needs(schedule, links, rank, interface).items()
            }
            self._transport = Transport(sockets, rates, needs)
        self._closing.callback(self._transport.close)

    def _connect(
        self, schedule: Schedule, cluster: ClusterSpec | None, address: str | None
    ) -> dict[Peer, socket.socket]:
        """Open the connections of all trees, interface by interface.

        Raises:
            PlanError: (on every rank) a rank knows no address of one of these interfaces.
        """
        further = [interface for interface in schedule.interfaces if interface]
        found = {interface: interface_address(cluster, self._rank, interface) for interface in further}
        lacks = [(interface, where) for interface, (own, where) in found.items() if own is None]
        for lack in filter(None, gather_json(lacks, self._control) if further else []):
            interface, where = lack[0]
            raise PlanError(
                f"{where}: missing, also in {ADDRESSES}; trees of the plan connect the ranks over interface "
                f"{interface} of their nodes"
            )
        own = {0: address} | {interface: place for interface, (place, _) in found.items()}
        sockets: dict[Peer, socket.socket] = {}
        with ExitStack() as opened:
            for interface in schedule.interfaces:
                edges = schedule.tree_edges(interface)
                pairs = connect_pairs(edges, self._control, own[interface], self._connect_timeout, interface)
                for rank, connection in pairs.items():
                    sockets[Peer(rank, interface)] = opened.enter_context(connection)
            opened.pop_all()
        return sockets

    def _make_two_level_groups(self, schedule: Schedule) -> None:
        """Make the process groups of two-level collectives; collective, so no rank may have a fault of its own yet."""
        transfers = (each for message in schedule.messages for one in message.rounds for each in one.transfers)
        for places in dict.fromkeys(each.places for each in transfers if isinstance(each, TwoLevelAllReduce)):
            if self.group is not None:
                raise PlanError("schedule: two-level collectives need the default process group")
            if self._control is not None:
                raise PlanError("schedule: plans with two-level collectives cannot be tried while a job trains")
            groups = two_level_groups(places, self._timeout)
            groups.users += 1
            self._closing.callback(groups.leave)

    def _open_shared_memory(self, schedule: Schedule) -> None:
        """Allocate shared memory for all messages that are summed in it, if there are any."""
        shared = [message for message in schedule.messages if message.in_shared_memory]
        if shared:
            sizes = {one.index: one.rounds[0].length * getattr(torch, one.dtype).itemsize for one in shared}
            self._shared = SharedMemory(sizes, self._control, self._connect_timeout)
            self._closing.callback(self._shared.close)

    def _gradients_of(self, message: Message) -> MessageGradients:
        parameters = [self._parameters[name] for name in message.variables]
        device = parameters[0].device
        dtype = getattr(torch, message.dtype)
        if message.rows:
            return RowGradients(message, parameters[0], self._row_exchange(message, dtype, device), self._world_size)
        if message.in_shared_memory:
            assert self._shared is not None
            buffer = self._shared.buffer(message.index, self._rank, dtype)
        else:
            room = self._note_count * self._world_size
            if self.notes is None and _is_plain(message) and device.type == "cpu" and can_carry(dtype, room):
                return self._with_notes(message, parameters, room, dtype)
            buffer = self._zeros(message.numel + message.tail, dtype, device)
        exchange = self._low_rank(message, buffer) if len(message.rounds) > 1 else self._round(message, 0, buffer)
        return DenseGradients(message, parameters, buffer, exchange, self._world_size, self._as_views)

    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros [numel]; on CPUs the system provides the memory piece by piece, because 9 MB take 5 ms or more."""
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        memory = torch.empty(numel, dtype=dtype, device=device)
        for part in memory.split(_PIECE // dtype.itemsize):
            part.zero_()
            self._rest()
        return memory

    def _with_notes(
        self, message: Message, parameters: list[nn.Parameter], room: int, dtype: torch.dtype
    ) -> MessageGradients:
        """The gradients of a message on the CPU, whose exchange has ``room`` more elements for the notes."""
        memory = self._zeros(message.numel + message.tail + room, dtype, torch.device("cpu"))
        self.notes = Notes(memory[-room:], self._rank, self._world_size)
        exchange = self._round(_extended(message, room), 0, memory)
        return DenseGradients(
            message, parameters, memory[:-room], exchange, self._world_size, self._as_views, self.notes
        )

    def _low_rank(self, message: Message, buffer: Tensor) -> Exchange:
        exchange = LowRankExchange(
            message,
            [tuple(real_view(self._parameters[name]).shape) for name in message.variables],
            buffer,
            self._world_size,
            lambda number, factors: self._round(message, number, factors),
        )
        self._keep(message, factors=exchange.warm_start, residual=exchange.residual)
        return exchange

    def _round(self, message: Message, number: int, buffer: Tensor) -> Exchange:
        """The exchange of one round of a dense message; all transfers of a round have the same type."""
        transfers = message.rounds[number].transfers
        exchange: Exchange
        if all(isinstance(transfer, AllReduce) for transfer in transfers):
            reduces = [transfer for transfer in transfers if isinstance(transfer, AllReduce)]
            exchange = AllReduceExchange(reduces, message, buffer, self.group)
        elif isinstance(transfers[0], TwoLevelAllReduce):
            groups = two_level_groups(transfers[0].places, self._timeout)  # made by `_make_two_level_groups`
            levels = [transfer for transfer in transfers if isinstance(transfer, TwoLevelAllReduce)]
            exchange = TwoLevelExchange(levels, buffer, groups)
        elif isinstance(transfers[0], SharedMemoryReduce):
            assert self._shared is not None
            exchange = SharedMemoryExchange(message, self._shared, self._rank, self._world_size, self._timeout)
        elif isinstance(transfers[0], AllToAll):
            exchange = AllToAllExchange(transfers[0], message, buffer, self._rank, self._world_size, self.group)
        else:
            return self._tree_round(message, number, buffer)
        self._keep(message, residual=exchange.residual)
        return exchange

    def _tree_round(self, message: Message, number: int, buffer: Tensor) -> Exchange:
        assert self._transport is not None
        staged = buffer.device.type != "cpu"
        # Only copies to and from pinned memory run asynchronously.
        host = torch.zeros_like(buffer, device="cpu", pin_memory=True) if staged else buffer
        channel = _ROUNDS * message.index + number
        one = message.rounds[number]
        pairs = isinstance(one.transfers[0], PairwiseReduce)
        kind: type[TreeExchange] | type[PairwiseExchange] = PairwiseExchange if pairs else TreeExchange
        exchange = kind(self._transport, channel, self._rank, message, one, host, self._timeout)
        self._keep(message, residual=exchange.residual)
        if not staged:
            return exchange
        if self._copies is None:
            # One thread for all messages: it starts exchanges in the order in which backward issues their copies.
            self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="autosync-copies")
        return StagedExchange(exchange, self._copies, buffer, host)

    def _row_exchange(self, message: Message, dtype: torch.dtype, device: torch.device) -> RowExchange:
        width = message.numel // message.rows
        if message.collective:
            return NativeRowExchange(message.rows, width, dtype, device, self.group)
        assert self._transport is not None
        channel = _ROUNDS * message.index
        gathered = isinstance(message.rounds[0].transfers[0], RowBroadcast)
        kind: type[RowGatherExchange] | type[RowTreeExchange] = RowGatherExchange if gathered else RowTreeExchange
        exchange = kind(self._transport, channel, self._rank, message, width, dtype, self._timeout)
        return StagedRowExchange(exchange, device) if device.type != "cpu" else exchange

    def _keep(self, message: Message, **tensors: Tensor | None) -> None:
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if kept:
            self._kept.setdefault(message.name, {}).update(kept)


def interface_address(cluster: ClusterSpec | None, rank: int, interface: int) -> tuple[str | None, str]:
    """The address of a further interface of this rank's node, as the cluster or this process's launch tells it.

    Returns:
        The address, or None if it is unknown, and the field where it is missing.
    """
    where = "cluster"
    if cluster is not None:
        node = cluster.rank_nodes[rank]
        if address := cluster.nodes[node].interfaces[interface].address:
            return address, ""
        where = f"cluster '{cluster.name}': nodes[{node}].interfaces[{interface}].address"
    told = [address.strip() for address in os.environ.get(ADDRESSES, "").split(",")]
    if interface < len(told) and told[interface]:
        return told[interface], ""
    return None, where


def connected_interfaces(cluster: ClusterSpec, rank: int) -> tuple[int, str]:
    """Number of interfaces that plans can use, and the field of the first address that is missing; empty if none is."""
    for interface in range(1, cluster.interface_count):
        address, where = interface_address(cluster, rank, interface)
        if address is None:
            return interface, where
    return cluster.interface_count, ""


def _is_plain(message: Message) -> bool:
    """Whether all elements of a message are summed as they are, and it may carry more of them."""
    transfers = [transfer for one in message.rounds for transfer in one.transfers]
    return message.compressor.kind == "none" and all(isinstance(one, _Plain) for one in transfers)


def _extended(message: Message, room: int) -> Message:
    """A message of one round, whose last transfer carries ``room`` more elements."""
    (only,) = message.rounds
    last = only.transfers[-1]
    assert isinstance(last, _Plain)
    transfers = (*only.transfers[:-1], replace(last, stop=last.stop + room))
    return replace(message, rounds=(Round(only.length + room, transfers),))


def _check_parameters(message: Message, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise if parameters of a message are missing, have another dtype, or are on different devices."""
    where = f"schedule: message '{message.name}'"
    for name in message.variables:
        if name not in parameters:
            raise PlanError(f"{where}: the model has no parameter '{name}'")
    device = parameters[message.variables[0]].device
    if message.in_shared_memory and device.type != "cpu":
        raise PlanError(f"{where}: topology 'shared_memory' needs parameters on the CPU, but these are on {device}")
    for name in message.variables:
        parameter = parameters[name]
        if real_view(parameter).dtype != getattr(torch, message.dtype) or parameter.device != device:
            raise PlanError(
                f"{where}: it carries {message.dtype} on {device}, but '{name}' is {parameter.dtype} on "
                f"{parameter.device}"
            )

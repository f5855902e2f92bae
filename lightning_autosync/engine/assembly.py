"""From a Schedule to buckets: memory, exchanges and connections for one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.engine.buckets import Bucket, DenseBucket, RowBucket
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.connections import CONNECT_TIMEOUT, connect_pairs
from lightning_autosync.engine.exchanges import (
    AllReduceExchange,
    AllToAllExchange,
    Exchange,
    LowRankExchange,
    NativeRowExchange,
    RowExchange,
    RowTreeExchange,
    SharedMemoryExchange,
    TreeExchange,
    TwoLevelExchange,
    TwoLevelGroups,
    two_level_groups,
)
from lightning_autosync.engine.exchanges.staging import StagedExchange, StagedRowExchange
from lightning_autosync.engine.failure_detector import open_failure_detector
from lightning_autosync.engine.layout import real_view
from lightning_autosync.engine.pacing import pacing_rates
from lightning_autosync.engine.shared_memory import SharedMemory
from lightning_autosync.engine.transport import Transport
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.schedule import (
    AllReduce,
    AllToAll,
    Message,
    Schedule,
    SharedMemoryReduce,
    TwoLevelAllReduce,
)

_ROUNDS = 2
"""Channels a message: PowerSGD's two rounds need one each."""


class Assembly:
    """Everything that an engine allocates once: buckets in schedule order, and the transport under them.

    Args and errors are those of `Engine`.
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
    ) -> None:
        self._parameters = parameters
        self._as_views = gradient_as_bucket_view
        self._group = group
        self._timeout = timeout
        self._rank = dist.get_rank(group)
        self._world_size = schedule.world_size
        _agree(schedule, group)
        for message in schedule.messages:
            _check_parameters(message, parameters)
        self._memories: dict[str, dict[str, Tensor]] = {}
        self._waiter: ThreadPoolExecutor | None = None
        self._shared: SharedMemory | None = None
        self._transport: Transport | None = None
        address = _own_address(cluster, self._rank)
        alone = watched or (address is None and "MASTER_ADDR" not in os.environ)
        self._failure_detector = None if alone else open_failure_detector(group, timeout, address)
        try:
            self._transport = self._connect(schedule, cluster, address)
            self._shared = self._share(schedule)
            self._two_level = self._two_level_groups(schedule)
            self.buckets = [self._bucket(message) for message in schedule.messages]
            # No rank may send before every rank can receive.
            dist.barrier(group)
        except BaseException:
            self.close()
            raise

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent if self._transport is not None else 0

    def memories(self) -> dict[str, dict[str, Tensor]]:
        """What compressors remember, by message; the live tensors."""
        return self._memories

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.shutdown()
        if self._transport is not None:
            self._transport.close()
        if self._shared is not None:
            self._shared.close()
        if self._failure_detector is not None:
            self._failure_detector.close()

    def _two_level_groups(self, schedule: Schedule) -> TwoLevelGroups | None:
        transfers = (
            transfer for message in schedule.messages for round in message.rounds for transfer in round.transfers
        )
        two_level = next((transfer for transfer in transfers if isinstance(transfer, TwoLevelAllReduce)), None)
        if two_level is None:
            return None
        if self._group is not None:
            raise PlanError("schedule: collectives in two levels need the default process group")
        return two_level_groups(two_level.places, self._timeout)

    def _connect(self, schedule: Schedule, cluster: ClusterSpec | None, address: str | None) -> Transport | None:
        if not any(message.on_trees for message in schedule.messages):
            return None
        edges = schedule.tree_edges()
        sockets = connect_pairs(edges, self._group, address, min(self._timeout, CONNECT_TIMEOUT))
        if cluster is None or not cluster.measured:
            return Transport(sockets)
        topology = LinkGraph(cluster)
        rates = {peer: topology.bandwidth(self._rank, peer) for peer in sockets}
        return Transport(sockets, rates, pacing_rates(schedule, topology, self._rank))

    def _share(self, schedule: Schedule) -> SharedMemory | None:
        """The memory of all messages that are summed in it, one after the other."""
        shared = [message for message in schedule.messages if message.in_shared_memory]
        if not shared:
            return None
        sizes = {message.index: message.rounds[0].length * getattr(torch, message.dtype).itemsize for message in shared}
        return SharedMemory(sizes, self._group, min(self._timeout, CONNECT_TIMEOUT))

    def _bucket(self, message: Message) -> Bucket:
        parameters = [self._parameters[name] for name in message.variables]
        device = parameters[0].device
        dtype = getattr(torch, message.dtype)
        if message.rows:
            return RowBucket(message, parameters[0], self._row_exchange(message, dtype, device), self._world_size)
        if message.in_shared_memory:
            assert self._shared is not None
            buffer = self._shared.buffer(message.index, self._rank, dtype)
        else:
            buffer = torch.zeros(message.numel + message.tail, dtype=dtype, device=device)
        exchange = self._dense_exchange(message, buffer, parameters)
        return DenseBucket(message, parameters, buffer, exchange, self._world_size, self._as_views)

    def _dense_exchange(self, message: Message, buffer: Tensor, parameters: list[nn.Parameter]) -> Exchange:
        if len(message.rounds) == 1:
            return self._one_round(message, 0, buffer)
        exchange = LowRankExchange(
            message,
            [tuple(real_view(parameter).shape) for parameter in parameters],
            buffer,
            self._world_size,
            lambda number, factors: self._one_round(message, number, factors),
        )
        self._memories[message.name] = {"factors": exchange.warm_start}
        if exchange.residual is not None:
            self._memories[message.name]["residual"] = exchange.residual.values
        return exchange

    def _one_round(self, message: Message, number: int, buffer: Tensor) -> Exchange:
        exchange: AllReduceExchange | AllToAllExchange
        transfers = message.rounds[number].transfers
        reduces = [transfer for transfer in transfers if isinstance(transfer, AllReduce)]
        if len(transfers) == len(reduces):
            exchange = AllReduceExchange(reduces, message, buffer, self._group)
        elif isinstance(transfers[0], TwoLevelAllReduce):
            assert self._two_level is not None
            levels = [transfer for transfer in transfers if isinstance(transfer, TwoLevelAllReduce)]
            return TwoLevelExchange(levels, buffer, self._two_level)
        elif isinstance(transfers[0], SharedMemoryReduce):
            return self._in_shared_memory(message, buffer.dtype)
        elif isinstance(transfers[0], AllToAll):
            exchange = AllToAllExchange(transfers[0], message, buffer, self._rank, self._world_size, self._group)
        else:
            return self._on_trees(message, number, buffer)
        self._remember(message, exchange)
        return exchange

    def _in_shared_memory(self, message: Message, dtype: torch.dtype) -> Exchange:
        assert self._shared is not None
        *buffers, result = (self._shared.buffer(message.index, place, dtype) for place in range(self._world_size + 1))
        return SharedMemoryExchange(message, buffers, result, self._rank, self._shared.handover, self._timeout)

    def _on_trees(self, message: Message, number: int, buffer: Tensor) -> Exchange:
        assert self._transport is not None
        staged = buffer.device.type != "cpu"
        host = torch.zeros_like(buffer, device="cpu", pin_memory=True) if staged else buffer
        exchange = TreeExchange(
            self._transport,
            _ROUNDS * message.index + number,
            self._rank,
            message,
            message.rounds[number],
            host,
            self._timeout,
        )
        self._remember(message, exchange)
        return StagedExchange(exchange, self._copies(), buffer, host) if staged else exchange

    def _copies(self) -> ThreadPoolExecutor:
        if self._waiter is None:
            self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="autosync-copies")
        return self._waiter

    def _row_exchange(self, message: Message, dtype: torch.dtype, device: torch.device) -> RowExchange:
        width = message.numel // message.rows
        if message.collective:
            return NativeRowExchange(width, dtype, device, self._group)
        assert self._transport is not None
        channel = _ROUNDS * message.index
        exchange = RowTreeExchange(self._transport, channel, self._rank, message, width, dtype, self._timeout)
        return StagedRowExchange(exchange, device) if device.type != "cpu" else exchange

    def _remember(self, message: Message, exchange: AllReduceExchange | AllToAllExchange | TreeExchange) -> None:
        if exchange.residual is not None:
            self._memories.setdefault(message.name, {})["residual"] = exchange.residual.values


def _own_address(cluster: ClusterSpec | None, rank: int) -> str | None:
    """Where the cluster says that this rank listens, if it does."""
    return None if cluster is None else cluster.nodes[cluster.rank_nodes[rank]].address


def _check_parameters(message: Message, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a message whose parameters are not there, or of another type, or on several devices."""
    where = f"schedule: message '{message.name}'"
    for name in message.variables:
        if name not in parameters:
            raise PlanError(f"{where}: there is no parameter '{name}'")
    device = parameters[message.variables[0]].device
    if message.in_shared_memory and device.type != "cpu":
        raise PlanError(f"{where}: topology 'shared_memory' is for parameters on the CPU, these are on {device}")
    for name in message.variables:
        parameter = parameters[name]
        if real_view(parameter).dtype != getattr(torch, message.dtype) or parameter.device != device:
            raise PlanError(
                f"{where}: it carries {message.dtype} on {device}; '{name}' is {parameter.dtype} on {parameter.device}"
            )


def _agree(schedule: Schedule, group: dist.ProcessGroup | None) -> None:
    """Refuse, on every rank, to run with schedules that differ."""
    fingerprints = gather_json(schedule.fingerprint, group)
    if schedule.world_size != len(fingerprints):
        raise PlanError(f"schedule: it is for {schedule.world_size} ranks, the process group has {len(fingerprints)}")
    odd = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if odd:
        raise PlanError(
            f"schedule: rank {odd[0]} compiled another one than rank 0; model, plan, cluster and package versions "
            "must be the same on all ranks"
        )

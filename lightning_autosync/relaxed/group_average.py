"""The weighted average of a group of ranks; only its members take part.

It is a reduce-scatter and an all-gather over the mesh: every member owns a share of the buffer, receives the other
members' parts of it, sums them in the members' order, and sends the sum to all. Shares are cut into chunks, so that
transfers and additions overlap. Two members exchange small buffers directly: as many bytes, but half the latency.

Why not gloo: process groups, cached for each set of members, are no faster where links are the bottleneck. Over links
of 1 Gbit/s they took the same time for 25 MB, with two and with four members. On loopback, where cores are the
bottleneck, they took 0.6 to 0.8 of the time. But each group costs threads and connections, and must be made again after
a loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_autosync.errors import ExchangeError, GroupBroken, MeshTimeout, PeerLost
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Mail, Sent

CHUNK = 1024 * 1024
"""Largest size of a chunk in bytes."""

_PART, _SUM, _ABORT = "average.part", "average.sum", "average.abort"


class Chunk(NamedTuple):
    """Elements ``begin`` to ``end`` (exclusive) of the buffer, and the positions of the members that sum them."""

    begin: int
    end: int
    owners: tuple[int, ...]


def cut_chunks(elements: int, members: int, chunk: int) -> list[Chunk]:
    """Cut a buffer into chunks of at most ``chunk`` elements, in the order in which they are sent.

    Members own equal numbers of elements, up to a difference of one, and take turns in the list. With two members and a
    buffer of a single chunk, both members own the chunk.
    """
    if members == 2 and elements <= chunk:
        return [Chunk(0, elements, (0, 1))] if elements else []
    bounds = [elements * member // members for member in range(members + 1)]
    longest = max(end - begin for begin, end in pairwise(bounds))
    return [
        Chunk(begin, min(begin + chunk, bounds[owner + 1]), (owner,))
        for offset in range(0, longest, chunk)
        for owner in range(members)
        if (begin := bounds[owner] + offset) < bounds[owner + 1]
    ]


class _Round:
    """One average in progress from one member's view: its own chunks, received parts, and missing sums."""

    def __init__(
        self,
        generation: int,
        members: tuple[int, ...],
        rank: int,
        buffer: Tensor,
        result: Tensor,
        room_for: Callable[[int], Tensor],
    ) -> None:
        self.generation, self.members, self.rank = generation, members, rank
        self.own = members.index(rank)
        self.buffer, self.result = buffer, result
        self.chunks = cut_chunks(buffer.numel(), len(members), max(1, CHUNK // buffer.element_size()))
        owned = [chunk for chunk in self.chunks if self.own in chunk.owners]
        self._first = min((chunk.begin for chunk in owned), default=0)
        share = sum(chunk.end - chunk.begin for chunk in owned)
        self._arriving = room_for(share * (len(members) - 1)).view(len(members) - 1, share)
        """Memory for the other members' parts of this member's share, [other members, elements of the share]."""
        self.parts: dict[int, dict[int, Tensor]] = defaultdict(dict)
        """Received parts of this member's chunks, by chunk and position."""
        self.missing = set(range(len(self.chunks)))
        """Indices of chunks whose sum is not yet in ``result``."""
        self.sent: list[Sent] = []

    def header(self, chunk: int) -> dict[str, int]:
        return {"generation": self.generation, "chunk": chunk}

    def has(self, index: int) -> bool:
        """Whether the chunk exists; a peer with a buffer of another size may send larger indices."""
        return 0 <= index < len(self.chunks)

    def needs(self, position: int) -> bool:
        """Whether this member still waits for a part or a sum of the member at ``position``."""
        for index in self.missing:
            owners = self.chunks[index].owners
            if (position not in self.parts[index]) if self.own in owners else (position in owners):
                return True
        return False

    def target(self, kind: str, sender: int, header: dict[str, Any], size: int) -> Tensor | None:
        """The memory for a part or a sum from ``sender``; None if the message does not belong to this round."""
        if header["generation"] != self.generation or sender not in self.members or not self.has(header["chunk"]):
            return None
        chunk = self.chunks[header["chunk"]]
        target = self.result[chunk.begin : chunk.end]
        if kind == _PART:
            if self.own not in chunk.owners:
                return None
            position = self.members.index(sender)
            row = self._arriving[position - (position > self.own)]
            target = row[chunk.begin - self._first : chunk.end - self._first]
        return target if target.nbytes == size else None


class GroupAverage:
    """Averages within changing groups of a mesh, one at a time.

    Args:
        mesh: connects all possible members.
        timeout: seconds without progress after which a group is broken; a lost member breaks it at once.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self._mesh, self._timeout = mesh, timeout
        self._events: SimpleQueue[Mail | int] = SimpleQueue()
        """Messages of groups, and ranks of peers that are gone."""
        self._early: dict[int, list[Mail]] = defaultdict(list)
        """Messages of groups that this member has not entered, by generation."""
        self._round: _Round | None = None
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}
        self._arriving: dict[torch.dtype, Tensor] = {}
        self._subscriptions = ExitStack()
        for cancel in (
            mesh.on_loss(lambda peer, why: self._events.put(peer)),
            mesh.on_leave(self._events.put),
            mesh.subscribe(_PART, self._events.put, partial(self._place, _PART)),
            mesh.subscribe(_SUM, self._events.put, partial(self._place, _SUM)),
            mesh.subscribe(_ABORT, self._events.put),
        ):
            self._subscriptions.callback(cancel)

    def close(self) -> None:
        """Take part in no more groups; a second call has no effect."""
        self._subscriptions.close()

    def run(self, generation: int, members: Sequence[int], weights: Sequence[float], buffer: Tensor) -> Tensor:
        """The weighted sum of the members' buffers, bitwise equal on all members.

        Half-precision buffers are summed in single precision. ``buffer`` does not change: the caller copies the result
        when it commits. If a member is lost late, the group may be broken for some members, and others have the result.

        Args:
            generation: unique number of the group; at each member, later groups have larger numbers.
            members: ranks with this rank among them, in the same order on all members.
            weights: one weight per member.
            buffer: [elements], contiguous and floating point, of equal size and dtype on all members.

        Returns:
            The sum, in memory that the next call reuses.

        Raises:
            GroupBroken: a member is lost, left or stopped averaging; or there was no progress for ``timeout`` seconds.
            Expelled: the other processes have expelled this process.
        """
        members = tuple(members)
        if len(weights) != len(members) or self._mesh.rank not in members:
            raise ExchangeError(
                f"group {generation} of ranks {members} has weights {list(weights)}; expected one per member"
            )
        if buffer.dim() != 1 or not buffer.is_floating_point():
            raise ExchangeError(f"group {generation}: only flat floating-point buffers can be averaged")
        host = buffer.detach().to("cpu")
        room_for = partial(self._room_for, host.dtype)
        current = _Round(generation, members, self._mesh.rank, host, self._result_like(host), room_for)
        self._forget_before(generation)
        self._round = current
        try:
            self._exchange(current, weights)
        except ExchangeError as cause:
            raise self._give_up(current, cause) from None
        finally:
            self._round = None
        return current.result.to(buffer.device)

    def _exchange(self, current: _Round, weights: Sequence[float]) -> None:
        # `_forget_before` has dropped earlier losses, because peers may have returned since.
        for member in current.members:
            if member not in self._mesh.live:
                raise PeerLost(member, "it was lost before the group began to average")
        self._send_parts(current)
        for index, chunk in enumerate(current.chunks):
            if len(current.members) == 1:
                self._add_up(current, index, chunk, weights)
        for mail in self._early.pop(current.generation, []):
            self._take(current, mail, weights)
        while current.missing:
            self._take(current, self._next(), weights)
        for sent in current.sent:
            # A member that is lost now has already sent its share, so its loss does no harm.
            with suppress(PeerLost):
                sent.wait_while_moving(self._timeout)

    def _send_parts(self, current: _Round) -> None:
        for index, chunk in enumerate(current.chunks):
            for owner in chunk.owners:
                if owner != current.own:
                    self._send(current, owner, _PART, index, current.buffer)

    def _send(self, current: _Round, position: int, kind: str, index: int, source: Tensor) -> None:
        chunk = current.chunks[index]
        payload = source[chunk.begin : chunk.end]
        current.sent.append(self._mesh.send(current.members[position], kind, current.header(index), [payload]))

    def _next(self) -> Mail | int:
        try:
            return self._events.get(timeout=self._timeout)
        except Empty:
            raise MeshTimeout(f"no data moved for {self._timeout:g} s") from None

    def _take(self, current: _Round, event: Mail | int, weights: Sequence[float]) -> None:
        if isinstance(event, int):
            if event in current.members and current.needs(current.members.index(event)):
                raise PeerLost(event, "it was lost before it had sent all its data")
        elif event.header["generation"] > current.generation:
            self._early[event.header["generation"]].append(event)
        elif event.header["generation"] == current.generation:
            self._use(current, event, weights)

    def _use(self, current: _Round, mail: Mail, weights: Sequence[float]) -> None:
        if mail.kind == _ABORT:
            raise ExchangeError(f"rank {mail.sender} stopped averaging: {mail.header['why']}")
        index = int(mail.header["chunk"])
        chunk = current.chunks[index] if current.has(index) else Chunk(0, 0, ())
        size = (chunk.end - chunk.begin) * current.buffer.element_size()
        if not size or mail.payload.nbytes != size:
            raise ExchangeError(f"rank {mail.sender} averages a buffer of a different size or dtype")
        if mail.sender not in current.members or index not in current.missing:
            raise ExchangeError(f"rank {mail.sender} sent a part of the average that it was not asked for")
        values = torch.frombuffer(mail.payload, dtype=current.buffer.dtype)
        if mail.kind == _PART:
            current.parts[index][current.members.index(mail.sender)] = values
            if len(current.parts[index]) == len(current.members) - 1:
                self._add_up(current, index, chunk, weights)
            return
        target = current.result[chunk.begin : chunk.end]
        if values.data_ptr() != target.data_ptr():
            target.copy_(values)
        current.missing.remove(index)

    def _add_up(self, current: _Round, index: int, chunk: Chunk, weights: Sequence[float]) -> None:
        """Sum all parts of a chunk that this member owns, and send the sum to the others."""
        parts = current.parts.pop(index, {})
        parts[current.own] = current.buffer[chunk.begin : chunk.end]
        target = current.result[chunk.begin : chunk.end]
        weighted_sum([parts[position] for position in range(len(weights))], weights, target)
        current.missing.remove(index)
        for position in range(len(current.members)):
            if position not in chunk.owners:
                with suppress(PeerLost):
                    self._send(current, position, _SUM, index, current.result)

    def _place(self, kind: str, sender: int, header: dict[str, Any], size: int) -> memoryview | None:
        current = self._round
        target = None if current is None else current.target(kind, sender, header, size)
        return None if target is None else target.view(torch.uint8).numpy().data

    def _forget_before(self, generation: int) -> None:
        """Drop messages of earlier groups, and losses of peers that may have returned since."""
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                break
            if not isinstance(event, int):
                self._early[event.header["generation"]].append(event)
        for past in [other for other in self._early if other < generation]:
            del self._early[past]

    def _give_up(self, current: _Round, cause: ExchangeError) -> ExchangeError:
        for sent in current.sent:
            sent.cancel()
        # The mesh may still write late messages into this memory, so the next round gets new memory.
        self._scratch.clear()
        self._arriving.clear()
        if self._mesh.error is not None:
            return self._mesh.error
        live = self._mesh.live
        for member in current.members:
            if member != current.rank and member in live:
                with suppress(PeerLost):
                    self._mesh.send(member, _ABORT, {"generation": current.generation, "why": str(cause)})
        lost = tuple(member for member in current.members if member not in live)
        return GroupBroken(current.generation, current.members, lost, str(cause))

    def _result_like(self, buffer: Tensor) -> Tensor:
        key = buffer.numel(), buffer.dtype
        if key not in self._scratch:
            self._scratch[key] = torch.empty_like(buffer)
        return self._scratch[key]

    def _room_for(self, dtype: torch.dtype, elements: int) -> Tensor:
        """Memory for received parts, [elements], reused in each round."""
        if dtype not in self._arriving or self._arriving[dtype].numel() < elements:
            self._arriving[dtype] = torch.empty(elements, dtype=dtype, device="cpu")
        return self._arriving[dtype][:elements]


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """Write the weighted sum of ``parts``, added in order, to ``out``; a common weight is applied to the sum.

    Products and sums are rounded separately, so that machines with and without fused multiply-add get the same bits.
    """
    wide = out if out.dtype in (torch.float32, torch.float64) else torch.empty_like(out, dtype=torch.float32)
    if len(set(weights)) == 1 and len(parts) > 1:
        torch.add(parts[0].to(wide.dtype), parts[1].to(wide.dtype), out=wide)
        for part in parts[2:]:
            wide.add_(part.to(wide.dtype))
        wide.mul_(weights[0])
    else:
        torch.mul(parts[0].to(wide.dtype), weights[0], out=wide)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            wide.add_(part.to(wide.dtype) * weight)
    if wide is not out:
        out.copy_(wide)

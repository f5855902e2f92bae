"""The weighted average of a group of ranks; only its members take part.

Reduce-scatter and all-gather over the mesh: every member owns a share of the buffer, receives the others' parts of it,
sums them in the members' order and sends the sum to all. Shares are cut into chunks, so that parts, sums and additions
overlap. Two members exchange small buffers directly: as many bytes, and half the latency.

Process groups of gloo, made once for each set of members and kept, are no faster where links are the limit: over links
of 1 Gbit/s they took as long for 25 MB, among two and among four. On loopback, where cores are, they took 0.6 to 0.8 of
the time; but each costs its members threads and connections, and one that lost a member must be made anew.
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
"""Bytes of a chunk."""

_PART, _SUM, _ABORT = "average.part", "average.sum", "average.abort"


class Chunk(NamedTuple):
    """Elements ``begin`` to ``end`` of the buffer, which the members at ``owners`` (positions in the group) sum."""

    begin: int
    end: int
    owners: tuple[int, ...]


def cut_chunks(elements: int, members: int, chunk: int) -> list[Chunk]:
    """Cut a buffer into chunks of at most ``chunk`` elements, such that all members own equally many elements (or one
    more or less). They are listed in turn, one of each member, which is the order in which they travel. A buffer of one
    chunk is owned by both of two members; of a larger one, each sums its half only.
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
    """One average in progress, as one member sees it: what it owns, what it has, what is missing."""

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
        """Others' parts of the own share, [other members, elements of it]."""
        self.parts: dict[int, dict[int, Tensor]] = defaultdict(dict)
        """Others' parts of own chunks, by chunk and position."""
        self.missing = set(range(len(self.chunks)))
        """Chunks whose sum is not in ``result``."""
        self.sent: list[Sent] = []

    def header(self, chunk: int) -> dict[str, int]:
        return {"generation": self.generation, "chunk": chunk}

    def has(self, index: int) -> bool:
        """Whether there is a chunk of that index; a buffer of another size may have more."""
        return 0 <= index < len(self.chunks)

    def needs(self, position: int) -> bool:
        """Whether this member still waits for a part or a sum of another."""
        for index in self.missing:
            owners = self.chunks[index].owners
            if (position not in self.parts[index]) if self.own in owners else (position in owners):
                return True
        return False

    def target(self, kind: str, sender: int, header: dict[str, Any], size: int) -> Tensor | None:
        """Where a sum, or another member's part, belongs; None if it is not of this round."""
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
    """Averages among changing groups of a mesh, one at a time.

    Args:
        mesh: connects all who may ever be members.
        timeout: seconds without any progress after which a group is broken; a lost member breaks it at once.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self._mesh, self._timeout = mesh, timeout
        self._events: SimpleQueue[Mail | int] = SimpleQueue()
        """Messages of groups, and ranks that are gone."""
        self._early: dict[int, list[Mail]] = defaultdict(list)
        """Messages of groups that this member has not entered yet, by generation."""
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
        """Take part in no more groups; may be called again."""
        self._subscriptions.close()

    def run(self, generation: int, members: Sequence[int], weights: Sequence[float], buffer: Tensor) -> Tensor:
        """The sum over members of ``weights[i]`` times their buffers, equal to the last bit on all members.

        Half-precision buffers are summed in single precision. The buffer itself stays as it is: the caller copies the
        result into it when it wants to commit. A member that had everything before another was lost has its result,
        while for the others the group is broken.

        Args:
            generation: the group's number, never used twice, and growing from group to group at each member.
            members: ranks, own included, in the same order on all members.
            weights: as many.
            buffer: flat, contiguous, floating point, of equal size and type on all members.

        Returns:
            The sum, in memory that the next call reuses.

        Raises:
            GroupBroken: a member is lost, has left, or gave up; or nothing moved for ``timeout`` seconds.
            Expelled: the others have given this process up.
        """
        members = tuple(members)
        if len(weights) != len(members) or self._mesh.rank not in members:
            raise ExchangeError(
                f"group {generation} of ranks {members} has weights {list(weights)}, one for each member"
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
        for member in current.members:
            if member not in self._mesh.live:
                raise PeerLost(member, "it was lost before the group met")
        self._send_parts(current)
        for index, chunk in enumerate(current.chunks):
            if len(current.members) == 1:
                self._add_up(current, index, chunk, weights)
        for mail in self._early.pop(current.generation, []):
            self._take(current, mail, weights)
        while current.missing:
            self._take(current, self._next(), weights)
        for sent in current.sent:
            # A member that left or died after it sent its share is no harm any more.
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
            raise MeshTimeout(f"nothing moved for {self._timeout:g} s") from None

    def _take(self, current: _Round, event: Mail | int, weights: Sequence[float]) -> None:
        if isinstance(event, int):
            if event in current.members and current.needs(current.members.index(event)):
                raise PeerLost(event, "it was a member and had not sent all")
        elif event.header["generation"] > current.generation:
            self._early[event.header["generation"]].append(event)
        elif event.header["generation"] == current.generation:
            self._use(current, event, weights)

    def _use(self, current: _Round, mail: Mail, weights: Sequence[float]) -> None:
        if mail.kind == _ABORT:
            raise ExchangeError(f"rank {mail.sender} gave up: {mail.header['why']}")
        index = int(mail.header["chunk"])
        chunk = current.chunks[index] if current.has(index) else Chunk(0, 0, ())
        size = (chunk.end - chunk.begin) * current.buffer.element_size()
        if not size or mail.payload.nbytes != size:
            raise ExchangeError(f"rank {mail.sender} averages a buffer of another size or type")
        if mail.sender not in current.members or index not in current.missing:
            raise ExchangeError(f"rank {mail.sender} sent a part of the average that nobody wants of it")
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
        """All parts of a chunk that this member owns are here: sum them and send the sum to the others."""
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
        """Drop messages of earlier groups, and losses of peers that may have come back."""
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
        # Late messages may still be written into it.
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
        """Memory for what arrives, [elements]; the same in each round."""
        if dtype not in self._arriving or self._arriving[dtype].numel() < elements:
            self._arriving[dtype] = torch.empty(elements, dtype=dtype)
        return self._arriving[dtype][:elements]


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """``out`` becomes the sum of weight times part, in order; products and sums are rounded separately, so that all
    machines get the same bits whether or not they fuse the two. A weight that all share is applied to the sum.
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

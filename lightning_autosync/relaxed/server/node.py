"""The workers of one node that push one sum: who pushes, and what the others hand over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.servers import Shard
from lightning_autosync.relaxed.server.gradients import Gradients, add, pack_gradients, unpack_gradients
from lightning_autosync.relaxed.server.rpc import PulledParameters, ServerRpc
from lightning_autosync.relaxed.server.shards import ShardedModel
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.relaxed.transport.payload import Part, pack, unpack


class Node:
    """Pure bookkeeping of the worker ``rank``; the lowest worker that still trains leads.

    Args:
        rank: the own rank.
        members: the workers of the node, the own included.
    """

    def __init__(self, rank: int, members: Iterable[int]) -> None:
        self._rank = rank
        self._present = set(members)
        self._epoch = 0
        self._finished: dict[int, int] = {}
        self._contributions: dict[int, tuple[int, Gradients]] = {}

    @property
    def epoch(self) -> int:
        """Barriers passed."""
        return self._epoch

    @property
    def active(self) -> list[int]:
        """Those that push before the next barrier, ascending."""
        return sorted(rank for rank in self._present if self._finished.get(rank) != self._epoch)

    @property
    def leader(self) -> int:
        """Who pushes; the own rank if nobody is active."""
        return min(self.active, default=self._rank)

    @property
    def others(self) -> list[int]:
        """The other workers of the node that are there."""
        return sorted(self._present - {self._rank})

    def hand_over(self, rank: int, step: int, gradients: Gradients) -> None:
        """A member's gradients of a step, which may be ahead of or behind the own one."""
        self._contributions[rank] = step, gradients

    def finished(self, rank: int, epoch: int) -> None:
        """A member pushes nothing more before the barrier that ends ``epoch``."""
        self._finished[rank] = epoch

    def absent(self, rank: int) -> None:
        """A member is gone."""
        self._present.discard(rank)
        self._contributions.pop(rank, None)

    def behind(self, step: int) -> list[int]:
        """Members that wait for the result of a step before ``step``: their leader was lost before it told them."""
        late = [rank for rank, (theirs, _) in self._contributions.items() if theirs < step]
        for rank in late:
            del self._contributions[rank]
        return sorted(late)

    def gather(self, step: int, own: Gradients) -> dict[int, Gradients] | None:
        """All active members' gradients of a step by ascending rank; None while some are missing."""
        others = [rank for rank in self.active if rank != self._rank]
        if any(self._contributions.get(rank, (-1,))[0] != step for rank in others):
            return None
        given = {rank: self._contributions.pop(rank)[1] for rank in others}
        return dict(sorted({**given, self._rank: own}.items()))

    def pass_barrier(self, step: int) -> None:
        """All present members are active again, from ``step`` on."""
        self._epoch += 1
        self._contributions = {rank: made for rank, made in self._contributions.items() if made[0] >= step}


Exchange = Callable[[Gradients, int, Sequence[int]], None]
"""Push the gradients of so many workers, take the answers, and hand them on to these."""


class NodeExchange:
    """Steps of the worker ``rank`` of a node that pushes one sum.

    Args:
        members: the workers of the node.
        shards: all that are trained, by index.
        of: each server's shards.

    Attributes:
        bytes_pushed: of gradients handed to other workers.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        rpc: ServerRpc,
        pulled: PulledParameters,
        model: ShardedModel,
        shards: Mapping[int, Shard],
        of: Mapping[int, Sequence[Shard]],
    ) -> None:
        self.bytes_pushed = 0
        self._rank, self._node = rank, Node(rank, members)
        self._rpc, self._pulled, self._model, self._shards, self._of = rpc, pulled, model, shards, of
        self._told = False
        rpc.handlers |= {"node.push": self._take_push, "node.finish": self._take_finish}
        rpc.on_absence = self._node.absent

    def step(self, own: Gradients, exchange: Exchange) -> None:
        """Sum the node's gradients and push them, or hand them to the worker that does and wait for the answer."""
        step, handed_to = self._pulled.step, -1
        deadline = self._rpc.deadline()
        packed = pack_gradients(own)
        while self._pulled.step == step:
            if self._node.leader == self._rank:
                self._help_late()
                given = self._node.gather(step, own)
                if given is not None:
                    others = [rank for rank in given if rank != self._rank]
                    exchange(add(list(given.values()), 1.0), len(given), others)
                    return
            elif handed_to != self._node.leader:
                handed_to = self._node.leader
                self._rpc.answers.clear()
                self.bytes_pushed += packed.tensor_bytes
                with suppress(ExchangeError):  # its loss is told by its own event
                    self._rpc.send(handed_to, "node.push", {"step": step}, packed.parts)
            self._rpc.handle_next({"node.values": self._install}, deadline)

    def finish(self) -> None:
        """Tell the others that nothing more comes before the next barrier; once."""
        if self._told:
            return
        self._told = True
        self._node.finished(self._rank, self._node.epoch)
        for rank in self._node.others:
            with suppress(ExchangeError):
                self._rpc.send(rank, "node.finish", {"epoch": self._node.epoch})

    def pass_barrier(self) -> None:
        """All are active again."""
        self._told = False
        self._node.pass_barrier(self._pulled.step)

    def _take_push(self, mail: Mail) -> None:
        gradients = unpack_gradients(unpack(mail.payload), self._shards)
        self._node.hand_over(mail.sender, mail.header["step"], gradients)

    def _take_finish(self, mail: Mail) -> None:
        self._node.finished(mail.sender, mail.header["epoch"])

    def _install(self, mail: Mail) -> None:
        if mail.header["step"] > self._pulled.steps[mail.header["owner"]]:
            self._pulled.install(mail)

    def _help_late(self) -> None:
        """Members that the last leader left without an answer get this worker's copy."""
        for rank in self._node.behind(self._pulled.step):
            for owner, shards in self._of.items():
                tensors: dict[str, Part] = {str(shard.index): self._model.slices(shard) for shard in shards}
                header = {
                    "owner": owner,
                    "step": self._pulled.steps[owner],
                    "version": self._pulled.versions[owner],
                    "epoch": self._pulled.epochs[owner],
                    "progress": self._pulled.progress,
                    "partial": False,
                }
                with suppress(ExchangeError):
                    self._rpc.send(rank, "node.values", header, pack(tensors).parts)

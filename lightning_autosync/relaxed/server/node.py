"""Workers of one node that push one sum: the leader pushes, the others hand it their gradients."""

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


class ServerNode:
    """One worker's view of its node, without communication. The lowest active rank is the leader.

    Args:
        members: ranks of the node's workers, this one included.
    """

    def __init__(self, rank: int, members: Iterable[int]) -> None:
        self._rank = rank
        self._present = set(members)
        self._epoch = 0
        self._finished: dict[int, int] = {}
        self._contributions: dict[int, tuple[int, Gradients]] = {}

    @property
    def epoch(self) -> int:
        """Number of barriers passed."""
        return self._epoch

    @property
    def active(self) -> list[int]:
        """Ranks that still push before the next barrier, ascending."""
        return sorted(rank for rank in self._present if self._finished.get(rank) != self._epoch)

    @property
    def leader(self) -> int:
        """The rank that pushes; this rank if no worker is active."""
        return min(self.active, default=self._rank)

    @property
    def others(self) -> list[int]:
        """Ranks of the other present workers of the node."""
        return sorted(self._present - {self._rank})

    def hand_over(self, rank: int, step: int, gradients: Gradients) -> None:
        """Store a member's gradients of a step, which may be another step than this worker's."""
        self._contributions[rank] = step, gradients

    def finished(self, rank: int, epoch: int) -> None:
        """Note that a member pushes no more before the barrier that ends ``epoch``."""
        self._finished[rank] = epoch

    def absent(self, rank: int) -> None:
        """Remove a member that is gone."""
        self._present.discard(rank)
        self._contributions.pop(rank, None)

    def behind(self, step: int) -> list[int]:
        """Members that still wait for the result of an earlier step, because the leader was lost before it answered."""
        late = [rank for rank, (theirs, _) in self._contributions.items() if theirs < step]
        for rank in late:
            del self._contributions[rank]
        return sorted(late)

    def gather(self, step: int, own: Gradients) -> dict[int, Gradients] | None:
        """Gradients of all active members in a step, by ascending rank; None while some are missing."""
        others = [rank for rank in self.active if rank != self._rank]
        if any(self._contributions.get(rank, (-1,))[0] != step for rank in others):
            return None
        given = {rank: self._contributions.pop(rank)[1] for rank in others}
        return dict(sorted({**given, self._rank: own}.items()))

    def pass_barrier(self, step: int) -> None:
        """Make all present members active again, from ``step`` on."""
        self._epoch += 1
        self._contributions = {rank: made for rank, made in self._contributions.items() if made[0] >= step}


Exchange = Callable[[Gradients, int, Sequence[int]], None]
"""Pushes gradients, summed over a number of workers, installs the answers, and passes them on to the given ranks."""


class NodeExchange:
    """Runs the steps of one worker of a node that pushes one sum.

    Args:
        shards: all trained shards, by index.
        of: shards of each server, by its rank.
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
        self._rank, self._node = rank, ServerNode(rank, members)
        self._rpc, self._pulled, self._model, self._shards, self._of = rpc, pulled, model, shards, of
        self._told = False
        rpc.handlers |= {"node.push": self._take_push, "node.finish": self._take_finish}
        rpc.on_absence = self._node.absent

    def step(self, own: Gradients, exchange: Exchange) -> None:
        """Make a step: the leader sums and pushes the node's gradients; other workers send it theirs and wait."""
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
                # Sent again if the leader is lost: the next one may have to repeat the step.
                handed_to = self._node.leader
                self._rpc.answers.clear()
                with suppress(ExchangeError):  # the loss arrives as an event of its own
                    self._rpc.send(handed_to, "node.push", {"step": step}, packed)
            self._rpc.handle_next({"node.values": self._install}, deadline)

    def finish(self) -> None:
        """Tell the other workers that this one pushes no more before the next barrier; a second call has no effect."""
        if self._told:
            return
        self._told = True
        self._node.finished(self._rank, self._node.epoch)
        for rank in self._node.others:
            with suppress(ExchangeError):
                self._rpc.send(rank, "node.finish", {"epoch": self._node.epoch})

    def pass_barrier(self) -> None:
        """Make all workers active again."""
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
        """Send this worker's parameters to members that the last leader left without an answer."""
        for rank in self._node.behind(self._pulled.step):
            for owner, shards in self._of.items():
                tensors: dict[str, Part] = {str(shard.index): self._model.slices(shard) for shard in shards}
                header = {
                    "owner": owner,
                    "step": self._pulled.steps[owner],
                    "version": self._pulled.versions[owner],
                    "epoch": self._pulled.epochs[owner],
                    "progress": self._pulled.progress,
                }
                with suppress(ExchangeError):
                    self._rpc.send(rank, "node.values", header, pack(tensors))

"""One worker's part in its node's pushes: hand gradients over, or gather them and push their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.servers import Shard
from lightning_autosync.relaxed.mesh import Mail
from lightning_autosync.relaxed.server.correspondence import Correspondence
from lightning_autosync.relaxed.server.gradients import Gradients, add, pack_gradients, unpack_gradients
from lightning_autosync.relaxed.server.node import Node
from lightning_autosync.relaxed.server.pulled import Pulled
from lightning_autosync.relaxed.server.replica import Replica
from lightning_autosync.relaxed.server.wire import Part, pack, unpack

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
        letters: Correspondence,
        pulled: Pulled,
        replica: Replica,
        shards: Mapping[int, Shard],
        of: Mapping[int, Sequence[Shard]],
    ) -> None:
        self.bytes_pushed = 0
        self._rank, self._node = rank, Node(rank, members)
        self._letters, self._pulled, self._replica, self._shards, self._of = letters, pulled, replica, shards, of
        self._told = False
        letters.always |= {"node.push": self._take_push, "node.finish": self._take_finish}
        letters.absent = self._node.absent

    def step(self, own: Gradients, exchange: Exchange) -> None:
        """Sum the node's gradients and push them, or hand them to the worker that does and wait for the answer."""
        step, handed_to = self._pulled.step, -1
        deadline = self._letters.deadline()
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
                self._letters.answered.clear()
                self.bytes_pushed += packed.tensor_bytes
                with suppress(ExchangeError):  # its loss is told by its own event
                    self._letters.send(handed_to, "node.push", {"step": step}, packed.parts)
            self._letters.react({"node.values": self._install}, deadline)

    def finish(self) -> None:
        """Tell the others that nothing more comes before the next barrier; once."""
        if self._told:
            return
        self._told = True
        self._node.finished(self._rank, self._node.epoch)
        for rank in self._node.others:
            with suppress(ExchangeError):
                self._letters.send(rank, "node.finish", {"epoch": self._node.epoch})

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
                tensors: dict[str, Part] = {str(shard.index): self._replica.slices(shard) for shard in shards}
                header = {
                    "owner": owner,
                    "step": self._pulled.steps[owner],
                    "version": self._pulled.versions[owner],
                    "epoch": self._pulled.epochs[owner],
                    "progress": self._pulled.progress,
                    "partial": False,
                }
                with suppress(ExchangeError):
                    self._letters.send(rank, "node.values", header, pack(tensors).parts)

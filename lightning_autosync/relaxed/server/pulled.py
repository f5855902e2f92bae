"""What a worker has got from its servers: parameters, buffers, and of which step and version they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_autosync.plan.servers import ServerLayout, Shard
from lightning_autosync.relaxed.mesh import Mail
from lightning_autosync.relaxed.server.correspondence import Correspondence
from lightning_autosync.relaxed.server.replica import Replica
from lightning_autosync.relaxed.server.wire import Unpacked, unpack


class Pulled:
    """Answers of servers, installed.

    Args:
        rank: the own.

    Attributes:
        steps: this worker's steps, by the clock of each server; one that comes back may differ between them.
        versions: of each server's parameters, as far as all of them are here.
        epochs: barriers that each server had passed when it answered last.
        progress: steps that the parameters stand for.
        bytes: of parameters got from other processes.
    """

    def __init__(
        self,
        rank: int,
        layout: ServerLayout,
        replica: Replica,
        buffers: Mapping[str, Tensor],
        letters: Correspondence,
    ) -> None:
        self.steps = dict.fromkeys(layout.owners, 0)
        self.versions = dict.fromkeys(layout.owners, 0)
        self.epochs = dict.fromkeys(layout.owners, 0)
        self.progress = self.bytes = 0
        self.coordinator = layout.owners[0]
        self._rank, self._replica, self._buffers, self._letters = rank, replica, buffers, letters
        self._shards: dict[int, Sequence[Shard]] = {owner: layout.of(owner) for owner in layout.owners}

    @property
    def step(self) -> int:
        """This worker's steps, by the clock of the server that counts barriers."""
        return self.steps[self.coordinator]

    def install(self, mail: Mail) -> None:
        """Take one server's answer, be it handed on by another worker."""
        owner = mail.header.get("owner", mail.sender)
        message = unpack(mail.payload)
        self._replica.install(message, self._shards[owner])
        self._install_buffers(message)
        if mail.sender != self._rank:
            self.bytes += message.tensor_bytes
        if not mail.header["partial"]:
            self.versions[owner] = mail.header["version"]
        if owner == self.coordinator:
            self.progress = max(self.progress, int(mail.header["progress"] + 1e-6))
        self.epochs[owner] = mail.header["epoch"]
        self.note(owner, mail.header["step"])

    def note(self, owner: int, step: int) -> None:
        """A server has answered."""
        answered = self._letters.answered
        answered[owner] = step
        if answered.keys() == self._shards.keys():
            # Not before: whoever repeats a lost leader's push must name the step that it belongs to.
            self.steps.update(answered)

    @torch.no_grad()
    def _install_buffers(self, message: Unpacked) -> None:
        for name, tensor in message.tensors.items():
            if name.startswith("buffer."):
                self._buffers[name.removeprefix("buffer.")].copy_(tensor)

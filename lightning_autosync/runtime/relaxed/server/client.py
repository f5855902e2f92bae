"""The worker's side: push gradients, pull parameters; the servers step the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.errors import ExchangeError, MeshTimeout, PeerLost, PlanError
from lightning_autosync.plan.servers import ServerLayout, Shard
from lightning_autosync.plan.spec import Consistency
from lightning_autosync.runtime.relaxed.base import Synchronizer
from lightning_autosync.runtime.relaxed.mesh import Mail, Mesh
from lightning_autosync.runtime.relaxed.server import checkpoint
from lightning_autosync.runtime.relaxed.server.eager import EagerPushes
from lightning_autosync.runtime.relaxed.server.gradients import Gradients, add, pack_gradients, unpack_gradients
from lightning_autosync.runtime.relaxed.server.node import Node
from lightning_autosync.runtime.relaxed.server.protocol import TO_NODE, TO_WORKER, Absence, Deadline, Post, Setup
from lightning_autosync.runtime.relaxed.server.replica import Replica
from lightning_autosync.runtime.relaxed.server.rules import OptimizerRule, hyperparameters
from lightning_autosync.runtime.relaxed.server.server import ShardServer
from lightning_autosync.runtime.relaxed.server.wire import Packed, Part, Unpacked, pack, unpack

_CLOSING = 30.0
"""Seconds that a worker's own server may go on for the sake of other workers after this one has closed."""


class ParameterServer(Synchronizer):
    """One worker of a job whose parameters and optimizer state lie on servers, some of which may be workers too.

    With ``synchronous`` consistency all gradients of a step are averaged over the workers that have one, as DDP does,
    and a lost worker is an error. With ``bounded_staleness`` and ``asynchronous`` every worker's gradient, divided by
    the number of workers, is applied by itself when it comes: so a round of them moves plain SGD as far as one
    averaged step does. A lost worker is dropped and may come back.

    Args:
        mesh: the mesh; workers are its first ranks, server-only processes (`serve`) the others.
        parameters: name and parameter, as in ``named_parameters()``.
        layout: who keeps what.
        optimizer: an elementwise optimizer of `torch.optim`; it says how servers update, and never steps itself.
        consistency: ``synchronous``, ``bounded_staleness`` or ``asynchronous``.
        buffers: name and buffer; rank 0's at the start, floating ones averaged at barriers.
        nodes: the workers of each node, needed where the layout aggregates inside nodes.
        eager: push a shard as soon as backward has completed it; gradients must then not be changed (clipped, unscaled)
            before `step`.
        timeout: seconds to wait for others before an `ExchangeError`.

    Attributes:
        eager: the switch of eager pushes, to be off while gradients are accumulated; None without them.
        server: the server in this process; None if there is none.
        bytes_pushed: bytes of gradients sent to other processes.
        bytes_pulled: bytes of parameters got from other processes.

    Raises:
        PlanError: optimizer, parameters and layout do not fit each other.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Sequence[tuple[str, nn.Parameter]],
        layout: ServerLayout,
        optimizer: Optimizer,
        consistency: Consistency,
        *,
        buffers: Sequence[tuple[str, Tensor]] = (),
        nodes: Sequence[Sequence[int]] | None = None,
        eager: bool = False,
        timeout: float = 600.0,
    ) -> None:
        if layout.workers + layout.servers != mesh.size:
            raise PlanError(
                f"plan: {layout.workers} workers and {layout.servers} server-only ranks make no mesh of {mesh.size}"
            )
        by_name = dict(parameters)
        if missing := {piece.variable for shard in layout.shards for piece in shard.pieces} - by_name.keys():
            raise PlanError(f"plan: the model has no parameter '{min(missing)}' ({len(missing)} such)")
        self._rule = OptimizerRule.of(optimizer, {parameter: name for name, parameter in parameters})
        for shard in layout.shards:
            if shard.sparse:
                self._rule.check_sparse(shard.pieces[0].variable)
        self._parties = _parties(layout, nodes)
        if eager and layout.local_aggregation:
            raise PlanError("eager: a node's gradients are summed before they are pushed; choose one of both")
        self._mesh, self._layout, self._optimizer, self._consistency = mesh, layout, optimizer, consistency
        self._timeout = timeout
        self._buffers = dict(buffers)
        self._shapes = {name: parameter.shape for name, parameter in parameters}
        self._replica = Replica(by_name, layout)
        self._shards = {shard.index: shard for shard in layout.shards if self._is_trained(shard)}
        self._of = {owner: layout.of(owner) for owner in layout.owners}
        self._versions = dict.fromkeys(layout.owners, 0)
        self._early = dict.fromkeys(layout.owners, 0)
        self._wanted: dict[str, Tensor] = {}
        self._loaded: dict[str, Any] = {"step": 0, "progress": 0.0, "optimizer": {}}
        self._steps = dict.fromkeys(layout.owners, 0)
        self._progress = self._samples = 0
        self._closed = self._finished = False
        self.bytes_pushed = self.bytes_pulled = 0
        self._node = self._own_node() if layout.local_aggregation else None
        self.server = ShardServer(mesh) if mesh.rank in layout.owners else None
        self._post = Post(mesh, {"worker": TO_WORKER, "node": TO_NODE})
        self._answered: dict[int, int] = {}
        self.eager = EagerPushes(by_name, self._shards.values(), self._push_early) if eager else None

    # The training loop's calls

    def start(self) -> None:
        for owner in self._layout.owners:
            self._send(owner, "server.join")
        self._collect({"worker.values": self._install, "worker.empty": self._set_up})
        self._clear_step()

    def step(self, optimizer: Optimizer, samples: int) -> None:
        if optimizer is not self._optimizer:
            raise PlanError("a parameter server steps the one optimizer that it was made with")
        self._samples += samples
        if self._node is None:
            early = self.eager.pushed if self.eager else ()
            rest = [shard for shard in self._shards.values() if shard.index not in early]
            self._exchange(self._replica.gradients(rest), workers=1)
        else:
            self._exchange_in_node(self._node, self._replica.gradients(self._shards.values()))
        self._clear_step()
        # Learning-rate schedulers warn unless the optimizer has stepped, which it did, elsewhere.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    @property
    def progress(self) -> int:
        return self._progress

    def drain(self) -> None:
        self._tell_node_of_end()
        for owner in self._layout.owners:
            carried = self._float_buffers() if owner == self._coordinator else {}
            header = {"samples": self._samples, "since": self._versions[owner]}
            self._send(owner, "server.drain", header, pack(carried).parts)
        self._collect({"worker.drained": self._install})
        self._samples, self._finished = 0, False
        if self._node is not None:
            self._node.pass_barrier(self._step)

    def resume(self) -> None:
        """Nothing is left to do: servers count everybody in again at the barrier itself."""

    def finish(self) -> None:
        self._tell_node_of_end()
        for owner in self._layout.owners:
            self._send(owner, "server.finish")

    def state_dict(self) -> dict[str, Any]:
        """Step, progress, and by variable the optimizer's state, whole; the parameters are the model's own.

        Any worker may call it alone, after a drain.
        """
        pieces: dict[tuple[str, int, str], Tensor] = {}

        def keep(mail: Mail) -> None:
            message = unpack(mail.payload)
            pieces.update({(v, start, key): message.tensors[name] for name, v, start, key in message.values["states"]})
            self._answered[mail.sender] = self._steps[mail.sender]

        for owner in self._layout.owners:
            self._send(owner, "server.state")
        self._collect({"worker.state": keep})
        whole = checkpoint.join(pieces, self._layout.shards, self._shapes)
        return {"step": self._step, "progress": float(self._progress), "optimizer": whole}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, be it of another number of servers; called before `start`.

        Raises:
            ValueError: it is the state of other parameters.
        """
        checkpoint.check(state["optimizer"], self._shapes)
        self._loaded = state

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.eager is not None:
            self.eager.close()
        for owner in self._layout.owners:
            with suppress(ExchangeError):
                self._send(owner, "server.leave")
        if self.server is not None and not self.server.wait(min(_CLOSING, self._timeout)):
            self.server.stop()

    # What only a parameter server offers

    def need(self, rows: Mapping[str, Tensor]) -> None:
        """Say which rows of row-wise variables the next batch reads: the next `step` pulls no others.

        Variables that are not named are pulled as far as they changed. The other rows stay as they are until they
        are needed, or the next `drain`.

        Raises:
            PlanError: a variable has no row-wise shards, or the workers of a node pull together.
        """
        if self._node is not None:
            raise PlanError("need: the workers of a node pull together, so each gets the rows of all")
        row_wise = {shard.pieces[0].variable for shard in self._layout.shards if shard.width}
        for name in rows:
            if name not in row_wise:
                raise PlanError(f"need: '{name}' is no row-wise variable; those are: {', '.join(sorted(row_wise))}")
        self._wanted = {name: torch.unique(indices.detach().cpu()) for name, indices in rows.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state that this process keeps."""
        return self.server.state_bytes if self.server else 0

    # Beginning

    def _set_up(self, mail: Mail) -> None:
        """Rank 0 tells a server what to keep."""
        setup = Setup(
            layout=self._layout,
            rule=self._rule,
            staleness=self._staleness,
            synchronous=self._consistency.mode == "synchronous",
            parties=self._parties,
            step=self._loaded["step"],
            progress=self._loaded["progress"],
        )
        shards = self._of[mail.sender]
        tensors: dict[str, Part] = {f"values.{shard.index}": self._replica.slices(shard) for shard in shards}
        states: list[list[Any]] = []
        for (variable, start, key), tensor in checkpoint.split(self._loaded["optimizer"], shards).items():
            name = f"state.{len(states)}"
            states.append([name, variable, start, key])
            tensors[name] = tensor
        if mail.sender == self._coordinator:
            tensors |= {f"buffer.{name}": buffer for name, buffer in self._buffers.items()}
        self._send(mail.sender, "server.setup", {}, pack(tensors, {"setup": setup.to_dict(), "states": states}).parts)

    @property
    def _staleness(self) -> int | None:
        if self._consistency.mode == "asynchronous":
            return None
        return self._consistency.staleness or 0

    @property
    def _step(self) -> int:
        """This worker's steps, by the clock of one server; a worker that comes back may differ on the others'."""
        return self._steps[self._coordinator]

    @property
    def _coordinator(self) -> int:
        """The server that averages buffers."""
        return self._layout.owners[0]

    def _is_trained(self, shard: Shard) -> bool:
        return any(piece.variable in self._rule.members for piece in shard.pieces)

    def _own_node(self) -> Node:
        members = next(party for party in self._parties if self._mesh.rank in party)
        return Node(self._mesh.rank, members)

    # A step

    def _push_early(self, shard: Shard) -> None:
        packed = pack_gradients(self._replica.gradients([shard]))
        self._early[shard.owner] += 1
        self._push(shard.owner, packed, None)

    def _exchange(self, gradients: Gradients, workers: int, handed_on: Sequence[int] = ()) -> None:
        """Push, and take the servers' answers, which those who contributed get too."""
        settings = hyperparameters(self._optimizer)
        for owner, shards in self._of.items():
            own = {shard.index: gradients[shard.index] for shard in shards if shard.index in gradients}
            wanted = {
                shard.index: self._wanted[shard.pieces[0].variable]
                for shard in shards
                if shard.width and shard.pieces[0].variable in self._wanted
            }
            last = {
                "pushes": self._early[owner] + 1,
                "workers": workers,
                "settings": settings,
                "since": self._versions[owner],
                "wanted": list(wanted),
            }
            self._push(owner, pack_gradients(own, wanted), last)

        def take(mail: Mail) -> None:
            for rank in handed_on:
                with suppress(ExchangeError):  # its loss is told by its own event
                    self._send(rank, "node.values", {**mail.header, "owner": mail.sender}, [mail.payload])
            self._install(mail)

        self._collect({"worker.values": take})

    def _push(self, owner: int, packed: Packed, last: dict[str, Any] | None) -> None:
        header: dict[str, Any] = {"step": self._steps[owner]}
        if last is not None:
            header["last"] = last
        if owner != self._mesh.rank:
            self.bytes_pushed += packed.tensor_bytes
        self._send(owner, "server.push", header, packed.parts)

    def _exchange_in_node(self, node: Node, own: Gradients) -> None:
        """Sum the node's gradients and push them, or hand them to the worker that does and wait for the answer."""
        step, handed_to = self._step, -1
        deadline = Deadline(self._timeout)
        packed = pack_gradients(own)
        while self._step == step:
            if node.leader == self._mesh.rank:
                self._help_late(node)
                given = node.gather(step, own)
                if given is not None:
                    others = [rank for rank in given if rank != self._mesh.rank]
                    self._exchange(add(list(given.values()), 1.0), len(given), others)
                    return
            elif handed_to != node.leader:
                handed_to = node.leader
                self._answered.clear()
                self.bytes_pushed += packed.tensor_bytes
                with suppress(ExchangeError):  # its loss is told by its own event
                    self._send(handed_to, "node.push", {"step": step}, packed.parts)
            self._react({"node.values": self._install_handed_on}, deadline)

    def _install_handed_on(self, mail: Mail) -> None:
        if mail.header["step"] > self._steps[mail.header["owner"]]:
            self._install(mail)

    def _help_late(self, node: Node) -> None:
        """Members that the last leader left without an answer get this worker's copy."""
        for rank in node.behind(self._step):
            for owner, shards in self._of.items():
                tensors: dict[str, Part] = {str(shard.index): self._replica.slices(shard) for shard in shards}
                header = {
                    "owner": owner,
                    "step": self._steps[owner],
                    "version": self._versions[owner],
                    "progress": self._progress,
                    "partial": False,
                }
                with suppress(ExchangeError):
                    self._send(rank, "node.values", header, pack(tensors).parts)

    def _tell_node_of_end(self) -> None:
        if self._node is None or self._finished:
            return
        self._finished = True
        self._node.finished(self._mesh.rank, self._node.epoch)
        for rank in self._node.others:
            with suppress(ExchangeError):
                self._send(rank, "node.finish", {"epoch": self._node.epoch})

    def _install(self, mail: Mail) -> None:
        """Take one server's answer."""
        owner = mail.header.get("owner", mail.sender)
        message = unpack(mail.payload)
        self._replica.install(message, self._of[owner])
        self._install_buffers(message)
        if mail.sender != self._mesh.rank:
            self.bytes_pulled += message.tensor_bytes
        if not mail.header["partial"]:
            self._versions[owner] = mail.header["version"]
        if owner == self._coordinator:
            self._progress = max(self._progress, int(mail.header["progress"] + 1e-6))
        self._answered[owner] = mail.header["step"]
        if self._answered.keys() == self._of.keys():
            # Not before: whoever repeats a lost leader's push must name the step that it belongs to.
            self._steps.update(self._answered)

    @torch.no_grad()
    def _install_buffers(self, message: Unpacked) -> None:
        for name, tensor in message.tensors.items():
            if name.startswith("buffer."):
                self._buffers[name.removeprefix("buffer.")].copy_(tensor)

    def _float_buffers(self) -> dict[str, Part]:
        return {f"buffer.{name}": buffer for name, buffer in self._buffers.items() if buffer.is_floating_point()}

    def _clear_step(self) -> None:
        self._wanted = {}
        self._early = dict.fromkeys(self._early, 0)
        if self.eager is not None:
            self.eager.clear()

    # Waiting

    def _collect(self, handlers: Mapping[str, Callable[[Mail], None]]) -> None:
        """Handle messages until every server has answered."""
        self._answered.clear()
        deadline = Deadline(self._timeout)
        while self._answered.keys() != self._of.keys():
            self._react(handlers, deadline)

    def _react(self, handlers: Mapping[str, Callable[[Mail], None]], deadline: Deadline) -> None:
        """Handle one event.

        Raises:
            ExchangeError: a server is lost or failed, a worker is lost where all are needed, or time is over.
        """
        try:
            event = self._post.next(deadline.remaining)
        except MeshTimeout:
            silent = ", ".join(str(owner) for owner in self._of if owner not in self._answered)
            raise ExchangeError(
                f"no answer from the parameter servers on ranks {silent} in {deadline.seconds:g} s; one of them is "
                "stuck, or workers do not run the same steps"
            ) from None
        if event is None:
            return
        if isinstance(event, Absence):
            self._absent(event)
        elif event.kind == "worker.failed":
            raise ExchangeError(f"the parameter server on rank {event.sender} cannot go on: {event.header['error']}")
        elif event.kind == "node.push" and self._node is not None:
            gradients = unpack_gradients(unpack(event.payload), self._shards)
            self._node.hand_over(event.sender, event.header["step"], gradients)
        elif event.kind == "node.finish" and self._node is not None:
            self._node.finished(event.sender, event.header["epoch"])
        elif event.kind in handlers:
            handlers[event.kind](event)

    def _absent(self, absence: Absence) -> None:
        rank, why = absence.rank, absence.why
        if rank in self._of:
            raise _server_gone(rank, why)
        if absence.lost and rank < self._layout.workers and self._consistency.mode == "synchronous":
            raise ExchangeError(f"rank {rank} is lost ({why}), and synchronous steps need every worker")
        if self._node is not None:
            self._node.absent(rank)

    def _send(
        self,
        peer: int,
        kind: str,
        header: Mapping[str, Any] | None = None,
        parts: Sequence[memoryview | Tensor] = (),
    ) -> None:
        try:
            self._post.send(peer, kind, header, parts)
        except PeerLost as error:
            if peer in self._of:
                raise _server_gone(peer, error.why) from None
            raise


def _server_gone(rank: int, why: str) -> ExchangeError:
    return ExchangeError(
        f"the parameter server on rank {rank} is gone ({why}), and with it its part of the parameters and of the "
        "optimizer's state: start again from a checkpoint"
    )


def _parties(layout: ServerLayout, nodes: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """The workers of each party of the clock."""
    if not layout.local_aggregation:
        return tuple((rank,) for rank in range(layout.workers))
    parties = tuple(tuple(sorted(node)) for node in nodes or () if node)
    if sorted(rank for party in parties for rank in party) != list(range(layout.workers)):
        raise PlanError(
            f"nodes: local_aggregation needs the node of each of {layout.workers} workers, once; got {parties}"
        )
    return parties

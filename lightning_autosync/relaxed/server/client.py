"""The worker's side of parameter servers: it pushes gradients and pulls parameters; servers step the optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.engine.replicas import bit_sum
from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.plan.servers import ServerLayout, Shard
from lightning_autosync.plan.spec import Consistency
from lightning_autosync.relaxed.base import Drain, Synchronizer
from lightning_autosync.relaxed.model_state import has_mean
from lightning_autosync.relaxed.server.gradients import Gradients, pack_gradients
from lightning_autosync.relaxed.server.node import NodeExchange
from lightning_autosync.relaxed.server.optimizer import OptimizerRule, check, hyperparameters, join
from lightning_autosync.relaxed.server.own_changes import OwnChanges
from lightning_autosync.relaxed.server.protocol import Setup, pack_setup, parties_of
from lightning_autosync.relaxed.server.rpc import PulledParameters, ServerRpc, whole_steps
from lightning_autosync.relaxed.server.server import ShardServer
from lightning_autosync.relaxed.server.shards import ShardedModel
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.relaxed.transport.payload import Part, pack, unpack

_CLOSING = 30.0
"""Seconds that the server in a worker's process continues for other workers after this worker has closed."""


class ParameterServer(Synchronizer):
    """One worker of a job whose parameters and optimizer state are kept by servers. A worker may also run a server.

    With ``synchronous`` consistency, the gradients of a step are averaged over the workers, as in DDP, and the loss or
    departure of a worker is an error. With ``bounded_staleness`` and ``asynchronous``, each worker's gradient, divided
    by the number of workers, is applied separately when it arrives. One gradient of each worker then moves plain SGD as
    far as one averaged step does. A lost worker is dropped and may return.

    Args:
        mesh: the mesh; workers are its first ranks, server-only processes (`serve`) the others.
        parameters: names and parameters, as in ``named_parameters()``.
        optimizer: an elementwise optimizer of `torch.optim`. It defines the servers' update and never steps itself.
        consistency: a consistency of mode ``synchronous``, ``bounded_staleness`` or ``asynchronous``.
        buffers: names and buffers, and perhaps frozen parameters; rank 0's at the start. At barriers, floating-point
            and complex ones are averaged, frozen parameters over the workers that changed them. In synchronous mode,
            all buffers follow rank 0, as in DDP.
        nodes: the workers of each node; needed if the layout aggregates inside nodes.
        timeout: seconds to wait for other processes before an `ExchangeError`.

    Attributes:
        server: the server in this process; None if there is none.

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
        buffers: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]] = (),
        nodes: Sequence[Sequence[int]] | None = None,
        timeout: float = 600.0,
    ) -> None:
        if layout.workers + layout.servers != mesh.size:
            raise PlanError(
                f"plan: {layout.workers} workers and {layout.servers} server-only ranks do not match a mesh of "
                f"{mesh.size} ranks"
            )
        by_name = dict(parameters)
        if missing := {piece.variable for shard in layout.shards for piece in shard.pieces} - by_name.keys():
            raise PlanError(f"plan: the model has no parameter '{min(missing)}' ({len(missing)} missing in all)")
        self._rule = OptimizerRule.of(optimizer, {parameter: name for name, parameter in parameters})
        for shard in layout.shards:
            if shard.sparse:
                self._rule.check_sparse(shard.pieces[0].variable)
        self._parties = parties_of(layout, nodes)
        self._mesh, self._layout, self._optimizer, self._consistency = mesh, layout, optimizer, consistency
        self._timeout = timeout
        # A mapping is not copied: it can look up buffers again that a module has replaced.
        self._buffers = buffers if isinstance(buffers, Mapping) else dict(buffers)
        self._shapes = {name: parameter.shape for name, parameter in parameters}
        self._model = ShardedModel(by_name, layout)
        kept = sorted({piece.variable for shard in layout.shards for piece in shard.pieces})
        self._own_changes = OwnChanges({name: by_name[name] for name in kept}, consistency.mode)
        self._shards = {shard.index: shard for shard in layout.shards if self._is_trained(shard)}
        self._of = {owner: layout.of(owner) for owner in layout.owners}
        self._loaded: dict[str, Any] = {"step": 0, "progress": 0.0, "optimizer": {}}
        self._samples = 0
        self._sums: dict[str, int] = {}
        """`bit_sum` of each frozen parameter as of the last barrier, by name."""
        self._closed = False
        self.server = ShardServer(mesh) if mesh.rank in layout.owners else None
        in_step = consistency.mode == "synchronous"
        self._rpc = ServerRpc(mesh, layout, in_step, timeout)
        self._pulled = PulledParameters(layout, self._model, self._buffers, self._rpc)
        self._node = self._join_node() if layout.local_aggregation else None

    # Methods for the training loop

    def start(self) -> None:
        self._warn_of_whole_steps()
        for owner in self._layout.owners:
            self._rpc.send(owner, "server.join")
        self._rpc.collect({"worker.values": self._pulled.install, "worker.empty": self._set_up})
        self._loaded = {**self._loaded, "optimizer": {}}  # the servers have it now, so free the memory
        self._catch_up()
        self._sums = self._frozen_sums()
        self._own_changes.met()

    def step(self, optimizer: Optimizer, samples: int) -> None:
        if optimizer is not self._optimizer:
            raise PlanError("optimizer: a parameter server can step only the optimizer that it was created with")
        self._samples += samples
        self._own_changes.check()
        with self._waiting("servers"):
            gradients = self._model.gradients(self._shards.values())
            if self._node is None:
                self._exchange(gradients, 1, ())
            else:
                self._node.step(gradients, self._exchange)
        self._own_changes.stepped()
        # Learning-rate schedulers warn unless the local optimizer has stepped. Here the servers' optimizers step.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    @property
    def progress(self) -> int:
        return self._pulled.progress

    def drain(self) -> None:
        self._own_changes.check()
        if self._node is not None:
            self._node.finish()
        for owner in self._layout.owners:
            carried = self._carried_buffers() if owner == self._pulled.coordinator else {}
            header = {"samples": self._samples, "since": self._pulled.versions[owner]}
            self._rpc.send(owner, "server.drain", header, pack(carried))
        met: list[frozenset[int]] = []
        tables: dict[int, int] = {}

        def pass_barrier(mail: Mail) -> None:
            met.append(frozenset(mail.header["met"]))
            tables.update({int(index): number for index, number in mail.header["tables"].items()})
            self._pulled.install(mail)

        self._rpc.collect({"worker.drained": pass_barrier})
        self._check_tables(tables)
        ranks = frozenset.intersection(*met)
        self.last_drain = Drain(max(self._pulled.epochs.values()), dict.fromkeys(sorted(ranks), 1))
        self._samples, self._sums = 0, self._frozen_sums()
        self._own_changes.met()
        if self._node is not None:
            self._node.pass_barrier()

    def _check_tables(self, sums: Mapping[int, int]) -> None:
        """Compare tables with the servers' (`bit_sum` by shard), because answers replace only their changed rows."""
        tables = [shard for shard in self._layout.shards if shard.index in sums]
        unlike = (shard for shard in tables if int(bit_sum(self._model.slices(shard))) != sums[shard.index])
        self._own_changes.refuse(shard.pieces[0].variable for shard in unlike)

    def resume(self) -> None:
        """Do nothing: servers already count all workers as active again at the barrier."""

    def finish(self) -> None:
        if self._node is not None:
            self._node.finish()
        for owner in self._layout.owners:
            self._rpc.send(owner, "server.finish")

    def state_dict(self) -> dict[str, Any]:
        """Step, progress, and the complete state of the optimizer by variable; parameters are in the model's own state.

        A single worker may call this, after a drain.
        """
        pieces: dict[tuple[str, int, str], Tensor] = {}

        def keep(mail: Mail) -> None:
            message = unpack(mail.payload)
            pieces.update({(v, start, key): message.tensors[name] for name, v, start, key in message.values["states"]})
            self._pulled.note(mail.sender, self._pulled.steps[mail.sender])

        for owner in self._layout.owners:
            self._rpc.send(owner, "server.state")
        self._rpc.collect({"worker.state": keep})
        whole = join(pieces, self._layout.shards, self._shapes)
        return {"step": self._pulled.step, "progress": float(self.progress), "optimizer": whole}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, also one of another number of servers; call this before `start`.

        The state of rank 0 counts. If all ranks load it, all of them report its faults.

        Raises:
            PlanError: the state is of other parameters.
        """
        check(state["optimizer"], self._shapes)
        self._loaded = state
        self._pulled.progress = whole_steps(state["progress"])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for owner in self._layout.owners:
            with suppress(ExchangeError):
                self._rpc.send(owner, "server.leave")
        # Without a mesh, no worker can reach the server, so there is nothing to wait for.
        seconds = 0.0 if self._mesh.closed or self._mesh.error is not None else min(_CLOSING, self._timeout)
        if self.server is not None and not self.server.wait(seconds):
            self.server.stop()
        self._rpc.close()

    @property
    def state_bytes(self) -> int:
        return self.server.state_bytes if self.server else 0

    # Start

    def _warn_of_whole_steps(self) -> None:
        """Warn, on rank 0, of an optimizer that moves further by parts of a gradient than by their sum."""
        parties, rule = len(self._parties), self._rule
        if self._mesh.rank != 0 or self._consistency.mode == "synchronous" or parties == 1 or rule.adds_up:
            return
        warnings.warn(
            f"optimizer: under mode '{self._consistency.mode}' servers make {parties} steps of {rule.name} where DDP "
            "makes one: one for each gradient that arrives, divided by the number of ranks. Only SGD without momentum "
            f"and weight decay then moves as far as under DDP. Optimizers like Adam move up to {parties} times as far, "
            f"weight decay acts {parties} times as often, and momentum lasts for fewer samples; choose the learning "
            "rate, weight decay and momentum for that",
            stacklevel=2,
        )

    def _set_up(self, mail: Mail) -> None:
        """Send a server its shards and settings (rank 0)."""
        setup = Setup(
            layout=self._layout,
            rule=self._rule,
            staleness=self._staleness,
            synchronous=self._consistency.mode == "synchronous",
            parties=self._parties,
            step=self._loaded["step"],
            progress=self._loaded["progress"],
        )
        buffers = self._buffers if mail.sender == self._pulled.coordinator else {}
        shards = self._of[mail.sender]
        packed = pack_setup(setup, shards, self._model, self._loaded["optimizer"], buffers)
        self._rpc.send(mail.sender, "server.setup", {}, packed)

    def _catch_up(self) -> None:
        """Arrive at the barrier of servers that are one barrier behind the others.

        A worker that returns may reach some servers before a barrier and others after it. The former wait for it there,
        and all other workers wait for them.
        """
        epochs, newest = self._pulled.epochs, max(self._pulled.epochs.values())
        behind = [owner for owner, epoch in epochs.items() if epoch < newest]
        for owner in behind:
            header = {"samples": 0, "since": self._pulled.versions[owner]}
            self._rpc.send(owner, "server.drain", header, pack({}))
        known = {owner: step for owner, step in self._pulled.steps.items() if owner not in behind}
        self._rpc.collect({"worker.drained": self._pulled.install}, known)

    @property
    def _staleness(self) -> int | None:
        if self._consistency.mode == "asynchronous":
            return None
        return self._consistency.staleness or 0

    def _is_trained(self, shard: Shard) -> bool:
        return any(piece.variable in self._rule.members for piece in shard.pieces)

    def _join_node(self) -> NodeExchange:
        rank = self._mesh.rank
        members = next(party for party in self._parties if rank in party)
        return NodeExchange(rank, members, self._rpc, self._pulled, self._model, self._shards, self._of)

    # A step

    def _exchange(self, gradients: Gradients, workers: int, handed_on: Sequence[int]) -> None:
        """Push gradients, install the servers' answers, and pass them on to other workers of the node.

        Args:
            gradients: gradients to push, by shard.
            workers: number of workers in the sum.
            handed_on: ranks that get copies of the answers.
        """
        settings = hyperparameters(self._optimizer)
        for owner, shards in self._of.items():
            own = {shard.index: gradients[shard.index] for shard in shards if shard.index in gradients}
            header = {
                "step": self._pulled.steps[owner],
                "workers": workers,
                "settings": settings,
                "since": self._pulled.versions[owner],
            }
            self._rpc.send(owner, "server.push", header, pack_gradients(own))

        def take(mail: Mail) -> None:
            for rank in handed_on:
                with suppress(ExchangeError):  # the loss arrives as an event of its own
                    self._rpc.send(rank, "node.values", {**mail.header, "owner": mail.sender}, [mail.payload])
            self._pulled.install(mail)

        self._rpc.collect({"worker.values": take})

    def _carried_buffers(self) -> dict[str, Part]:
        """Tensors to send at a barrier: in synchronous mode rank 0's buffers, as in DDP, otherwise all floating-point
        and complex buffers, and the frozen parameters that this worker has changed.
        """
        sums = self._frozen_sums()
        if self._consistency.mode == "synchronous":
            chosen = [name for name in self._buffers if self._mesh.rank == 0 and name not in sums]
        else:
            kept = {name for name, number in sums.items() if number == self._sums[name]}
            chosen = [name for name, one in self._buffers.items() if has_mean(one) and name not in kept]
        return {f"buffer.{name}": self._buffers[name] for name in chosen}

    def _frozen_sums(self) -> dict[str, int]:
        """Numbers that change with the values of frozen parameters, by name."""
        tensors = self._buffers.items()
        return {name: int(bit_sum(one.detach())) for name, one in tensors if isinstance(one, nn.Parameter)}

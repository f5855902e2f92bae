"""The server: a thread that keeps shards, applies pushed gradients, and answers when the clock allows it."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.replicas import bit_sum
from lightning_autosync.errors import AutoSyncError, ExchangeError
from lightning_autosync.plan.servers import Shard
from lightning_autosync.relaxed.server.clock import Barrier, Push, StalenessClock, read_push
from lightning_autosync.relaxed.server.gradients import add
from lightning_autosync.relaxed.server.protocol import TO_SERVER, Setup
from lightning_autosync.relaxed.server.rpc import Absence, BadMessageError, Event, EventQueue, attributed_to
from lightning_autosync.relaxed.server.store import ShardStore
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.relaxed.transport.payload import Part, pack, unpack


class ShardServer:
    """A parameter server, in a worker's process or in its own. Rank 0 sends it its shards.

    Args:
        mesh: the mesh; the server must be made before any worker starts to synchronize.

    Attributes:
        failure: reason why the server cannot continue; empty while it can.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.failure = ""
        self._mesh = mesh
        self._setup: Setup | None = None
        self._store: ShardStore
        self._clock: StalenessClock
        self._barrier: Barrier
        self._shards: dict[int, Shard] = {}
        self._party_of: dict[int, int] = {}
        self._present: set[int] = set()
        self._newcomers: set[int] = set()
        self._whole: dict[int, Push] = {}
        self._readers: dict[int, int] = {}
        """Version of the parameters that each rank has which waits for its next step."""
        self._gone: set[int] = set()
        self._idle: set[int] = set()
        self._events = EventQueue(mesh, {"server": TO_SERVER})
        self._thread = threading.Thread(target=self._serve, name="autosync-server", daemon=True)
        self._thread.start()

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state kept here."""
        return self._store.state_bytes if self._setup else 0

    def wait(self, timeout: float | None = None) -> bool:
        """Block until every worker has left or is lost; False if that takes longer than ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End at once, even if workers still need the server."""
        self._events.wake()
        self._thread.join()

    def _serve(self) -> None:
        while (event := self._events.next()) is not None:
            self._handle(event)
            if self._deserted:
                if isinstance(event, Absence) and event.lost:
                    self.failure = self.failure or f"rank {event.rank} is lost ({event.why}), and no worker is left"
                break
        self._events.close()

    def _handle(self, event: Event) -> None:
        try:
            self._take(event)
        except BadMessageError as bad:
            self._refuse(bad)
        except Exception as cause:
            known = isinstance(cause, AutoSyncError)
            self._fail(str(cause) if known else f"{type(cause).__name__}: {cause}\n{traceback.format_exc()}")

    @property
    def _deserted(self) -> bool:
        if self._setup is None:
            # Only rank 0 can set the server up.
            return 0 in self._gone
        return not self._present

    def _take(self, event: Event) -> None:
        if isinstance(event, Absence):
            self._absent(event)
        elif event.kind == "server.leave":
            self._absent(Absence(event.sender, "it has left", False))
        elif self.failure:
            self._tell(event.sender, "worker.failed", {"error": self.failure})
        elif event.kind not in ("server.join", "server.setup") and event.sender not in self._present:
            self._tell(
                event.sender, "worker.failed", {"error": f"rank {event.sender} was expelled; it must join again"}
            )
        else:
            handlers: dict[str, Callable[[Mail], None]] = {
                "server.join": self._join,
                "server.setup": self._begin,
                "server.push": self._pushed,
                "server.finish": lambda mail: self._done(mail.sender),
                "server.drain": self._drain,
                "server.state": self._give_state,
            }
            handlers[event.kind](event)

    def _refuse(self, bad: BadMessageError) -> None:
        """Treat a worker that sent nonsense as lost, so that it does not end the others."""
        self._tell(bad.rank, "worker.failed", {"error": str(bad)})
        self._absent(Absence(bad.rank, str(bad), True))

    # Start

    def _join(self, mail: Mail) -> None:
        self._gone.discard(mail.sender)
        if self._setup is not None:
            self._take_back(mail.sender)
        elif mail.sender == 0:
            self._tell(0, "worker.empty")
        else:
            self._newcomers.add(mail.sender)

    def _begin(self, mail: Mail) -> None:
        message = unpack(mail.payload)
        setup = Setup.from_dict(message.values["setup"])
        own = setup.layout.of(self._mesh.rank)
        values = {shard.index: message.tensors[f"values.{shard.index}"].clone() for shard in own}
        store = ShardStore(own, setup.rule, values)
        states = {(v, start, key): message.tensors[name] for name, v, start, key in message.values["states"]}
        store.load_states(states)
        buffers = {name: tensor.clone() for name, tensor in message.tensors.items() if name.startswith("buffer.")}
        self._clock = StalenessClock(range(len(setup.parties)), setup.staleness)
        self._clock.restore(setup.step, setup.progress)
        self._party_of = {rank: party for party, ranks in enumerate(setup.parties) for rank in ranks}
        self._shards = {shard.index: shard for shard in own}
        self._present = set(self._party_of) - self._gone
        self._store, self._barrier, self._setup = store, Barrier(buffers), setup
        for party in self._clock.parties:
            self._drop_idle(party)
        for rank in sorted({0, *self._newcomers}):
            self._admit(rank)
        self._newcomers.clear()

    def _take_back(self, rank: int) -> None:
        if self._setup is not None and self._setup.layout.local_aggregation and rank not in self._present:
            why = f"rank {rank} cannot rejoin: with local_aggregation all ranks must start again"
            self._tell(rank, "worker.failed", {"error": why})
        else:
            self._admit(rank)

    def _admit(self, rank: int) -> None:
        party = self._party_of[rank]
        self._present.add(rank)
        self._idle.discard(rank)
        step = self._clock.steps[party] if party in self._clock else self._clock.add(party)
        self._answer(rank, 0, "worker.values", step, everything=True)

    # Steps

    def _pushed(self, mail: Mail) -> None:
        assert self._setup is not None
        rank, party = mail.sender, self._party_of[mail.sender]
        with attributed_to(rank):
            if party not in self._clock:
                raise ExchangeError("gradients came after the worker had finished")
            push = read_push(mail, self._shards, self._setup.rule.groups)
        self._require_everybody()
        self._readers[rank] = push.since
        for waiting in self._barrier.arrived:
            self._tell(waiting, "worker.extend")
        self._completed(party, push)
        self._go_on()

    def _completed(self, party: int, push: Push) -> None:
        # The new leader of a node may repeat a push of the lost leader.
        if push.step < self._clock.steps[party]:
            return
        assert self._setup is not None
        if self._setup.synchronous:
            self._whole[party] = push
        else:
            share = 1.0 / self._setup.layout.workers
            self._store.update(add([push.gradients], share), push.settings)
            # A party that waits at the barrier still counts: it made its own part of these steps before.
            self._clock.advance(party, 1.0 / len({self._party_of[rank] for rank in self._present}))

    def _go_on(self) -> None:
        """Apply a complete synchronous step, and answer workers that may read now."""
        if self._whole and all(party in self._whole for party in self._clock.parties):
            pushes = [self._whole.pop(party) for party in sorted(self._whole)]
            workers = sum(push.workers for push in pushes)
            total = add([push.gradients for push in pushes], 1.0 / workers)
            self._store.update(total, pushes[0].settings)
            for party in self._clock.parties:
                self._clock.advance(party, 1.0 / len(self._clock.parties))
        for rank, since in sorted(self._readers.items()):
            party = self._party_of[rank]
            if party not in self._whole and self._clock.may_read(party):
                del self._readers[rank]
                self._answer(rank, since, "worker.values", self._clock.steps[party])

    def _answer(
        self,
        rank: int,
        since: int,
        kind: str,
        step: int,
        everything: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
        **facts: Any,
    ) -> None:
        """Send parameters: dense shards completely, of tables only the rows that changed after version ``since``."""
        assert self._setup is not None
        tensors: dict[str, Part] = {}
        for index, shard in self._shards.items():
            if shard.width and not everything:
                rows = self._store.changed_rows(index, since)
                tensors[f"{index}.rows"], tensors[f"{index}.values"] = rows.indices, rows.values
            else:
                values = self._store.values(index)
                # A synchronous update happens only after all workers have read; others may happen during the transfer.
                tensors[str(index)] = values if self._setup.synchronous else values.clone()
        tensors |= self._barrier.buffers if everything else buffers or {}
        header = {
            "step": step,
            "epoch": self._barrier.passed,
            "version": self._store.version,
            "progress": self._clock.progress,
            "met": sorted(self._barrier.met),
            **facts,
        }
        self._tell(rank, kind, header, pack(tensors))

    # Finish, barriers and losses

    def _done(self, rank: int) -> None:
        """Note that a worker pushes no more before the next barrier."""
        self._idle.add(rank)
        self._drop_idle(self._party_of[rank])
        self._go_on()

    def _drop_idle(self, party: int) -> None:
        """Stop waiting for a party if all its workers have finished or are gone."""
        assert self._setup is not None
        if not any(rank in self._present and rank not in self._idle for rank in self._setup.parties[party]):
            self._whole.pop(party, None)
            self._clock.drop(party)

    def _drain(self, mail: Mail) -> None:
        with attributed_to(mail.sender):
            message = unpack(mail.payload)
            samples, since = int(mail.header["samples"]), int(mail.header["since"])
        self._require_everybody()
        self._barrier.arrive(mail.sender, samples, since, message.tensors)
        self._done(mail.sender)
        self._release()

    def _release(self) -> None:
        """Answer all workers at the barrier if the last one has come."""
        if not self._barrier.arrived or not self._present <= self._barrier.arrived.keys():
            return
        self._idle.clear()
        for party in {self._party_of[rank] for rank in self._present}:
            self._clock.add(party)
        step = self._clock.align()
        arrived, buffers = self._barrier.leave()
        tables = {
            str(index): int(bit_sum(self._store.values(index))) for index, shard in self._shards.items() if shard.width
        }
        for rank, since in sorted(arrived.items()):
            if rank in self._present:
                self._answer(rank, since, "worker.drained", step, buffers=buffers, tables=tables)

    def _give_state(self, mail: Mail) -> None:
        tensors: dict[str, Part] = {}
        states: list[list[Any]] = []
        for (variable, start, key), tensor in self._store.states():
            name = f"state.{len(states)}"
            tensors[name] = tensor.clone()
            states.append([name, variable, start, key])
        self._tell(mail.sender, "worker.state", {}, pack(tensors, {"states": states}))

    def _absent(self, absence: Absence) -> None:
        self._gone.add(absence.rank)
        self._newcomers.discard(absence.rank)
        if self._setup is None or absence.rank not in self._present:
            return
        rank = absence.rank
        self._present.discard(rank)
        self._readers.pop(rank, None)
        self._barrier.forget(rank)
        if absence.lost and self._setup.synchronous:
            self._fail(f"rank {rank} is lost ({absence.why}), and synchronous steps need every worker")
            return
        if self._readers or self._barrier.arrived:
            self._require_everybody()
        self._drop_idle(self._party_of[rank])
        self._go_on()
        self._release()

    def _require_everybody(self) -> None:
        """Check that no worker has left, because a synchronous step needs all of them.

        Raises:
            ExchangeError: a worker has left in synchronous mode.
        """
        assert self._setup is not None
        absent = sorted(self._party_of.keys() - self._present)
        if absent and self._setup.synchronous:
            raise ExchangeError(f"rank {absent[0]} has left, and synchronous steps need every worker")

    def _fail(self, why: str) -> None:
        self.failure = self.failure or why
        workers = self._present if self._setup else set(range(self._mesh.size)) & self._mesh.live
        for rank in sorted(workers):
            self._tell(rank, "worker.failed", {"error": self.failure})

    def _tell(self, rank: int, kind: str, header: Mapping[str, Any] | None = None, parts: Any = ()) -> None:
        # If the worker is gone, an event of its own reports that.
        with suppress(ExchangeError):
            self._mesh.send(rank, kind, header or {}, parts)


def serve(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    secret: bytes,
    address: str | None = None,
    timeout: float = 600.0,
    heartbeat: HeartbeatSettings | None = None,
) -> None:
    """Run a server-only process: keep and update the shards of this rank until the last worker has left.

    Args:
        store: the store at which all processes of the job meet.
        rank: rank of this process; ranks of server-only processes follow those of the workers.
        size: number of workers and server-only processes.
        secret: the job's secret.
        address: address of this process in the cluster's network; by default the one that faces ``MASTER_ADDR``.
        timeout: seconds in which all processes must meet.
        heartbeat: settings for the loss of silent processes.

    Raises:
        ExchangeError: processes did not meet in time, the others have expelled this process, or the server failed, for
            example because its last worker was lost.
    """
    mesh = Mesh.open(store, rank, size, secret=secret, address=address, timeout=timeout, heartbeat=heartbeat)
    try:
        server = ShardServer(mesh)
        server.wait()
        if mesh.error is not None:
            raise mesh.error
    finally:
        mesh.close()
    if server.failure:
        raise ExchangeError(server.failure)

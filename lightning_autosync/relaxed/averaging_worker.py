"""Workers that average their models within groups: the base, and partial reduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_autosync.engine.replicas import bit_sum
from lightning_autosync.errors import ExchangeError, GroupBroken, PeerLost
from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.base import Drain, Synchronizer
from lightning_autosync.relaxed.controller import RANK, Controller, ControllerClient
from lightning_autosync.relaxed.coordinator import Coordinator
from lightning_autosync.relaxed.group_average import GroupAverage
from lightning_autosync.relaxed.grouping import Grouping
from lightning_autosync.relaxed.model_state import (
    DonatedOptimizer,
    FlatView,
    ModelTensors,
    model_bytes,
    optimizer_averages,
    optimizer_slots,
    pack_optimizer,
    take_bytes,
)
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import as_bytes, payload_size
from lightning_autosync.relaxed.transport.payload import Packed, pack

ATTEMPTS = 20
"""Number of groups that may break in a row before a worker gives up."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
"""Seconds before a request for another group. The pause doubles after each broken group, because the other workers may
need time to notice who is lost."""

_MODEL = "worker.model"


class WorkerGroup(NamedTuple):
    """Workers that averaged together.

    Attributes:
        generation: number of the group.
        members: ranks, ascending.
        bridging: whether the group had to connect workers that shared no recent groups (see `IsolationGuard`).
        active: number of workers in training when the group was formed; 0 at a barrier.
    """

    generation: int
    members: tuple[int, ...]
    bridging: bool = False
    active: int = 0


class AveragingWorker(Synchronizer):
    """A worker that averages its model within groups that rank 0's controller forms.

    A group breaks if a member is lost. Members without the complete average keep their own model and ask for another
    group. Members that already have the average keep it: agreement would cost every group another round of messages.
    Averages are atomic (all members commit or none does) only at a barrier (:meth:`drain`) and in periodic averaging,
    where all workers must stay in step.

    A worker that returns takes the model of a waiting worker and the state of that worker's optimizer (running averages
    and step counts). It keeps its own hyperparameters.

    Args:
        mesh: the mesh, whose ranks are the workers; owned by the caller.
        model: this worker's tensors, changed in place.
        coordinator: the coordinator on rank 0; None on other ranks.
        timeout: seconds to wait for other workers, at a barrier or for a group.
        stall: seconds without progress after which a group's average fails.
        momentum: whether the optimizer's running averages are averaged together with the parameters; at a barrier only
            those of workers that have made a step count.

    Attributes:
        group: the last group of this worker; None before the first.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: ModelTensors,
        coordinator: Coordinator | None,
        timeout: float,
        stall: float,
        momentum: bool,
    ) -> None:
        if (coordinator is None) is (mesh.rank == RANK):
            raise ExchangeError(f"rank {RANK} must have the coordinator, and no other rank")
        self._mesh, self._model, self._timeout = mesh, model, timeout
        self._average = GroupAverage(mesh, stall)
        # The controller names the ranks that do not come. This longer timeout is only for a silent controller.
        self._client = ControllerClient(mesh, timeout + stall)
        self._controller = Controller(mesh, coordinator) if coordinator is not None else None
        self.group: WorkerGroup | None = None
        self._averages_momentum = momentum
        self._optimizer: Optimizer | None = None
        """The optimizer of the last step."""
        self._donated: DonatedOptimizer | None = None
        self._iteration = 0
        self._samples = 0
        self._misplaced = ""
        self._closed = False

    @property
    def progress(self) -> int:
        return self._iteration

    def start(self) -> None:
        self._client.send("start")
        while True:
            kind, header = self._client.receive("donate", "take")
            if kind == "donate":
                self._donate(header["takers"], steps_back=0)
                return
            try:
                self._take(header["donor"], header["visit"])
                self.joined_after = header["drained"]
                return
            except PeerLost as cause:
                if cause.peer != header["donor"] or cause.peer == RANK:
                    raise
                self._client.send("start")

    def drain(self) -> None:
        parameters, frozen = self._model.parameters, self._model.frozen
        common = [*parameters, *self._model.buffers, *self._drained_state()]

        def view(group: dict[str, Any]) -> FlatView:
            unlike = [frozen[place] for place in group["unlike"]]
            return FlatView([*common, *unlike, *self._momenta(parameters, group["averages"])])

        elements = sum(FlatView([*common, *frozen]).sizes)
        # Frozen parameters that are equal need no average, which would round them.
        sums = [int(bit_sum(parameter.detach())) for parameter in frozen]
        facts = {"frozen": sums, **self._momentum_facts(parameters)}
        group, average = self._average_with_group("arrive", elements, lambda group: view(group).pack(), **facts)
        view(group).unpack(average)
        self._iteration, self._samples = group["iteration"], 0
        self.last_drain = Drain(group["generation"], dict(zip(group["members"], group["visits"], strict=True)))
        self._misplaced = "call resume() after drain()"
        self._after_drain(group)

    def resume(self) -> None:
        self._misplaced = ""

    def finish(self) -> None:
        self._client.send("done")
        self._misplaced = "finish() was called; only drain() may follow"

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self._iteration,
            "controller": self._controller.state() if self._controller else None,
            **self._own_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iteration = state["iteration"]
        if self._controller is not None and state["controller"] is not None:
            self._controller.restore(state["controller"])
        self._load_own_state(state)

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._drained_state())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(ExchangeError):  # rank 0 may have closed already
            self._client.send("leave")
        if self._controller is not None:
            self._controller.close()
        self._average.close()

    # Hooks for periodic averaging; partial reduce needs none of them

    def _drained_state(self) -> list[Tensor]:
        """Tensors that a barrier averages in addition to the model."""
        return []

    def _after_drain(self, group: dict[str, Any]) -> None:
        """Called when the model is the common average of a barrier, with the header of its group."""

    def _own_state(self) -> dict[str, Any]:
        """Additional entries of :meth:`state_dict`."""
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Load the entries that :meth:`_own_state` returned."""

    def _rejoin_state(self, steps_back: int) -> tuple[dict[str, Any], list[Tensor]]:
        """State that a returning worker needs in addition to the model: JSON data as of ``steps_back`` steps ago, and
        tensors, whose shapes are the same on all workers.
        """
        return {}, []

    def _load_rejoin_state(self, facts: dict[str, Any]) -> None:
        """Load the JSON data of :meth:`_rejoin_state`; its tensors are already loaded."""

    # Local steps

    def _step_locally(self, optimizer: Optimizer, samples: int) -> None:
        if self._misplaced:
            raise ExchangeError(f"step() is not allowed now: {self._misplaced}")
        if self._donated is not None:
            self._donated.give_to(optimizer, self._model.parameters)
        self._optimizer, self._donated = optimizer, None
        optimizer.step()
        self._iteration += 1
        self._samples += samples

    def _momentum_facts(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Fields of a request about the optimizer's running averages: their names, if they are averaged."""
        if not self._averages_momentum:
            return {}
        return {"averages": optimizer_averages(self._optimizer, parameters) if self._optimizer else []}

    def _momenta(self, parameters: Sequence[Tensor], names: Sequence[str]) -> list[Tensor | int]:
        """The optimizer's running averages with these names; before the first step, their numbers of elements."""
        if self._optimizer is not None:
            return optimizer_slots(self._optimizer, parameters, names)
        sizes: list[Tensor | int] = [*FlatView(parameters).sizes]
        return sizes * len(names)

    # Groups

    def _average_with_group(
        self, kind: str, elements: int, flat_for: Callable[[dict[str, Any]], Tensor], **facts: Any
    ) -> tuple[dict[str, Any], Tensor]:
        """Ask for a group and average with it; ask again if the group breaks.

        Args:
            kind: kind of the request, ``ready`` or ``arrive``.
            elements: number of elements that must be equal on all members, without those of running averages.
            flat_for: makes the flat buffer to average, from the group's header.
            **facts: further fields of the request.

        Returns:
            The header of the group, and the average, in memory that the next call reuses.

        Raises:
            ExchangeError: too many groups broke in a row, or the controller stopped or is lost.
        """
        with self._waiting("average"):
            for attempt in range(ATTEMPTS):
                if attempt:
                    time.sleep(min(_SHORTEST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))
                self._client.send(kind, iteration=self._iteration, samples=self._samples, elements=elements, **facts)
                group = self._await_group(steps_back=int(kind == "ready"))
                average = self._try(group, flat_for(group))
                if average is not None:
                    return group, average
        raise ExchangeError(f"{ATTEMPTS} groups failed in a row; the last had ranks {group['members']}")

    def _await_group(self, steps_back: int) -> dict[str, Any]:
        """Wait for the group; returns its header. Meanwhile, give this worker's model to workers that return.

        Args:
            steps_back: steps of this worker since the last group. The step count that a returning worker gets excludes
                them.
        """
        while True:
            kind, header = self._client.receive("donate", "group")
            if kind == "group":
                bridging, active = header.get("bridging", False), header.get("active", 0)
                self.group = WorkerGroup(header["generation"], tuple(header["members"]), bridging, active)
                return header
            self._donate(header["takers"], steps_back)

    def _try(self, group: dict[str, Any], flat: Tensor) -> Tensor | None:
        """The average; None if the group broke."""
        average = self._run(group, flat)
        generation = group["generation"]
        if average is None:
            self._client.send("broken", generation=generation, number=group.get("number"))
        elif group["atomic"]:
            self._client.send("complete", generation=generation)
        if group["atomic"] and not self._commits(generation):
            return None
        return average

    def _run(self, group: dict[str, Any], flat: Tensor) -> Tensor | None:
        members, weights = group["members"], group["weights"]
        if len(members) == 1:
            return flat
        # With weight 0, an infinity would still turn the sum into NaN.
        own = flat if weights[members.index(self._mesh.rank)] > 0 else torch.zeros_like(flat)
        try:
            return self._average.run(group["generation"], members, weights, own)
        except GroupBroken:
            return None

    def _commits(self, generation: int) -> bool:
        while True:
            _, verdict = self._client.receive("verdict")
            if verdict["generation"] == generation:
                return bool(verdict["commit"])

    # Models for workers that start or return

    def _donate(self, takers: list[list[int]], steps_back: int) -> None:
        facts, extra = self._rejoin_state(steps_back)
        optimizer = self._packed_optimizer()
        # The optimizer's payload comes first, because it must be aligned.
        parts = [*optimizer, *model_bytes([*self._model.all, *extra])]
        size = payload_size(as_bytes(optimizer))
        for rank, visit in takers:
            header = {"iteration": self._iteration - steps_back, "facts": facts, "visit": visit, "optimizer": size}
            try:
                self._mesh.send(rank, _MODEL, header, parts)
            except PeerLost:
                continue  # the worker was lost again; it will send a new request

    def _packed_optimizer(self) -> Packed:
        """The state of this worker's optimizer, or a donated one not in use yet; empty before the first step."""
        if self._optimizer is not None:
            return pack_optimizer(self._optimizer, self._model.parameters)
        return pack({}) if self._donated is None else self._donated.packed()

    def _take(self, donor: int, visit: int) -> None:
        mail = self._mesh.receive(_MODEL, sender=donor, timeout=self._timeout)
        while mail.header["visit"] != visit:
            # This model answers a request of an earlier process of this rank, which was lost.
            mail = self._mesh.receive(_MODEL, sender=donor, timeout=self._timeout)
        size = mail.header["optimizer"]
        _, extra = self._rejoin_state(0)
        take_bytes([*self._model.all, *extra], mail.payload[size:], donor)
        self._donated = DonatedOptimizer.found(donor, mail.payload[:size])
        self._iteration = mail.header["iteration"]
        self._load_rejoin_state(mail.header["facts"])


class PartialReduce(AveragingWorker):
    """A worker of a partial reduce: after each step, it averages its model with a few other workers that are ready.

    It follows "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce" (SIGMOD 2021), with the
    group generation of SDPipe (VLDB 2023).

    Args:
        mesh: connects the workers, which are all its ranks; owned by the caller.
        settings: a consistency of mode ``partial_reduce``.
        model, timeout, stall: as of `AveragingWorker`.
    """

    def __init__(
        self, mesh: Mesh, model: ModelTensors, settings: Consistency, *, timeout: float = 1800.0, stall: float = 60.0
    ) -> None:
        coordinator = None
        if mesh.rank == RANK:
            dynamic = settings.weighting == "dynamic"
            grouping = Grouping.of(settings)
            coordinator = Coordinator(mesh.size, grouping, dynamic=dynamic, timeout=timeout)
        super().__init__(mesh, model, coordinator, timeout, stall, settings.momentum == "average")

    def step(self, optimizer: Optimizer, samples: int) -> None:
        self._step_locally(optimizer, samples)
        facts = self._momentum_facts(self._model.parameters)
        parameters = self._model.parameters

        def view(group: dict[str, Any]) -> FlatView:
            return FlatView([*parameters, *self._momenta(parameters, group["averages"])])

        elements = sum(FlatView(parameters).sizes)
        group, average = self._average_with_group("ready", elements, lambda group: view(group).pack(), **facts)
        if len(group["members"]) > 1:
            view(group).unpack(average)
        self._iteration = group["iteration"]

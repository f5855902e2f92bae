"""A worker that averages its model with groups: the base of partial reduce and periodic averaging."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_autosync.errors import ExchangeError, GroupBroken, PeerLost
from lightning_autosync.relaxed.base import Drain, Synchronizer
from lightning_autosync.relaxed.controller import RANK, Controller, ControllerClient
from lightning_autosync.relaxed.coordinator import Coordinator
from lightning_autosync.relaxed.group_average import GroupAverage
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
"""Groups that may break one after another before a worker gives up."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
"""Seconds before asking for another group: they double from one broken group to the next, for the others may need to
find out who is lost."""

_MODEL = "worker.model"


class Group(NamedTuple):
    """Workers that averaged together.

    Attributes:
        generation: the group's number.
        members: ranks, ascending.
        bridging: whether it had to connect workers that were apart.
        active: workers that took part in training when it was formed; 0 at a barrier.
    """

    generation: int
    members: tuple[int, ...]
    bridging: bool = False
    active: int = 0


class AveragingWorker(Synchronizer):
    """A worker that averages its model with groups which rank 0's controller forms.

    A group breaks if a member is lost. Whoever could not finish its average keeps its own model and asks for another
    group; a member that had everything by then keeps the average, for to agree on it would cost every group a round of
    messages. Only at a barrier (:meth:`drain`), and wherever all must stay in step (periodic averaging), have all
    members committed an average or none.

    A worker that comes back takes the model of one that waits, and goes on from that one's optimizer: its running
    averages and step counts, with the own hyperparameters.

    Args:
        mesh: connects the workers, which are its first ranks; stays the caller's.
        model: this worker's tensors, changed in place.
        coordinator: made by rank 0 only.
        timeout: seconds to wait for other workers, at a barrier or for a group.
        stall: seconds without progress after which a group's average is given up.
        momentum: whether the optimizer's running averages are averaged wherever the parameters are; at a barrier by
            those who have made a step.

    Attributes:
        group: the last one of this worker; None before the first.
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
            raise ExchangeError(f"rank {RANK}, and no other, has the coordinator")
        self._mesh, self._model, self._timeout = mesh, model, timeout
        self._average = GroupAverage(mesh, stall)
        # Whoever waits at a barrier learns from the controller who did not come; its own time-out is the last resort.
        self._client = ControllerClient(mesh, timeout + stall)
        self._controller = Controller(mesh, coordinator) if coordinator is not None else None
        self.group: Group | None = None
        self._averages_momentum = momentum
        self._optimizer: Optimizer | None = None
        """Of the last step."""
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
        parameters = self._model.parameters
        common = [*parameters, *self._model.buffers, *self._drained_state()]

        def view(group: dict[str, Any]) -> FlatView:
            return FlatView([*common, *self._momenta(parameters, group["averages"])])

        elements = sum(FlatView(common).sizes)
        facts = self._momentum_facts(parameters)
        group, average = self._average_with_group("arrive", elements, lambda group: view(group).pack(), **facts)
        view(group).unpack(average)
        self._iteration, self._samples = group["iteration"], 0
        self.last_drain = Drain(group["generation"], dict(zip(group["members"], group["visits"], strict=True)))
        self._misplaced = "after a drain, training goes on with resume()"
        self._after_drain()

    def resume(self) -> None:
        self._misplaced = ""

    def finish(self) -> None:
        self._client.send("done")
        self._misplaced = "this worker has finished; drain() comes next"

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
        with suppress(ExchangeError):  # if nobody is left to be told
            self._client.send("leave")
        if self._controller is not None:
            self._controller.close()
        self._average.close()

    # What periodic averaging has beside a partial reduce

    def _drained_state(self) -> list[Tensor]:
        """Tensors beside the model that a barrier averages."""
        return []

    def _after_drain(self) -> None:
        """The model is the common one now."""

    def _own_state(self) -> dict[str, Any]:
        """Entries of :meth:`state_dict`."""
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Take what :meth:`_own_state` returned."""

    def _rejoin_state(self, steps_back: int) -> tuple[dict[str, Any], list[Tensor]]:
        """What a worker that comes back needs beside the model: JSON data as of some steps ago, and tensors.

        It has tensors of the same shapes.
        """
        return {}, []

    def _load_rejoin_state(self, facts: dict[str, Any]) -> None:
        """Take the JSON data of :meth:`_rejoin_state`; the tensors are there already."""

    # Local steps

    def _step_locally(self, optimizer: Optimizer, samples: int) -> None:
        if self._misplaced:
            raise ExchangeError(f"a step now is out of place: {self._misplaced}")
        if self._donated is not None:
            self._donated.give_to(optimizer, self._model.parameters)
        self._optimizer, self._donated = optimizer, None
        optimizer.step()
        self._iteration += 1
        self._samples += samples

    def _momentum_facts(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """What a request says of the optimizer's averages: their names, if they are averaged."""
        if not self._averages_momentum:
            return {}
        return {"averages": optimizer_averages(self._optimizer, parameters) if self._optimizer else []}

    def _momenta(self, parameters: Sequence[Tensor], names: Sequence[str]) -> list[Tensor | int]:
        """The optimizer's averages of these names; before the first step, their numbers of elements."""
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
            kind: of the request.
            elements: of that, or of the part that all must have alike.

        Returns:
            The group, and the average in memory that lasts until the next call.
        """
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(_SHORTEST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))
            self._client.send(kind, iteration=self._iteration, samples=self._samples, elements=elements, **facts)
            group = self._await_group(steps_back=int(kind == "ready"))
            average = self._try(group, flat_for(group))
            if average is not None:
                return group, average
        raise ExchangeError(f"{ATTEMPTS} groups broke one after another; the last had ranks {group['members']}")

    def _await_group(self, steps_back: int) -> dict[str, Any]:
        """Wait for the group. A worker that comes back meanwhile gets this model as of ``steps_back`` steps ago."""
        while True:
            kind, header = self._client.receive("donate", "group")
            if kind == "group":
                bridging, active = header.get("bridging", False), header.get("active", 0)
                self.group = Group(header["generation"], tuple(header["members"]), bridging, active)
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
        # What does not count must not spoil the sum by an infinity.
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

    # Models for those who come (back)

    def _donate(self, takers: list[list[int]], steps_back: int) -> None:
        facts, extra = self._rejoin_state(steps_back)
        optimizer = self._packed_optimizer().parts
        # First what is aligned.
        parts = [*optimizer, *model_bytes([*self._model.all, *extra])]
        size = payload_size(as_bytes(optimizer))
        for rank, visit in takers:
            header = {"iteration": self._iteration - steps_back, "facts": facts, "visit": visit, "optimizer": size}
            try:
                self._mesh.send(rank, _MODEL, header, parts)
            except PeerLost:
                continue  # it was lost again; it will ask again

    def _packed_optimizer(self) -> Packed:
        """The state of this worker's optimizer, or a donated one that is not used yet; empty before the first step."""
        if self._optimizer is not None:
            return pack_optimizer(self._optimizer, self._model.parameters)
        return pack({}) if self._donated is None else self._donated.packed()

    def _take(self, donor: int, visit: int) -> None:
        mail = self._mesh.receive(_MODEL, sender=donor, timeout=self._timeout)
        while mail.header["visit"] != visit:
            # Meant for a predecessor, which asked before it was lost.
            mail = self._mesh.receive(_MODEL, sender=donor, timeout=self._timeout)
        size = mail.header["optimizer"]
        _, extra = self._rejoin_state(0)
        take_bytes([*self._model.all, *extra], mail.payload[size:], donor)
        self._donated = DonatedOptimizer.found(donor, mail.payload[:size])
        self._iteration = mail.header["iteration"]
        self._load_rejoin_state(mail.header["facts"])

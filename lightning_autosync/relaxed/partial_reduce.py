"""Partial reduce: after each step, a worker averages its model with a few other workers that are ready.

It follows "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce" (SIGMOD 2021), with the group
generation of SDPipe (VLDB 2023).
"""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.averaging_worker import AveragingWorker
from lightning_autosync.relaxed.controller import RANK
from lightning_autosync.relaxed.coordinator import Coordinator
from lightning_autosync.relaxed.grouping import Grouping
from lightning_autosync.relaxed.model_state import FlatView, ModelTensors
from lightning_autosync.relaxed.transport.mesh import Mesh


class PartialReduce(AveragingWorker):
    """A worker of a partial reduce.

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
        slots = self._momenta(self._model.parameters, facts.get("averages", []))
        view = FlatView([*self._model.parameters, *slots])
        flat = view.pack()
        group, average = self._average_with_group("ready", flat.numel(), lambda _: flat, **facts)
        if len(group["members"]) > 1:
            view.unpack(average)
        self._iteration = group["iteration"]

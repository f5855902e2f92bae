"""The prediction of a plan that splits operators, as text, a picture and data."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rich.table import Table

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Result, bytes_text, seconds_text, table_text
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.hybrid.cost import (
    BACKWARD,
    BOXING_BACKWARD,
    BOXING_FORWARD,
    FORWARD,
    STATE,
    SYNCHRONIZATION,
    UPDATE,
    StepSettings,
)
from lightning_autosync.hybrid.graph import Graph
from lightning_autosync.hybrid.prediction import HybridPrediction, SentBytes, peak_bytes, predict
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.report.figures.hybrid import mesh_picture
from lightning_autosync.report.rendering import milliseconds

_PARTS = {
    "forward pass": FORWARD,
    "backward pass": BACKWARD,
    "changes of layout, forward": BOXING_FORWARD,
    "changes of layout, backward": BOXING_BACKWARD,
    "sums of replicas' gradients, beside the backward pass": SYNCHRONIZATION,
    "optimizer": UPDATE,
}
_WIDTH = 120


class HybridPredictionResult(Result):
    """One prediction.

    Attributes:
        plan: fingerprint of the plan.
        step_seconds: seconds of a step.
        seconds: seconds of each part of a step.
        bytes: bytes that each rank sends in a step.
        sent: these bytes by pass, dimensions and collective.
        memory: bytes of a rank's ``state``, and the most that a ``step`` needs beside it.
    """

    FORMAT: ClassVar[str] = "autosync-hybrid-prediction/1"

    plan: str
    step_seconds: float
    seconds: dict[str, float]
    bytes: float
    sent: tuple[SentBytes, ...]
    memory: dict[str, float]

    def figures(self) -> dict[str, str]:
        needed = self.memory["state"] + self.memory["step"]
        return {
            "step": seconds_text(self.step_seconds),
            "sent": bytes_text(self.bytes),
            "memory": bytes_text(needed),
        }


def predict_hybrid(
    plan: HybridPlan, graph: Graph, cluster: ClusterSpec, rates: HybridRates, directory: Path, slots: float = 0.0
) -> str:
    """The prediction as text; also writes ``result.json`` and ``mesh.svg`` to ``directory``.

    Args:
        plan: a plan for the model of ``graph``.
        graph: graph of the model.
        cluster: a cluster with known rates.
        rates: rates of the hosts and the backend.
        directory: directory of the files.
        slots: numbers that the optimizer keeps per parameter element.

    Raises:
        PlanError: the plan is for another model or number of ranks.
        ClusterError: the rates of the links are unknown.
    """
    found = predict(plan, graph, cluster, rates, StepSettings(slots=slots))
    _result(plan, found).write(directory)
    mesh_picture(plan, cluster).figure.savefig(directory / "mesh.svg")
    lines = [f"a step takes {milliseconds(found.step_seconds)}; a rank sends {bytes_text(found.bytes)} and needs "]
    lines[0] += bytes_text(found.memory)
    lines += [f"  {name}: {milliseconds(found.costs[place])}" for name, place in _PARTS.items() if found.costs[place]]
    if plan.gradients != "all_reduce":
        lines.append("the sums of gradients are predicted as all-reduces, whatever the plan's field 'gradients' says")
    return "\n".join([*graph.notes, *lines, _traffic(found), plan.describe(_WIDTH)])


def _traffic(found: HybridPrediction) -> str:
    table = Table(title="bytes that each rank sends in a step", title_justify="left", header_style="bold")
    for heading in ("pass", "along dimensions", "collective"):
        table.add_column(heading)
    table.add_column("sent", justify="right")
    for part in found.sent:
        places = ", ".join(map(str, part.dimensions))
        table.add_row(part.phase, places, part.collective, bytes_text(part.bytes))
    return table_text(table, _WIDTH)


def _result(plan: HybridPlan, found: HybridPrediction) -> HybridPredictionResult:
    return HybridPredictionResult(
        plan=plan.fingerprint,
        step_seconds=found.step_seconds,
        seconds={name: float(found.costs[place]) for name, place in _PARTS.items()},
        bytes=found.bytes,
        sent=found.sent,
        memory={"state": float(found.costs[STATE]), "step": peak_bytes(found.stages)},
    )

"""The prediction of a plan that splits operators, as text, a picture and data."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import write_text
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.hybrid.cost import (
    BACKWARD,
    BOXING_BACKWARD,
    BOXING_FORWARD,
    FORWARD,
    STATE,
    SYNCHRONIZATION,
    UPDATE,
    Settings,
)
from lightning_autosync.hybrid.graph import Graph
from lightning_autosync.hybrid.memory import peak_bytes
from lightning_autosync.hybrid.prediction import HybridPrediction, predict
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.report.figures.hybrid import mesh_picture
from lightning_autosync.report.rendering import milliseconds

FORMAT = "autosync-hybrid-prediction/1"
_PARTS = {
    "forward pass": FORWARD,
    "backward pass": BACKWARD,
    "changes of layout, forward": BOXING_FORWARD,
    "changes of layout, backward": BOXING_BACKWARD,
    "sums of replicas' gradients, beside the backward pass": SYNCHRONIZATION,
    "optimizer": UPDATE,
}
_WIDTH = 120


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
    found = predict(plan, graph, cluster, rates, Settings(slots=slots))
    write_text(directory / "result.json", json.dumps(_data(plan, found)) + "\n")
    mesh_picture(plan, cluster).figure.savefig(directory / "mesh.svg")
    lines = [f"a step takes {milliseconds(found.step_seconds)}; a rank sends {found.bytes / 1e6:.3f} MB and needs "]
    lines[0] += f"{found.memory / 1e6:.1f} MB"
    lines += [f"  {name}: {milliseconds(found.costs[place])}" for name, place in _PARTS.items() if found.costs[place]]
    return "\n".join([*graph.notes, *lines, _traffic(found), plan.describe(_WIDTH)])


def _traffic(found: HybridPrediction) -> str:
    table = Table(title="bytes that each rank sends in a step", title_justify="left", header_style="bold")
    for heading in ("pass", "along dimensions", "collective"):
        table.add_column(heading)
    table.add_column("MB", justify="right")
    for part in found.sent:
        places = ", ".join(map(str, part.dimensions))
        table.add_row(part.phase, places, part.collective, f"{part.bytes / 1e6:.3f}")
    text = StringIO()
    Console(file=text, width=_WIDTH, force_terminal=False).print(table)
    return text.getvalue()


def _data(plan: HybridPlan, found: HybridPrediction) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "plan": plan.fingerprint,
        "step_seconds": found.step_seconds,
        "seconds": {name: float(found.costs[place]) for name, place in _PARTS.items()},
        "bytes": found.bytes,
        "sent": [
            {"pass": one.phase, "dimensions": one.dimensions, "collective": one.collective, "bytes": one.bytes}
            for one in found.sent
        ],
        "memory": {"state": float(found.costs[STATE]), "step": peak_bytes(found.stages)},
    }

"""The report of a tuning run that may split operators, as one HTML file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import as_yaml, bytes_text, counted, write_text
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.report.figures.hybrid import mesh_picture, predictions_picture
from lightning_autosync.report.rendering import milliseconds, render
from lightning_autosync.search.hybrid.result import HybridTrial, HybridTuningResult


def write_hybrid_report(result: HybridTuningResult, path: Path) -> None:
    """Write the report of a run.

    Raises:
        DocumentError: a part of the result is wrong (the error may be of a subclass).
    """
    write_text(path, render("hybrid.html", **_page(result)))


def hybrid_row(result: HybridTuningResult) -> dict[str, Any]:
    """A summary of the run as plain data."""
    best, final = result.best, result.comparison
    return {
        "model": result.model,
        "cluster": result.cluster.get("name"),
        "plan": None if best is None else best.name,
        "seconds": None if best is None else float(result),
        "trials": len(result.trials),
        "over_ddp": None if final is None else asdict(final.speedup(final.ddp)),
    }


def _page(result: HybridTuningResult) -> dict[str, Any]:
    cluster, plan = ClusterSpec.from_dict(result.cluster, "result.json: cluster"), result.plan
    is_split = isinstance(plan, HybridPlan)
    pictures = [predictions_picture(result.trials)]
    if isinstance(plan, HybridPlan):
        pictures.append(mesh_picture(plan, cluster))
    return {
        "title": f"{result.model} on {cluster.name}: split operators",
        "best": result.best,
        "milliseconds": milliseconds(float(result)) if result.best is not None else None,
        "is_split": is_split,
        "plan_table": plan.describe() if plan is not None else "",
        "plan_text": "" if plan is None else as_yaml(plan.to_dict()),
        "notes": result.notes,
        "failure": result.failure,
        "pictures": {picture.name: picture for picture in pictures if picture is not None},
        "best_ddp": None if result.comparison is None else result.comparison.ddp,
        "final_rows": _final_rows(result),
        "trial_rows": [_trial_row(trial) for trial in result.trials],
        "facts": _facts(result, cluster),
        "rates_text": as_yaml(HybridRates.from_dict(result.rates, "result.json: rates").to_dict()),
        "settings_text": as_yaml(result.settings),
    }


def _final_rows(result: HybridTuningResult) -> list[dict[str, str]]:
    """A row for each contender of the final comparison, the fastest first."""
    final = result.comparison
    if final is None:
        return []
    sent = {name: one.get("bytes_per_step_and_rank") for name, one in (result.final or {})["contenders"].items()}
    predicted = {trial.name: trial.bytes for trial in result.trials}
    rows = []
    for name, contender, speedup in final.compared():
        rows.append(
            {
                "name": name,
                "kind": contender.kind,
                "seconds": milliseconds(contender.median),
                "speedup": f"{speedup.median:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})",
                "sent": _size(sent[name]),
                "predicted": _size(predicted.get(name)),
            }
        )
    return rows


def _trial_row(trial: HybridTrial) -> dict[str, str]:
    return {
        "name": trial.name,
        "origin": trial.origin,
        "state": trial.state + (f": {trial.why}" if trial.why else ""),
        "seconds": "" if trial.seconds is None else milliseconds(trial.seconds),
        "predicted": "" if trial.predicted is None else milliseconds(trial.predicted),
        "memory": _size(trial.memory),
        "deviation": "" if trial.deviation is None else f"{trial.deviation:.1e}",
    }


def _size(size: float | None) -> str:
    return "" if size is None else bytes_text(size)


def _facts(result: HybridTuningResult, cluster: ClusterSpec) -> dict[str, str]:
    limit = result.settings.get("parallel", {}).get("memory")
    return {
        "ranks": f"{cluster.world_size} on {counted(len(cluster.nodes), 'node')}",
        "parameters": bytes_text(result.weight_bytes),
        "search by prediction": f"{result.search_seconds:.2f} s",
        "memory of a rank": "any" if limit is None else f"{bytes_text(limit)} at most",
    }

"""``autosync train``: train a LightningModule, write ``result.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_autosync.documents import RESULT, counted
from lightning_autosync.errors import DocumentError
from lightning_autosync.targets import check_target
from lightning_autosync.training.job import run_job
from lightning_autosync.training.settings import TrainingResult, TrainingSettings


def train(configuration: dict[str, Any], directory: Path) -> float | None:
    """Train once; returns the value of the objective, for sweeps.

    Raises:
        AutoSyncError: a setting is wrong, ranks cannot be started, or ranks failed.
    """
    settings = TrainingSettings.parse(configuration)
    check_target("model", settings.module)
    check_target("data", settings.data_module)
    result = run_job(settings, directory)
    if result is None:
        return None
    for line in summary(result):
        print(line)
    print(directory / RESULT, flush=True)
    return objective(result, settings.objective)


def summary(result: TrainingResult) -> list[str]:
    """The result in a few lines."""
    plan, median = result.plan, result.median_step_seconds
    lines = [f"{result.strategy}, {result.world_size} ranks, {result.steps} steps in {result.seconds:.1f} s"]
    if plan is not None:
        mode = plan.get("consistency", {}).get("mode", "synchronous")
        lines.append(f"plan: {mode}, {counted(len(plan['groups']), 'message')}, {', '.join(_topologies(plan))}")
    if median is not None:
        lines.append(f"median step: {1e3 * median:.1f} ms")
    return lines + [f"{name}: {value:.4g}" for name, value in sorted(result.metrics.items())]


def _topologies(plan: dict[str, Any]) -> list[str]:
    return sorted({group.get("topology", "native") for group in plan["groups"]})


def objective(result: TrainingResult, name: str) -> float | None:
    """The metric of that name, or the median step time for ``step_seconds``.

    Raises:
        DocumentError: no metric of that name was logged.
    """
    if name == "step_seconds":
        return result.median_step_seconds
    if name not in result.metrics:
        allowed = ", ".join(["step_seconds", *sorted(result.metrics)])
        raise DocumentError(f"objective: '{name}' was not logged; allowed: {allowed}")
    return result.metrics[name]

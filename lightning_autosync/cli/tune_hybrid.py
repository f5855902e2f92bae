"""``autosync tune parallel=hybrid``: search plans that may split operators; write the plan, the study and a report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightning_autosync.documents import held
from lightning_autosync.errors import TuningError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.report.hybrid import write_hybrid_report
from lightning_autosync.search.hybrid.result import RESULT, HybridTuningResult
from lightning_autosync.search.hybrid.run import HybridTuningRun
from lightning_autosync.search.tuning.settings import TuningSettings

PLAN, WORKLOAD, CLUSTER, REPORT = "plan.yaml", "workload.yaml", "cluster.yaml", "report.html"
_LOCK = ".tune.lock"


def tune_hybrid(settings: TuningSettings, directory: Path, console: Console) -> HybridTuningResult:
    """Run the search; write ``plan.yaml``, ``rates.yaml``, ``result.json``, the study and ``report.html``.

    All files are in ``directory``, with ``workload.yaml`` and ``cluster.yaml`` for ``autosync predict``. The same
    command with the same directory resumes an earlier run.

    Raises:
        AutoSyncError: a setting is wrong, workers cannot be started, or nothing ran.
        UnwritableError: a file cannot be written.
    """
    refusal = TuningError(f"{directory}: another process uses this run directory; wait until it ends")
    with held(directory / _LOCK, refusal):
        run = HybridTuningRun(settings, directory)
        result = run.run()
        for line in result.lines():
            console.print(line)
        plan = result.plan
        if plan is not None:
            plan.save(directory / PLAN)
        result.write(directory)
        run.job.workload.save(directory / WORKLOAD)
        run.job.cluster.save(directory / CLUSTER)
        write_hybrid_report(result, directory / REPORT)
    if isinstance(plan, HybridPlan):
        console.print(plan.describe(), end="")
    console.print(", ".join(str(directory / name) for name in ((PLAN,) if plan else ()) + (RESULT, REPORT)))
    return result

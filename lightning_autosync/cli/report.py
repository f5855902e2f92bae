"""``autosync report``: write the results of tuning runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import optuna
from pydantic import model_validator

from lightning_autosync.documents import RESULT, Configuration, Result, read_data
from lightning_autosync.errors import DocumentError
from lightning_autosync.report.comparison import find_runs, write_comparison
from lightning_autosync.report.hybrid import hybrid_row, write_hybrid_report
from lightning_autosync.report.page import REPORT, write_report
from lightning_autosync.report.summary import summary_row
from lightning_autosync.report.tuning_run import TuningRun
from lightning_autosync.search.hybrid.result import is_hybrid_run, read_hybrid_result

_VERBS = {
    "autosync-bench": "bench",
    "autosync-collection": "collect",
    "autosync-convergence": "converge",
    "autosync-fit": "fit",
    "autosync-gain": "predict",
    "autosync-hybrid-prediction": "predict",
    "autosync-isolation": "converge",
    "autosync-prediction": "predict",
    "autosync-probe": "probe",
    "autosync-rehearsal": "rehearse",
    "autosync-report": "report",
    "autosync-training": "train",
    "autosync-validation": "validate",
}
"""Verbs whose results have no report, by the names of their formats."""


class ReportSettings(Configuration):
    """What to report: either ``run`` or ``runs``.

    Attributes:
        run: directory of one tuning run.
        runs: directories of several runs to compare, or directories that contain runs, such as a sweep's.
        file: path of the report; None is ``report.html`` in ``run``, in ``runs`` if that is one directory, else in this
            command's run directory.
    """

    run: str | None = None
    runs: str | tuple[str, ...] | None = None
    file: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ReportSettings:
        if (self.run is None) == (not self.runs):
            raise ValueError("run: give either run=DIR, or runs=DIR or runs=[DIR,DIR,...] to compare several")
        return self


class ReportResult(Result):
    """What was reported.

    Attributes:
        report: path of the report.
        runs: a row for each run.
    """

    FORMAT: ClassVar[str] = "autosync-report/1"

    report: str
    runs: tuple[dict[str, Any], ...]

    def figures(self) -> dict[str, str]:
        return {"report": self.report, "runs": str(len(self.runs))}


def report(configuration: dict[str, Any], directory: Path) -> None:
    """Write a report of one tuning run, or one that compares several, and ``result.json`` with a row per run.

    Raises:
        DocumentError: a setting is wrong, or a run is missing, truncated or of another format.
    """
    settings = ReportSettings.parse(configuration)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if settings.run is not None:
        _refuse_others(Path(settings.run))
    if settings.run is not None and is_hybrid_run(Path(settings.run)):
        result = read_hybrid_result(Path(settings.run))
        path = Path(settings.file) if settings.file else Path(settings.run) / REPORT
        write_hybrid_report(result, path)
        _leave(directory, path, [hybrid_row(result)])
        return
    if settings.run is not None:
        runs = [TuningRun.load(Path(settings.run))]
        path = Path(settings.file) if settings.file else Path(settings.run) / REPORT
        write_report(runs[0], path)
    else:
        given = [Path(one) for one in ((settings.runs,) if isinstance(settings.runs, str) else settings.runs or ())]
        runs = find_runs(given)
        path = Path(settings.file) if settings.file else (given[0] if len(given) == 1 else directory) / REPORT
        write_comparison(runs, path)
    _leave(directory, path, [summary_row(run) for run in runs])


def _refuse_others(directory: Path) -> None:
    """Refuse a directory that another verb or a sweep wrote; the message names it, and what has a report.

    Raises:
        DocumentError: such a result is in the directory, or one that is not plain data.
    """
    path = directory / RESULT
    data = read_data(path, finite=False) if path.is_file() else None
    name = str(data.get("format")).rpartition("/")[0] if isinstance(data, dict) else ""
    allowed = "allowed: the directory of one run of 'autosync tune'"
    if name == "autosync-sweep":
        raise DocumentError(f"run: {directory}: holds a sweep; {allowed}; to compare its runs, give runs={directory}")
    if name in _VERBS:
        raise DocumentError(f"run: {directory}: holds a result of 'autosync {_VERBS[name]}'; {allowed}")


def _leave(directory: Path, path: Path, rows: list[dict[str, Any]]) -> None:
    ReportResult(report=str(path), runs=tuple(rows)).write(directory)
    print(path)

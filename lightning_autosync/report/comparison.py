"""The report that compares tuning runs over seeds, samplers, models and clusters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_autosync.documents import write_text
from lightning_autosync.errors import DocumentError
from lightning_autosync.report.figures.comparison import hit_rates_picture, outcomes_picture, speeds_picture
from lightning_autosync.report.page import REPORT
from lightning_autosync.report.rendering import render
from lightning_autosync.report.summary import summary_row
from lightning_autosync.report.tuning_run import CLOSE, Case, Range, TuningRun, grouped
from lightning_autosync.search.tuning.result import RESULT, is_tuning_run


def find_runs(directories: Sequence[Path]) -> list[TuningRun]:
    """The tuning runs in directories. Each directory is a run, or contains runs at any depth.

    Raises:
        DocumentError: a directory is missing or has no tuning run, or a run is cut off or of another format.
    """
    found: list[Path] = []
    for directory in directories:
        if not directory.is_dir():
            raise DocumentError(f"runs: {directory}: not a directory")
        held = sorted(path.parent for path in directory.rglob(RESULT) if is_tuning_run(path.parent))
        if not held:
            raise DocumentError(f"runs: {directory}: no {RESULT} of 'autosync tune' in it or below it")
        found += held
    return [TuningRun.load(path) for path in dict.fromkeys(found)]


def write_comparison(runs: Sequence[TuningRun], path: Path) -> None:
    """Write the report that compares runs to an HTML file."""
    cases = grouped(runs)
    pictures = (speeds_picture(cases), outcomes_picture(cases), hit_rates_picture(cases))
    page = render(
        "comparison.html",
        title=f"Comparison of {len(runs)} tuning runs",
        runs=runs,
        cases=cases,
        close=f"{CLOSE:.0%}",
        summary=list(_summary(cases)),
        pictures={picture.name: picture for picture in pictures},
        group_rows=[row for case in cases for row in _group_rows(case)],
        run_rows=[_run_row(run, path) for run in runs],
        emulated=any(run.emulated_links for run in runs),
        paced=any(run.paced for run in runs),
    )
    write_text(path, page)


def _summary(cases: Sequence[Case]) -> Iterator[str]:
    """One sentence per case: the speedups that its samplers reached."""
    for case in cases:
        parts = []
        for group in case.groups:
            over = Range.of(_over(run, "over_ddp") for run in group.runs)
            if over is not None:
                count = len(group.runs)
                runs = "1 run" if count == 1 else f"median of {count} runs, {over.lowest:.2f} to {over.highest:.2f}"
                parts.append(f"{group.sampler} {over.median:.2f} times as fast as the best-tuned DDP ({runs})")
        yield f"{case.title}: {'; '.join(parts) or 'no run has a final comparison'}."


def _over(run: TuningRun, opponent: str) -> float | None:
    found = summary_row(run)[opponent]
    return None if found is None else float(found["median"])


def _group_rows(case: Case) -> Iterator[dict[str, Any]]:
    for group in case.groups:
        rows = [summary_row(run) for run in group.runs]
        closes = [case.trials_to_close(run) for run in group.runs]
        reached = [float(count) for count in closes if count is not None]
        yield {
            "case": case.title,
            "first": group is case.groups[0],
            "sampler": group.sampler,
            "runs": len(group.runs),
            "milliseconds": _text(Range.of(row["seconds"] for row in rows), "{:.1f}", 1e3),
            "over_ddp": _text(Range.of(_over(run, "over_ddp") for run in group.runs), "{:.2f}"),
            "over_builder": _text(Range.of(_over(run, "over_builder") for run in group.runs), "{:.2f}"),
            "hit_rate": _text(Range.of(row["hit_rate"] for row in rows), "{:.0f}%", 100),
            "to_close": f"{_text(Range.of(reached), '{:.0f}')} ({len(reached)} of {len(closes)})",
        }


def _text(found: Range | None, form: str, factor: float = 1.0) -> str:
    """``1.51 (1.42 to 1.60)``, or the median alone if all values are equal."""
    if found is None:
        return ""
    median, lowest, highest = (form.format(factor * one) for one in (found.median, found.lowest, found.highest))
    return median if lowest == highest else f"{median} ({lowest} to {highest})"


def _run_row(run: TuningRun, path: Path) -> dict[str, Any]:
    """One run, with a link to its own report if it has one."""
    own = run.directory / REPORT
    link = None
    if own.is_file() and own.resolve() != path.resolve():
        link = Path(os.path.relpath(own.resolve(), path.resolve().parent)).as_posix()
    return {**summary_row(run), "title": run.title, "link": link}

"""``autosync validate``: are the replay's prices what steps take? Random plans, measured and priced."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_autosync.bench.validation.accuracy import Accuracy, Priced, by
from lightning_autosync.bench.validation.cases import Case, draw_cases
from lightning_autosync.bench.validation.hosts import shared_hosts
from lightning_autosync.bench.validation.measuring import Measurement, measure_cases
from lightning_autosync.bench.validation.settings import Settings
from lightning_autosync.documents import write_text
from lightning_autosync.plan import compile_plan
from lightning_autosync.simulator import Constants, Replay

FORMAT = "autosync-validation/1"
_WORST = 8
"""Cases that are named."""


def validate(configuration: dict[str, Any], directory: Path) -> None:
    """Draw cases, measure those that are not measured yet, price all, and print how well both agree.

    ``measurements.jsonl`` (unless the settings name a file) and ``result.json`` appear in ``directory``.

    Raises:
        AutoSyncError: a setting is wrong, links cannot be emulated here, or a worker failed.
    """
    settings = Settings.parse(configuration)
    constants = shared_hosts(settings.constants)
    cases = draw_cases(settings)
    path = Path(settings.measurements) if settings.measurements else directory / "measurements.jsonl"
    found = measure_cases(cases, price(cases, lambda _: constants), settings, path)
    predicted = price(cases, lambda case: constants if settings.constants else _hosts_of(found[case.key], constants))
    priced = [
        Priced(case, found[case.key].seconds, predicted[case.key], found[case.key].foreign_cores) for case in cases
    ]
    tables = {
        "all": {"all": Accuracy.of(priced)},
        "cluster": by(priced, lambda one: one.case.cluster.name),
        "workload": by(priced, lambda one: one.case.family),
        "plan": by(priced, lambda one: one.case.kind),
    }
    write_text(directory / "result.json", json.dumps(_result(settings, constants, priced, tables)) + "\n")
    _print(priced, tables)


def price(cases: list[Case], constants_of: Callable[[Case], Constants]) -> dict[str, float]:
    """Seconds of a step of each case, by key."""
    replays: dict[tuple[str, str, str], Replay] = {}
    seconds = {}
    for case in cases:
        constants = constants_of(case)
        known = case.cluster.fingerprint, case.workload.fingerprint, constants.fingerprint
        if known not in replays:
            replays[known] = Replay(case.workload, case.cluster, constants)
        schedule = compile_plan(case.plan, case.workload, case.cluster)
        seconds[case.key] = replays[known].predict(schedule).step_time
    return seconds


def _hosts_of(measurement: Measurement, default: Constants) -> Constants:
    """As probed when it was measured."""
    return default if measurement.hosts is None else Constants.from_dict(dict(measurement.hosts), source="hosts")


def _result(
    settings: Settings, constants: Constants, priced: list[Priced], tables: Mapping[str, Mapping[str, Accuracy]]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "settings": settings.model_dump(mode="json"),
        "constants": constants.to_dict(),
        "emulated": {"links": True, "compute": True},
        "accuracy": {
            name: {row: accuracy.to_dict() for row, accuracy in table.items()} for name, table in tables.items()
        },
        "cases": [one.to_dict() for one in priced],
    }


def _print(priced: list[Priced], tables: Mapping[str, Mapping[str, Accuracy]]) -> None:
    console = Console()
    for name, rows in tables.items():
        table = Table(name, "cases", "median error", "p90", "bias", "Kendall tau")
        for row, accuracy in rows.items():
            tau = "" if accuracy.tau is None else f"{accuracy.tau:.2f}"
            numbers = f"{accuracy.median:.1%}", f"{accuracy.p90:.1%}", f"{accuracy.bias:+.1%}", tau
            table.add_row(row, str(accuracy.cases), *numbers)
        console.print(table)
    console.print("farthest off: case, measured and predicted ms")
    for one in sorted(priced, key=lambda one: -abs(one.error))[:_WORST]:
        times = f"{1e3 * one.measured:8.1f} {1e3 * one.predicted:8.1f}"
        console.print(f"  {one.case.pair}, {one.case.kind}: {times}", soft_wrap=True, highlight=False)

"""``autosync validate``: compare measured step times of random plans with the replay's predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_autosync.cli.progress import ShownProgress
from lightning_autosync.cli.tables import table_console
from lightning_autosync.lab.validation.accuracy import RANKED, CaseResult, Priced, ReplayAccuracy, ValidationResult, by
from lightning_autosync.lab.validation.cases import Case, draw_cases
from lightning_autosync.lab.validation.measuring import CaseMeasurement, measure_cases
from lightning_autosync.lab.validation.settings import ValidationSettings
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.plan import compile_plan
from lightning_autosync.replay import Constants, Replay

PAIR = "pair"
"""Name of the table by workload and cluster, which is too long to print."""
_WORST = 8
"""Number of cases with the largest errors to print."""


def validate(configuration: dict[str, Any], directory: Path) -> None:
    """Draw cases, measure those without measurement, predict all, and print how well both agree.

    ``measurements.jsonl`` (unless the settings name a file) and ``result.json`` are written to ``directory``.

    Raises:
        AutoSyncError: a setting is wrong, links cannot be emulated here, or a worker failed.
    """
    settings = ValidationSettings.parse(configuration)
    constants = emulated_hosts(settings.constants)
    cases = draw_cases(settings)
    path = Path(settings.measurements) if settings.measurements else directory / "measurements.jsonl"
    with ShownProgress("validate") as report:
        found = measure_cases(cases, settings, path, report)
    predicted = price(cases, lambda case: constants if settings.constants else hosts_of(found[case.key], constants))
    priced = [
        Priced(case, one.seconds, predicted[case.key], one.foreign_cores, one.noise)
        for case, one in ((case, found[case.key]) for case in cases)
    ]
    tables = {
        "all": {"all": ReplayAccuracy.of(priced)},
        "cluster": by(priced, lambda one: one.case.cluster.name),
        "workload": by(priced, lambda one: one.case.family),
        "plan": by(priced, lambda one: one.case.kind),
        PAIR: by(priced, lambda one: one.case.pair),
    }
    _print(priced, tables)
    ValidationResult(
        settings=settings,
        constants=constants.to_dict(),
        emulated={"links": True, "compute": True},
        accuracy=tables,
        cases=tuple(CaseResult.of(one) for one in priced),
    ).write(directory)


def price(cases: list[Case], constants_of: Callable[[Case], Constants]) -> dict[str, float]:
    """Predicted seconds of a step of each case, by key."""
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


def hosts_of(measurement: CaseMeasurement, default: Constants) -> Constants:
    """The constants that were probed with a measurement, else the default."""
    return default if measurement.hosts is None else Constants.from_dict(measurement.hosts, source="hosts")


def _print(priced: list[Priced], tables: Mapping[str, Mapping[str, ReplayAccuracy]]) -> None:
    console = table_console()
    for name, rows in tables.items():
        if name != PAIR:
            console.print(_accuracy_table(name, rows))
    for line in order_lines(tables[PAIR]):
        console.print(line, soft_wrap=True, highlight=False)
    console.print("largest prediction errors: case, measured ms, predicted ms")
    for one in sorted(priced, key=lambda one: -abs(one.error))[:_WORST]:
        times = f"{1e3 * one.measured:8.1f} {1e3 * one.predicted:8.1f}"
        console.print(f"  {one.case.pair}, {one.case.kind}: {times}", soft_wrap=True, highlight=False)


def _accuracy_table(name: str, rows: Mapping[str, ReplayAccuracy]) -> Table:
    table = Table(name, "cases", "median error", "p90", "bias", "Kendall tau", "beyond noise", "within noise")
    for row, accuracy in rows.items():
        errors = f"{accuracy.median:.1%}", f"{accuracy.p90:.1%}", f"{accuracy.bias:+.1%}"
        taus = ["" if tau is None else f"{tau:.2f}" for tau in (accuracy.tau, accuracy.tau_apart)]
        share = "" if accuracy.within_noise is None else f"{accuracy.within_noise:.0%}"
        table.add_row(row, str(accuracy.cases), *errors, *taus, share)
    return table


def order_lines(pairs: Mapping[str, ReplayAccuracy]) -> list[str]:
    """Lines on the order of plans for each workload on each cluster: the least tau, and how many are low."""
    lines = []
    for title, field in (
        ("Kendall tau", "tau"),
        ("Kendall tau of plans that differ by more than noise", "tau_apart"),
    ):
        taus = {pair: tau for pair, accuracy in pairs.items() if (tau := getattr(accuracy, field)) is not None}
        if not taus:
            lines.append(f"{title}: too few plans of the same workload and cluster")
            continue
        least = min(taus, key=lambda pair: taus[pair])
        low = sum(tau < RANKED for tau in taus.values())
        lines.append(
            f"{title}, by cluster and workload: lowest {taus[least]:.2f} ({least}), {low} of {len(taus)} below {RANKED}"
        )
    return lines

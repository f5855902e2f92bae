"""Measures cases one after the other on emulated links, and saves every measurement immediately."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import (
    PLAIN,
    Index,
    PositiveDuration,
    append_lines,
    checked,
    parse_json,
    seconds_text,
    whole_lines,
)
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.validation.cases import Case
from lightning_autosync.lab.validation.settings import ValidationSettings
from lightning_autosync.learned.dataset.sample import step_noise
from lightning_autosync.measure.hosts import probed_hosts
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.progress import Report, silent
from lightning_autosync.measure.replica_calls import StepBudget, measure_plans
from lightning_autosync.measure.session import MeasurementSession
from lightning_autosync.measure.step_time import step_time
from lightning_autosync.replay import Constants
from lightning_autosync.run_files import alone
from lightning_autosync.step_times import job_steps

_MIN_STEPS, _MAX_STEPS = 3, 12


@dataclass(frozen=True)
class CaseMeasurement:
    """The measurement of a case.

    Attributes:
        steps: seconds of each step, by rank.
        foreign_cores: number of cores that other processes kept busy; None if unknown.
        scheduling: the kernel's scheduling policy for the workers.
        warm_up: number of steps that were not counted.
        hosts: constants of the hosts, probed around that time, as a document; None if not probed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    key: str
    steps: Annotated[list[Annotated[list[PositiveDuration], Field(min_length=1)]], Field(min_length=1)]
    foreign_cores: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    scheduling: str
    warm_up: Index
    hosts: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step, as by `step_time`."""
        return step_time(self.steps)

    @property
    def noise(self) -> float:
        """Standard error of `seconds`, relative to it, from the spread of the steps."""
        return step_noise(job_steps(self.steps))


def load_measurements(path: Path) -> dict[str, CaseMeasurement]:
    """The measurements in a file by key; empty if there is no file. A last line that was cut off is skipped.

    Raises:
        DocumentError: a line is not a measurement.
    """
    found: dict[str, CaseMeasurement] = {}
    for where, line in whole_lines(path):
        what = f"{where}: not a measurement"
        measurement = checked(CaseMeasurement, parse_json(line, what), what)
        if measurement.hosts is not None:
            Constants.from_dict(measurement.hosts, f"{where}: hosts")
        found[measurement.key] = measurement
    return found


def measure_cases(
    cases: Iterable[Case], settings: ValidationSettings, path: Path, report: Report = silent
) -> dict[str, CaseMeasurement]:
    """Measure the cases that the file at ``path`` lacks; returns all measurements by key.

    Args:
        cases: cases, sorted by cluster.
        path: file to which every measurement is appended immediately.
        report: told of each measurement.

    Raises:
        DocumentError: the file has other contents, or measurements with other settings, or another process adds to it.
        LaunchError: links cannot be emulated here.
        WorkerError: a worker failed.
    """
    with alone(path):
        return _measure_missing(cases, settings, path, report)


def _measure_missing(
    cases: Iterable[Case], settings: ValidationSettings, path: Path, report: Report
) -> dict[str, CaseMeasurement]:
    """`measure_cases` with the lock of the file."""
    found = load_measurements(path)
    way = (settings.scheduling, settings.warm_up)
    for one in found.values():
        if (one.scheduling, one.warm_up) != way:
            raise DocumentError(
                f"measurements: {path}: made with scheduling={one.scheduling} warm_up={one.warm_up}, but settings are "
                f"scheduling={way[0]} warm_up={way[1]}; use the former, or give another file"
            )
    missing = [case for case in cases if case.key not in found]
    done = 0
    for _, group in groupby(missing, key=lambda case: case.cluster.fingerprint):
        of_cluster = list(group)
        cluster = of_cluster[0].cluster
        at_once = _without_delays(cluster)
        probes, hosts = settings.constants is None, None
        if probes and at_once != cluster:
            with _session(at_once, settings) as session:
                hosts = probed_hosts(session.pool, cluster, settings.scheduling).to_dict()
            probes = False
        with _session(cluster, settings) as session:
            for place, case in enumerate(of_cluster):
                if probes and place % settings.probe_every == 0:
                    hosts = probed_hosts(session.pool, cluster, settings.scheduling).to_dict()
                found[case.key] = replace(_measure(case, session, settings), hosts=hosts)
                append_lines(path, json.dumps(asdict(found[case.key])) + "\n")
                done += 1
                report(done, len(missing), f"{seconds_text(found[case.key].seconds)}, {case.pair}, {case.kind}")
    return found


def _session(cluster: ClusterSpec, settings: ValidationSettings) -> MeasurementSession:
    return MeasurementSession(cluster, LaunchSettings(kind="emulated"), settings.timeout, settings.scheduling)


def _without_delays(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with links that delay nothing.

    Hosts are probed by many small exchanges, which would take minutes over links of a wide area, and whose times would
    be those of the links.
    """
    links = [link.model_copy(update={"latency": 0.0}) if link.emulated_latency else link for link in cluster.links]
    return cluster.model_copy(update={"links": tuple(links)})


def _measure(case: Case, session: MeasurementSession, settings: ValidationSettings) -> CaseMeasurement:
    load = session.watch_load()
    by_rank = session.run(
        measure_plans,
        workload=case.workload.to_dict(),
        cluster=case.cluster.to_dict(),
        plans=[case.plan.to_dict()],
        budget=asdict(StepBudget(settings.warm_up, settings.seconds, _MIN_STEPS, _MAX_STEPS)),
        timeout=settings.timeout / 2,  # less than for the call, so that ranks can report what they await
    )
    steps = [plans[0] for plans in by_rank]
    return CaseMeasurement(case.key, steps, load.foreign_cores(), settings.scheduling, settings.warm_up)

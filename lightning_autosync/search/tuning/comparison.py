"""The final comparison of a run: the best plans, the best builder and the best of DDP take turns, as in a bench.

The fastest of several plans is partly the luckiest one in the rounds that chose it (selection bias). So the first half
of the rounds chooses the winner, and the builder and the setting of DDP with which it is compared. Only the second half
counts for the speedups.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lightning_autosync.documents import PositiveDuration, Record, checked, counted
from lightning_autosync.errors import DocumentError, TuningError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.measure.bench.output import EXACT
from lightning_autosync.measure.bench.preparation import plan_class, prepare
from lightning_autosync.measure.bench.result import BenchResult
from lightning_autosync.measure.bench.run import play
from lightning_autosync.measure.bench.settings import BenchSettings, ContenderSettings, DDPSweep
from lightning_autosync.measure.session import ContenderError, MeasurementSession, reason
from lightning_autosync.measure.step_time import Interval, paired_ratio, relative_medians
from lightning_autosync.measure.workers import InputError, WorkerError
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.search.tuning.job import TuningJob
from lightning_autosync.search.tuning.records import LENIENT

AnyPlan = SyncPlan | HybridPlan
MIN_ROUNDS = 5
"""Least number of judging rounds for a claim. Four rounds all fall on one side by chance too often."""
PREDICTED = "predicted"
"""Name of the plan that was found by prediction alone."""
_log = logging.getLogger(__name__)


class ComparedContender(Record):
    """One contender of the judging rounds.

    Attributes:
        kind: ``plan`` (the winner), ``builder`` (the best), ``finalist``, ``ddp``, or ``contender`` (any other).
        exactness: ``exact``, ``low precision`` or ``relaxed or lossy``.
        rounds: seconds of a step, by round.
    """

    model_config = LENIENT

    kind: Literal["plan", "builder", "finalist", "ddp", "contender"]
    exactness: str = Field(alias="class")
    rounds: tuple[PositiveDuration, ...] = Field(alias="round_seconds", min_length=1)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


class ComparedOpponents(Record):
    """Names of the contenders with which the winner is compared; no builder if none ran or all were left out."""

    model_config = LENIENT

    ddp: str
    builder: str | None = None


class FinalComparison(Record):
    """The judging rounds in a result.

    Attributes:
        contenders: contenders by name.
        winner: name of the plan to run, which may be a builder's.
        opponents: best DDP and best builder of the choosing rounds.
        left_out: by name, why plans failed in the comparison.
    """

    model_config = LENIENT

    contenders: dict[str, ComparedContender]
    winner: str
    opponents: ComparedOpponents
    left_out: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> FinalComparison:
        """From plain data of `judged`.

        Raises:
            DocumentError: a field is missing or wrong.
        """
        found = checked(cls, data, f"{where}: final")
        missing = {found.winner, found.ddp, found.builder or found.ddp} - found.contenders.keys()
        if missing or len({len(one.rounds) for one in found.contenders.values()}) != 1:
            lacking = f"no contender is named '{min(missing)}'" if missing else "contenders have unequal rounds"
            raise DocumentError(f"{where}: final.contenders: {lacking}")
        return found

    @property
    def ddp(self) -> str:
        return self.opponents.ddp

    @property
    def builder(self) -> str | None:
        return self.opponents.builder

    @property
    def rounds(self) -> int:
        """Number of judging rounds."""
        return len(self.contenders[self.winner].rounds)

    @property
    def seconds(self) -> float:
        """Seconds of a step of the winner."""
        return self.contenders[self.winner].median

    def speedup(self, name: str) -> Interval:
        """The winner's speedup over another contender, paired by round."""
        return paired_ratio(self.contenders[name].rounds, self.contenders[self.winner].rounds)

    def gains(self, name: str) -> bool:
        """Whether the winner may be claimed to be faster than another: the whole interval of the speedup is above 1."""
        return self.has_enough_rounds and self.speedup(name).low > 1

    @property
    def has_enough_rounds(self) -> bool:
        return self.rounds >= MIN_ROUNDS

    def compared(self) -> list[tuple[str, ComparedContender, Interval]]:
        """Name, contender and its speedup over the best DDP, paired by round; fastest first."""
        reference = self.contenders[self.ddp].rounds
        ordered = sorted(self.contenders.items(), key=lambda item: item[1].median)
        return [(name, one, paired_ratio(reference, one.rounds)) for name, one in ordered]


def announcement(plans: Iterable[str], rivals: Sequence[str], rounds: int) -> str:
    """Which plans are compared with which settings of DDP, and in how many rounds."""
    told = {PREDICTED: "the plan found by prediction alone", **{name: f"builder {name}" for name in builders.names()}}
    named = [told.get(name, name) for name in plans]
    return (
        f"comparing {counted(len(named), 'plan')} ({', '.join(named)}) with {', '.join(rivals)}: "
        f"{counted(rounds, 'round')} to choose the winner, then as many to judge it"
    )


def compare(
    job: TuningJob, session: MeasurementSession, plans: Mapping[str, AnyPlan], rivals: Sequence[str], directory: Path
) -> dict[str, Any]:
    """Measure plans and settings of DDP in turns, again after a worker fails; logs an `announcement`.

    A plan that fails twice, or that workers refuse, is left out.

    Args:
        job: job to tune. Its settings give the number of judging rounds; the number of choosing rounds is the same.
        session: live workers of the job.
        plans: finalists by name; a builder's plan has the builder's name.
        rivals: names of one or more settings of DDP.
        directory: directory of the run, in which ``finalists/NAME.yaml`` are written.

    Returns:
        The comparison as plain data, as from `judged`.

    Raises:
        TuningError: workers failed twice outside the plans' turns, or no plan is left.
        LaunchError: workers cannot be started again.
    """
    _log.info(announcement(plans, rivals, job.settings.rounds))
    paths = {name: directory / "finalists" / f"{name}.yaml" for name in plans}
    for name, path in paths.items():
        plans[name].save(path)
    own = _settings_of_rivals(job, rivals)
    prepared = prepare(own)
    left, failures = dict(plans), _Failures()
    while left:
        contenders = {name: ContenderSettings(plan=str(paths[name]), embeddings="rows") for name in left}
        settings = own.model_copy(update={"contenders": {**own.contenders, **contenders}})
        # Plans are set up for the job's own workload, which may have measured times, unlike the prepared one.
        preparation = replace(
            prepared,
            cluster=job.cluster,
            workload=job.workload,
            orders=prepared.orders | {name: {"name": name, **job.plan_order(plan)} for name, plan in left.items()},
            classes=prepared.classes | {name: plan_class(plan) for name, plan in left.items()},
        )
        try:
            played = play(settings, preparation, session)
        except WorkerError as error:
            failures.note(error, left)
        else:
            return judged(played, left, rivals, failures.left_out)
    raise TuningError(f"the final comparison failed with every plan; last error: {failures.last}")


def _settings_of_rivals(job: TuningJob, rivals: Sequence[str]) -> BenchSettings:
    """Settings of a bench of these settings of DDP and of the user's own contenders."""
    by_name = {options.name: options for options in job.settings.ddp.options()}
    first, *others = (by_name[name] for name in rivals)
    return job.bench_settings(
        ddp=DDPSweep(
            bucket_cap_mb=(first.bucket_cap_mb,),
            gradient_as_bucket_view=(first.gradient_as_bucket_view,),
            static_graph=(first.static_graph,),
        ),
        contenders={**{options.name: ContenderSettings(ddp=options) for options in others}, **job.settings.contenders},
        rounds=2 * job.settings.rounds,
    )


class _Failures:
    """Failures of workers in a final comparison: one is allowed for each plan, and one outside the plans' turns.

    Attributes:
        left_out: by name, why plans are left out.
        last: message of the last failure.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        self.last = ""
        self._seen: set[str | None] = set()

    def note(self, error: WorkerError, plans: dict[str, AnyPlan]) -> None:
        """Note a failure. Remove the plan whose turn failed from ``plans`` if another try is useless.

        Raises:
            TuningError: this is the second failure outside the plans' turns.
        """
        self.last = reason(error)
        name: str | None = None
        failure = error
        if isinstance(error, ContenderError) and error.contender in plans:
            name, failure = error.contender, error.failure
        if name is not None and (name in self._seen or isinstance(failure, InputError)):
            self.left_out[name] = reason(failure)
            del plans[name]
            _log.warning("the final comparison failed: %s; retrying without %s", self.last, name)
        elif name in self._seen:
            raise TuningError(f"the final comparison failed twice: {self.last}")
        else:
            self._seen.add(name)
            _log.warning("the final comparison failed: %s; retrying", self.last)


def judged(
    played: BenchResult,
    plans: Mapping[str, AnyPlan],
    rivals: Sequence[str],
    left_out: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Judge a bench, whose first half of rounds chooses; returns plain data for `FinalComparison.read`.

    The data contain the bench's judging rounds, the kind of each contender, and the winner's speedups over its
    opponents.

    Args:
        played: all rounds.
        plans: by name, plans that can win.
        rivals: names of one or more settings of DDP.
        left_out: by name, why plans failed.

    Raises:
        TuningError: all plans split operators, and none makes DDP's gradients.
    """
    half = played.settings.rounds // 2
    choice, result = _Choice(_rounds(played, 0, half), plans, rivals), _rounds(played, half, 2 * half)
    data = result.document().to_dict()
    for name, contender in data["contenders"].items():
        contender["kind"] = choice.kind(name)
        contender["speedup_over_best_ddp"] = asdict(result.speedup(name, choice.ddp))
    data |= {
        "best_ddp": choice.ddp,
        "winner": choice.winner,
        "opponents": {"ddp": choice.ddp, "builder": choice.builder},
        "left_out": dict(left_out or {}),
    }
    comparison = FinalComparison.read(data, "the final comparison")
    opponents = {"ddp": choice.ddp} | ({} if choice.builder is None else {"builder": choice.builder})
    chosen = {name: measurement.times for name, measurement in choice.result.measurements.items()}
    return data | {
        "speedup_over": {kind: asdict(comparison.speedup(name)) for kind, name in opponents.items()},
        "gains": {kind: comparison.gains(name) for kind, name in opponents.items()},
        "choosing": {"rounds": half, "round_seconds": chosen},
    }


class _Choice:
    """The winner and its opponents by the choosing rounds."""

    def __init__(self, result: BenchResult, plans: Mapping[str, AnyPlan], rivals: Sequence[str]) -> None:
        self.result = result
        self._plans = list(plans)
        self.ddp = self._fastest(rivals)
        # An exact plan whose gradients differ from DDP's cannot win, unless all do, as in a narrow precision. A plan
        # that splits operators never can, because the strategy would refuse it.
        measured, classes = result.measurements, result.classes
        sound = [name for name in plans if classes[name] != "exact" or measured[name].deviation <= EXACT]
        self._sound = sound or [name for name, plan in plans.items() if isinstance(plan, SyncPlan)]
        if not self._sound:
            raise TuningError("the final comparison: every plan's gradients differ from DDP's")

    @cached_property
    def builder(self) -> str | None:
        """Name of the fastest builder's plan; None if there is none."""
        built = [name for name in self._plans if name in builders.names()]
        return self._fastest([name for name in built if name in self._sound] or built) if built else None

    @cached_property
    def winner(self) -> str:
        """Name of the fastest plan if it is faster than the best builder's, else of the builder's."""
        fastest = self._fastest(self._sound)
        if self.builder in self._sound and self.result.speedup(fastest, self.builder).median <= 1:
            return self.builder
        return fastest

    def kind(self, name: str) -> str:
        if name == self.winner:
            return "plan"
        if name == self.builder:
            return "builder"
        if name in self._plans:
            return "finalist"
        return "ddp" if self.result.settings.all_contenders()[name].ddp is not None else "contender"

    def _fastest(self, names: Sequence[str]) -> str:
        """The fastest of some contenders, with times relative to their rounds."""
        times = relative_medians({name: self.result.measurements[name].times for name in names})
        return min(times, key=times.__getitem__)


def _rounds(played: BenchResult, start: int, end: int) -> BenchResult:
    """Some rounds of a bench as a bench result of their own."""

    def cut(values: Any) -> Any:
        return None if values is None else values[start:end]

    measurements = {
        name: replace(one, rounds=cut(one.rounds), sent=cut(one.sent), foreign_cores=cut(one.foreign_cores))
        for name, one in played.measurements.items()
    }
    settings = played.settings.model_copy(update={"rounds": end - start})
    return replace(played, settings=settings, measurements=measurements)

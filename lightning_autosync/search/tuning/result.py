"""``autosync-tuning/1``: the result of a tuning run. `TuningResult` writes, reads and prints it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from lightning_autosync.documents import (
    RESULT,
    Duration,
    Index,
    PositiveDuration,
    Record,
    Result,
    counted,
    read_data,
    seconds_text,
)
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.drift import Drift
from lightning_autosync.search.trial_attributes import BASELINE, BUILT
from lightning_autosync.search.tuning.comparison import PREDICTED, FinalComparison
from lightning_autosync.search.tuning.records import LENIENT, TrialRecord

_BEGINNING = 256
"""Number of bytes at the beginning of a result in which its format line is."""


class Opponent(Record):
    """The best setting of DDP or the best builder; ``seconds`` of a step are drift-corrected like those of trials."""

    model_config = LENIENT

    name: str
    seconds: PositiveDuration


class OpponentRecords(Record):
    """The opponents, measured before or during the search.

    Attributes:
        ddp, builder: best opponent of each kind; None if none ran.
        measured: all measurements of opponents, uncorrected.
        reference_by_batch: by batch of opponents, seconds of a step of the reference plan.
    """

    model_config = LENIENT

    ddp: Opponent | None = None
    builder: Opponent | None = None
    measured: tuple[dict[str, Any], ...] = ()
    reference_by_batch: dict[str, Any] = Field(default_factory=dict)


class Best(Record):
    """The best plan.

    Attributes:
        number: number of its trial; None for a builder's plan that was no trial.
        origin: origin of its point.
        seconds: seconds of a step, from the final comparison if there was one.
        builder: name of its builder; None for a plan of the search.
        plan: document of the plan.
    """

    model_config = LENIENT

    number: Index | None = None
    origin: str
    seconds: PositiveDuration
    builder: str | None = None
    plan: dict[str, Any]

    @property
    def source(self) -> str:
        """Where the plan comes from, in words."""
        if self.builder is not None:
            return f"builder {self.builder}"
        return "found by prediction alone" if self.number is None else f"trial {self.number}, {self.origin}"


class StudyAddress(Record):
    """The address of the study: its name, and its storage (a journal file, or a URL without password)."""

    model_config = LENIENT

    name: str
    storage: str


class Timing(Record):
    """Timing of the last session of the search.

    Attributes:
        trials_per_minute: trials per minute, with set-up, warm-up and the reference; None without a trial.
        sampler_seconds: total seconds of the sampler.
        sampler_seconds_by_proposal: for each proposal, seconds of the sampler from asking for the plan to telling its
            result.
        wall_seconds: seconds of the session, with opponents, final comparison and start of workers.
        restarts: number of times that workers were started again.
    """

    model_config = LENIENT

    trials_per_minute: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    sampler_seconds: Duration | None = None
    sampler_seconds_by_proposal: tuple[Duration, ...] = ()
    wall_seconds: Duration | None = None
    restarts: Index = 0


class DriftRecord(Record):
    """Drift of the machine's speed. Results have more fields, which are derived from these.

    Attributes:
        reference_by_trial: seconds of a step of the reference plan, by the number of the trial measured with it.
        share: share of the reference's deviations (in logarithms) that other plans have too.
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    reference_by_trial: dict[int, PositiveDuration] = Field(default_factory=dict)
    share: Annotated[float, Field(ge=0, le=1)] = 1.0


class TuningResult(Result):
    """The result of a tuning run.

    Attributes:
        settings: settings of the run, as plain data.
        cluster, workload: documents, as plain data.
        semantics: highest level of semantics that plans could have.
        constants: document of the hosts' constants by which plans were predicted; None in results of earlier versions.
        study: address of the study.
        best: best plan; None if no plan has a time.
        opponents: DDP and builders, measured before or during the search.
        trials: all trials, in order.
        final: final comparison, as plain data for `FinalComparison`; None if there was none.
        emulated: whether ``links`` were emulated and ``compute`` was paced.
        drift: measurements of the reference plan.
        timing: timing of the search.
        interrupted: whether a Ctrl-C ended the run.
        failure: why the run ended early; None if it did not.
        environment: versions, cores, load and other conditions.
    """

    FORMAT: ClassVar[str] = "autosync-tuning/1"
    model_config = LENIENT

    settings: dict[str, Any] = Field(default_factory=dict)
    cluster: dict[str, Any]
    workload: dict[str, Any]
    semantics: str = "exact"
    constants: dict[str, Any] | None = None
    study: StudyAddress | None = None
    best: Best | None = None
    opponents: OpponentRecords = OpponentRecords()
    trials: tuple[TrialRecord, ...]
    final: dict[str, Any] | None = None
    emulated: dict[str, Any] = Field(default_factory=dict)
    drift: DriftRecord = DriftRecord()
    timing: Timing = Timing()
    interrupted: bool = False
    failure: str | None = None
    environment: dict[str, Any] = Field(default_factory=dict)

    def __float__(self) -> float:
        """Seconds of a step of the best plan, for sweeps over tuning runs.

        Raises:
            ValueError: no plan has a time.
        """
        if self.best is None:
            raise ValueError("no trial completed")
        return self.best.seconds

    @property
    def is_empty(self) -> bool:
        """Whether nothing was tried to its end."""
        return all(record.interrupted for record in self.trials)

    def figures(self) -> dict[str, str]:
        if self.best is None:
            return {}
        found = {"best plan": self.best.source, "step": seconds_text(self.best.seconds)}
        return found if self.comparison is None else found | speedup_figures(self.comparison)

    @cached_property
    def comparison(self) -> FinalComparison | None:
        """The final comparison; None if there was none.

        Raises:
            DocumentError: a field of it is missing or wrong.
        """
        return None if self.final is None else FinalComparison.read(self.final, RESULT)

    @property
    def unsearched(self) -> str:
        """Why plans of builders alone were tried, as a sentence without its full stop; empty if others were, too."""
        if not self.trials or any(record.origin not in (BASELINE, BUILT) for record in self.trials):
            return ""
        told = "only builders' plans were tried, because they come first"
        if self.interrupted or self.failure is not None:
            return told
        return f"{told} and used up search.budget; give a larger one to search for others"

    def lines(self) -> Iterator[str]:
        """The result for a terminal."""
        if self.best is None:
            yield "no trial completed"
        else:
            yield f"best plan ({self.best.source}): {1e3 * self.best.seconds:.2f} ms a step"
            if self.comparison is None:
                yield "it was not compared with its opponents side by side; run the same command to resume"
            else:
                yield from _claims(self.comparison)
        if self.unsearched:
            yield self.unsearched
        states = [record.state for record in self.trials if not record.interrupted]
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("complete", "pruned", "failed"))
        pace, proposals = self.timing.trials_per_minute, self.timing.sampler_seconds_by_proposal
        speed = ""
        if pace is not None and proposals:
            speed = f"; {pace:.1f} a minute; sampler: {sampler_text(proposals)}"
        yield f"{counted(len(states), 'trial')}: {counts}{speed}"
        drift = Drift(self.drift.reference_by_trial, self.drift.share)
        if drift.seen:
            yield f"the machine's speed drifted by {drift.spread:.0%}: trials are ranked relative to the reference plan"
        if self.timing.restarts:
            yield f"workers were restarted {counted(self.timing.restarts, 'time')}"


def sampler_text(seconds: Sequence[float]) -> str:
    """The sampler's time for a proposal, from its seconds for each of them.

    A few proposals may take much longer than the others, so mean and median differ.
    """
    mean, median = 1e3 * statistics.fmean(seconds), 1e3 * statistics.median(seconds)
    return f"mean {mean:.0f} ms a proposal, median {median:.0f} ms, {sum(seconds):.1f} s in all"


def speedup_figures(final: FinalComparison) -> dict[str, str]:
    """The winner's speedup over the best DDP in the final comparison, for a row of a table."""
    speedup = final.speedup(final.ddp)
    return {"best DDP": final.ddp, "speedup": f"{speedup.median:.3f}x [{speedup.low:.3f}, {speedup.high:.3f}]"}


def _claims(final: FinalComparison) -> Iterator[str]:
    """Lines that compare the winner with its opponents. A gain is claimed only if the interval shows it."""
    predicted = PREDICTED if PREDICTED in final.contenders else None
    named = {f"best DDP, {final.ddp}": final.ddp, f"best builder, {final.builder}": final.builder}
    for what, name in {**named, "plan found by prediction alone": predicted}.items():
        if name is None or name == final.winner:
            continue
        speedup = final.speedup(name)
        share = f"{speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
        few = "" if final.has_enough_rounds else ", too few rounds to be sure"
        claim = "" if final.gains(name) else ", not a gain"
        yield f"speedup over the {what}: {share}{few or claim}"
    if final.winner == final.builder:
        yield "no searched plan was faster than this builder's in the rounds that choose the winner"
    for name, why in final.left_out.items():
        yield f"{name} failed in this comparison and was left out: {why}"


def read_result(directory: Path) -> TuningResult:
    """The result of the tuning run in ``directory``.

    Raises:
        DocumentError: the directory or the file is missing, or the file is damaged or of another kind.
    """
    path = directory / RESULT
    if not directory.is_dir():
        raise DocumentError(f"{directory}: not a directory; expected the run directory of 'autosync tune'")
    if not path.is_file():
        raise DocumentError(f"{directory}: no {RESULT} in it; expected the run directory of a finished 'autosync tune'")
    return TuningResult.from_dict(read_data(path, finite=TuningResult.FINITE), source=str(path))


def is_tuning_run(directory: Path) -> bool:
    """Whether ``directory`` has a ``result.json`` of a tuning run.

    Raises:
        DocumentError: the file begins as that of a tuning run, but is damaged. Damaged files of other programs are not
            ours to judge.
    """
    path = directory / RESULT
    try:
        return path.is_file() and TuningResult.is_in(path)
    except DocumentError:
        if _begins_as_tuning_run(path):
            raise
        return False


def _begins_as_tuning_run(path: Path) -> bool:
    """Whether the format line of a tuning run, which is written first, is at the beginning of a file."""
    try:
        with path.open("rb") as file:
            return TuningResult.FORMAT.rpartition("/")[0].encode() in file.read(_BEGINNING)
    except OSError:
        return True

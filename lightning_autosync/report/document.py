"""``autosync-tuning/1``: the part of a tuning run's ``result.json`` that reports read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from lightning_autosync.documents import Document, Index, Record, Spent, Taken, check_format, read_data
from lightning_autosync.errors import DocumentError

RESULT = "result.json"
State = Literal["complete", "pruned", "failed"]

_LENIENT = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
"""A run may tell more than a report shows."""


class Trial(Record):
    """One plan that was tried.

    Attributes:
        number: in the order in which plans were proposed, from 0.
        origin: ``baseline`` (a builder's plan, enqueued), ``startup``, ``evolved``, ...
        state: ``pruned`` was stopped early, as a clear loser; ``failed`` has no time.
        seconds: of a step; None if there is none.
        predicted: seconds that the simulator expected when it proposed the plan.
        steps: seconds of each measured step, by rank or of the slowest one.
        elapsed: seconds that the trial took in all.
        error: why it failed or was stopped.
        builder: name of the builder whose plan it is.
        corrected: ``seconds`` on the footing of the run; None if there is none, or from releases that did not say it.
        interrupted: whether it failed by nothing of its plan's doing.
    """

    model_config = _LENIENT

    number: Index
    origin: str
    state: State
    seconds: Taken | None = None
    predicted: Taken | None = None
    steps: tuple[Spent | tuple[Spent, ...], ...] | None = None
    elapsed: Spent | None = None
    error: str | None = None
    builder: str | None = None
    corrected: Taken | None = None
    interrupted: bool = False


class Opponent(Record):
    """What a plan has to beat: the best-tuned DDP, or the best builder."""

    model_config = _LENIENT

    name: str
    seconds: Taken


class Opponents(Record):
    """The opponents as measured before or during the search; None where one was not measured."""

    model_config = _LENIENT

    ddp: Opponent | None = None
    builder: Opponent | None = None


class Best(Record):
    """The answer: a trial, or (without ``number``) a builder's plan that was none; ``plan`` is a plan document."""

    model_config = _LENIENT

    number: Index | None = None
    origin: str
    seconds: Taken
    plan: dict[str, Any]
    builder: str | None = None


class StudyAddress(Record):
    """Where Optuna keeps the study: its storage (a journal file or a URL) and its name there."""

    model_config = _LENIENT

    name: str
    storage: str


class Timing(Record):
    """How fast the last session of the search went.

    Attributes:
        trials_per_minute: everything between trials included.
        sampler_seconds: of all proposals together.
        sampler_seconds_by_proposal: of each.
        wall_seconds: of the session.
    """

    model_config = _LENIENT

    trials_per_minute: Spent | None = None
    sampler_seconds: Spent | None = None
    sampler_seconds_by_proposal: tuple[Spent, ...] = ()
    wall_seconds: Spent | None = None


class Reference(Record):
    """How the machine's speed drifted.

    Attributes:
        reference_by_trial: seconds that the reference plan took, by the trial that it was measured with.
        share: of its deviations, in logarithms, that other plans have too.
    """

    model_config = _LENIENT

    reference_by_trial: dict[int, Taken] = Field(default_factory=dict)
    share: Annotated[float, Field(ge=0, le=1)] = 1.0


class TuningResult(Document):
    """What a tuning run found.

    Attributes:
        settings: what was asked, as plain data.
        cluster, workload: documents, as plain data.
        semantics: the highest level that was allowed.
        study: where the study is.
        best: the winner; None if no trial came to a time.
        opponents: what it was to beat.
        trials: every one, in order.
        final: the winner and its opponents side by side, as ``autosync bench`` writes it; None if that did not happen.
        emulated: what was emulated (links) or paced (compute).
        drift: turns of the reference plan.
        timing: pace of the search.
        interrupted: whether somebody ended it.
        failure: why it could not go on; None if it came to its end.
        environment: versions, cores, load and whatever else was noted.
    """

    FORMAT: ClassVar[str] = "autosync-tuning/1"
    model_config = _LENIENT

    settings: dict[str, Any] = Field(default_factory=dict)
    cluster: dict[str, Any]
    workload: dict[str, Any]
    semantics: str = "exact"
    study: StudyAddress | None = None
    best: Best | None = None
    opponents: Opponents = Opponents()
    trials: Annotated[tuple[Trial, ...], Field(min_length=1)]
    final: dict[str, Any] | None = None
    emulated: dict[str, Any] = Field(default_factory=dict)
    drift: Reference = Reference()
    timing: Timing = Timing()
    interrupted: bool = False
    failure: str | None = None
    environment: dict[str, Any] = Field(default_factory=dict)


def read_result(directory: Path) -> TuningResult:
    """The result of the tuning run in ``directory``.

    Raises:
        DocumentError: there is no such directory or file, it is cut off, or it is not a tuning run's.
    """
    path = directory / RESULT
    if not directory.is_dir():
        raise DocumentError(f"{directory}: not a directory; expected one in which 'autosync tune' left {RESULT}")
    if not path.is_file():
        raise DocumentError(f"{directory}: no {RESULT} in it; expected the run directory of a finished 'autosync tune'")
    data = read_data(path)
    if isinstance(data, dict):
        check_format(data.get("format"), TuningResult.FORMAT, str(path), DocumentError)
    return TuningResult.from_dict(data, source=str(path))


def is_tuning_run(directory: Path) -> bool:
    """Whether ``directory`` has a ``result.json`` that says it is a tuning run's."""
    path = directory / RESULT
    if not path.is_file():
        return False
    data = read_data(path)
    return isinstance(data, dict) and str(data.get("format", "")).startswith("autosync-tuning/")

"""Optuna studies of plans: what they are about, their points, and their trials as samples.

A study carries its workload, its cluster and the level of semantics as user attributes, so that it tells everything to
whoever opens it: plans and samples are made anew from its trials' parameters.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import check_format
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import BUILDER, COMPOSED, Genome, PlanSpace, Value
from lightning_autosync.search.drift import Footing, Sight
from lightning_autosync.search.journal import Journal
from lightning_autosync.simulator.dataset import Sample
from lightning_autosync.workload import Workload

FORMAT = "autosync-study/2"
"""What the attributes below are called and mean."""
SPACE, WORKLOAD, CLUSTER, SEMANTICS = "autosync:space", "autosync:workload", "autosync:cluster", "autosync:semantics"
"""User attributes of a study: format, fingerprint and sizes of its space, and its documents as JSON text."""
ORIGIN, PREDICTED, STEPS, PLAN = "autosync:origin", "autosync:predicted", "autosync:steps", "autosync:plan"
"""User attributes of a trial: how its point came about, seconds of a step as estimated when it was chosen, seconds of
each measured step (a list a rank), and the fingerprint of its plan."""
REFINED = "autosync:refined"
"""Another one: the document of a plan that refines the trial's point and is tried in its place, as JSON text."""
ERROR, INTERRUPTED = "autosync:error", "autosync:interrupted"
"""More of them: why a trial failed or was stopped early, and whether that was none of its plan's doing, as a Ctrl-C."""
BROKEN_OFF = "interrupted"
"""Why a trial failed that a Ctrl-C ended."""
RUN, BATCH, REFERENCE, PRICE = "autosync:run", "autosync:batch", "autosync:reference", "autosync:price"
"""Of a run beside others in a study: the name of its directory, the number of the first trial of a batch, seconds of a
step of the study's reference plan, measured beside that batch, and those of the trial's plan as the replay says."""
BASELINE = "baseline"
"""Origin of points that stand for a builder's plan."""
_DESCRIBING = 5.0
"""Seconds that a study's maker has for saying what it is about; after that it is taken to be dead."""
_LOOK = 0.05
"""Seconds between two looks whether it has."""
_JOURNALS = (".journal", ".log", ".jsonl")


class StudyError(DocumentError):
    """A study cannot be opened, or is not about what it should be."""


class StorageError(StudyError):
    """A storage of studies does not answer, or not any more."""


class Suggesting(Protocol):
    """A live or a fixed trial of Optuna."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


class Tried(Protocol):
    """A live or a finished trial of Optuna."""

    @property
    def number(self) -> int: ...

    @property
    def params(self) -> dict[str, Any]: ...

    @property
    def user_attrs(self) -> dict[str, Any]: ...


def distributions(space: PlanSpace) -> dict[str, CategoricalDistribution]:
    """The parameters of a space as Optuna knows them: categorical, fixed, in a fixed order."""
    return {name: CategoricalDistribution(domain) for name, domain in space.parameters.items()}


def suggest(trial: Suggesting, space: PlanSpace) -> dict[str, Value]:
    """A point of the space from a trial; every parameter is asked for, always in the same order."""
    return {name: trial.suggest_categorical(name, domain) for name, domain in space.parameters.items()}


def plan_of(trial: Tried, space: PlanSpace) -> SyncPlan:
    """The plan of a trial: the one that refines its point, if it carries one, else the point's own.

    Raises:
        StudyError: its parameters are not those of the space, or what it carries is no plan.
    """
    try:
        refined = trial.user_attrs.get(REFINED)
        return space.plan(trial.params) if refined is None else refined_plan(refined)
    except PlanError as error:
        raise StudyError(f"trial {trial.number}: {error}") from None


def refined_plan(text: str) -> SyncPlan:
    """The plan that a trial carries as `REFINED`.

    Raises:
        PlanError: it is none.
    """
    try:
        data = json.loads(text)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{REFINED}: not the JSON text of a plan: {error}") from None
    return SyncPlan.from_dict(data, REFINED)


def open_storage(storage: str | os.PathLike[str]) -> optuna.storages.BaseStorage:
    """A storage: a URL opens a database, anything else is the path of a journal file, made where there is none.

    Raises:
        StudyError: it cannot be opened.
    """
    text = os.fspath(storage)
    try:
        if "://" in text:
            # A connection that the database dropped meanwhile is opened again and ends no run.
            return optuna.storages.get_storage(RDBStorage(text, engine_kwargs={"pool_pre_ping": True}))
        if Path(text).suffix not in _JOURNALS:
            raise StudyError(f"{text}: a storage is a URL, or a journal file named *{', *'.join(_JOURNALS)}")
        Path(text).parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(Journal(text))
    except StudyError:
        raise
    except Exception as error:  # what drivers and the journal's reader raise is as various as they are
        raise StudyError(
            f"{without_password(text)}: cannot be opened as a storage of studies: {_line(error)}"
        ) from None


@contextmanager
def answered() -> Iterator[None]:
    """What a storage raises within the block, as various as databases and file systems are, is one error of ours.

    Raises:
        StorageError: the storage did not answer.
    """
    try:
        yield
    except (OptunaError, SQLAlchemyError, OSError) as error:
        raise StorageError(
            f"the study's storage does not answer: {_line(error)}; once it does, the same command goes on"
        ) from error


def without_password(storage: str) -> str:
    """The address of a storage with stars for the password in it, if there is one."""
    return re.sub(r"([?&]password=)[^&]*", r"\1***", re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", storage, count=1))


def open_study(
    storage: str | os.PathLike[str] | optuna.storages.BaseStorage,
    name: str,
    space: PlanSpace,
    *,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
    first: Sequence[Genome] = (),
) -> optuna.Study:
    """Create a study of this space, or go on with the one of that name.

    Of several processes that begin a study at once, the one that makes it says what it is about; the others are refused
    if they are about something else.

    Args:
        storage: as `open_storage` takes it, or an open one.
        name: of the study.
        space: whose points the trials are.
        sampler, pruner: as Optuna takes them.
        first: points of baselines that a new study tries first, whoever makes it.

    Raises:
        StudyError: the storage cannot be opened, or the study is of another space or of something else.
    """
    opened = storage if isinstance(storage, optuna.storages.BaseStorage) else open_storage(storage)
    study, is_ours = _made_or_found(opened, name, sampler, pruner)
    if not is_ours:
        _await_description(study)
    if SPACE not in study.user_attrs:
        if WORKLOAD not in study.user_attrs and study.get_trials(deepcopy=False):
            raise StudyError(f"study '{name}': it has trials, but none of plans; choose another name or storage")
        describe(study, space, first)
    check(study, space)
    return study


def load_study(storage: str | os.PathLike[str], name: str | None = None) -> optuna.Study:
    """Open a study that is there, to read it; ``name`` may be left out where the storage has one only.

    Raises:
        StudyError: there is no such storage or study, or it is not one of plans.
    """
    text = os.fspath(storage)
    if (missing := _missing_file(text)) is not None:
        raise StudyError(f"{missing}: there is no such {'database' if '://' in text else 'journal file'}")
    opened, shown = open_storage(storage), without_password(text)
    names = [study.study_name for study in opened.get_all_studies()]
    if name is None and len(names) != 1:
        raise StudyError(f"{shown}: it has {len(names)} studies; name one of {', '.join(names) or 'none'}")
    if name is not None and name not in names:
        raise StudyError(f"{shown}: it has no study '{name}'; there are {', '.join(names) or 'none'}")
    study = optuna.load_study(storage=opened, study_name=name or names[0])
    _sizes(study)
    return study


def _missing_file(storage: str) -> str | None:
    """The file that a storage would be in, if it is to be in one and is not there; to open SQLite's would make it."""
    if "://" not in storage:
        return None if Path(storage).is_file() else storage
    with suppress(ArgumentError, ValueError):  # which opening it tells of
        url = make_url(storage)
        path = url.database or ":memory:"
        if url.get_backend_name() == "sqlite" and not path.startswith((":memory:", "file:")):
            return None if Path(path).is_file() else path
    return None


def describe(study: optuna.Study, space: PlanSpace, first: Sequence[Genome] = ()) -> None:
    """Write into a study what it is about, and which baselines it tries first."""
    study.set_user_attr(WORKLOAD, json.dumps(space.workload.to_dict()))
    study.set_user_attr(CLUSTER, json.dumps(space.cluster.to_dict()))
    study.set_user_attr(SEMANTICS, space.semantics)
    enqueue(study, first, BASELINE)
    # Last: whoever sees it finds the others too.
    study.set_user_attr(
        SPACE, {"format": FORMAT, "fingerprint": space.fingerprint, "runs": space.runs, "lone": space.lone}
    )


def check(study: optuna.Study, space: PlanSpace) -> None:
    """See to it that a study is of this space, and about the same workload and cluster.

    Raises:
        StudyError: it is not.
    """
    ours = {
        "workload": space.workload.fingerprint,
        "cluster": space.cluster.fingerprint,
        "semantics": space.semantics,
        "space": space.fingerprint,
    }
    theirs = {
        "workload": workload_of(study).fingerprint,
        "cluster": cluster_of(study).fingerprint,
        "semantics": _attribute(study, SEMANTICS),
        "space": _sizes(study)["fingerprint"],
    }
    names = {
        "workload": (workload_of(study).name, space.workload.name),
        "cluster": (cluster_of(study).name, space.cluster.name),
    }
    for what, value in ours.items():
        if theirs[what] != value:
            there, here = names.get(what, ("", ""))
            raise StudyError(
                f"study '{study.study_name}': it is of another {what} ({f'{there} {theirs[what]}'.strip()}, not "
                f"{f'{here} {value}'.strip()})"
                f"{_more(study, space)}; choose another name or storage, or give it as a source of transfer"
            )


def _more(study: optuna.Study, space: PlanSpace) -> str:
    """What else there is to say of a study about something else."""
    known, own = workload_of(study), space.workload
    if known.fingerprint == own.fingerprint or known.variables_fingerprint != own.variables_fingerprint:
        return ""
    return (
        ": the same variables, but other times or kinds of gradients; where another process measured the times of this "
        "model meanwhile, start again to take those"
    )


def _made_or_found(
    storage: optuna.storages.BaseStorage,
    name: str,
    sampler: optuna.samplers.BaseSampler | None,
    pruner: optuna.pruners.BasePruner | None,
) -> tuple[optuna.Study, bool]:
    """The study of that name, and whether it was made just now; of several processes, one makes it."""
    kept: dict[str, Any] = {"storage": storage, "study_name": name, "sampler": sampler, "pruner": pruner}
    try:
        try:
            return optuna.create_study(direction="minimize", **kept), True
        except optuna.exceptions.DuplicatedStudyError:
            return optuna.load_study(**kept), False
    except Exception as error:
        raise StudyError(f"study '{name}': cannot be opened: {_line(error)}") from None


def _await_description(study: optuna.Study) -> None:
    """Leave it to the process that made a study to say what it is about, unless that has died over it."""
    deadline = time.monotonic() + _DESCRIBING
    while SPACE not in study.user_attrs and time.monotonic() < deadline:
        if WORKLOAD not in study.user_attrs and study.get_trials(deepcopy=False):
            return
        time.sleep(_LOOK)


def workload_of(study: optuna.Study) -> Workload:
    """The workload that a study is about."""
    return Workload.from_dict(json.loads(_attribute(study, WORKLOAD)), f"study '{study.study_name}'")


def cluster_of(study: optuna.Study) -> ClusterSpec:
    """The cluster that a study is about."""
    return ClusterSpec.from_dict(json.loads(_attribute(study, CLUSTER)), f"study '{study.study_name}'")


def space_of(study: optuna.Study) -> PlanSpace:
    """The space of a study, from what the study says of itself.

    Raises:
        StudyError: the study is not one of plans, or of a release whose spaces differ.
    """
    sizes = _sizes(study)
    semantics = _attribute(study, SEMANTICS)
    if sizes["runs"] < 1:
        raise StudyError(
            f"study '{study.study_name}': its trials are sizes of buckets (search=horovod) and no points of a space of "
            "plans; studies of the other samplers can be read here"
        )
    space = PlanSpace(workload_of(study), cluster_of(study), semantics, sizes["runs"], sizes["lone"])
    if space.fingerprint != sizes["fingerprint"]:
        raise StudyError(
            f"study '{study.study_name}': its space is {sizes['fingerprint']}, this release makes {space.fingerprint} "
            "of the same workload and cluster; go on with the release that began it"
        )
    return space


def enqueue(study: optuna.Study, points: Sequence[Genome], origin: str) -> None:
    """Have these points tried next, but for those that the study has or waits for already.

    Trials that were interrupted do not count: nothing is known of their plans.
    """
    trials = study.get_trials(deepcopy=False)
    known = [_given(trial) for trial in trials if not was_interrupted(trial) and REFINED not in trial.user_attrs]
    for point in points:
        if point not in known:
            study.enqueue_trial(dict(point), user_attrs={ORIGIN: origin})
            known.append(point)


def was_interrupted(trial: FrozenTrial) -> bool:
    """Whether a trial ended before anything was learned of its plan, so that the plan may be tried again."""
    return trial.state == TrialState.FAIL and bool(trial.user_attrs.get(INTERRUPTED))


def enqueue_baselines(study: optuna.Study, space: PlanSpace) -> None:
    """Have every builder's plan tried first."""
    enqueue(study, space.baselines(), BASELINE)


def samples_of(study: optuna.Study) -> list[Sample]:
    """The measured trials of a study, whether they ran to their end or were stopped for being slow.

    Steps are on the footing of one of its runs.

    Raises:
        StudyError: the study is not one of plans, or its trials are not points of its space.
    """
    space, footing = space_of(study), footing_of_study(study)
    samples = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        if steps := measured_steps(trial):
            plan, factor = plan_of(trial, space), footing.bring(trial.user_attrs.get(RUN), trial.number, 1.0)
            brought = tuple(factor * seconds for seconds in steps)
            try:
                samples.append(Sample(space.workload, space.cluster, plan, brought, _kind(trial)))
            except ValueError as error:
                raise StudyError(f"study '{study.study_name}': trial {trial.number}: {error}") from None
    return samples


def footing_of_study(study: optuna.Study) -> Footing:
    """The footing of the run that has the study's first trial."""
    trials = study.get_trials(deepcopy=False)
    return Footing.of(map(sight_of, trials), trials[0].user_attrs.get(RUN) if trials else None)


def sight_of(trial: FrozenTrial) -> Sight:
    """What a trial tells of drift."""
    steps = measured_steps(trial) if trial.state.is_finished() else ()
    batch = trial.user_attrs.get(BATCH)
    return Sight(
        run=trial.user_attrs.get(RUN),
        number=trial.number,
        batch=batch if isinstance(batch, int) else None,
        reference=_seconds(trial, REFERENCE),
        seconds=statistics.median(steps) if steps else None,
        price=_seconds(trial, PRICE),
        baseline=trial.user_attrs.get(ORIGIN) == BASELINE,
    )


def _seconds(trial: FrozenTrial, name: str) -> float | None:
    """An attribute that is a time; None if it is none."""
    value = trial.user_attrs.get(name)
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None


def measured_steps(trial: FrozenTrial) -> tuple[float, ...]:
    """Seconds of each measured step of the slowest rank; of a trial without, its value alone; empty if it has none."""
    if by_rank := [steps for steps in trial.user_attrs.get(STEPS, ()) if steps]:
        return tuple(max(by_rank, key=statistics.median))
    value = trial.value if trial.state == TrialState.COMPLETE else None
    if value is None:
        with suppress(ValueError):
            value = trial.intermediate_values[max(trial.intermediate_values)]
    return (float(value),) if value is not None and 0 < value < float("inf") else ()


def seconds_of(trial: FrozenTrial) -> float | None:
    """Seconds of a step of a trial's plan: its value, or, if it was given up, the median of the steps that it made;
    None where it has no time."""
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        seconds = trial.value
    elif trial.state == TrialState.PRUNED and (steps := measured_steps(trial)):
        seconds = statistics.median(steps)
    else:
        return None
    return seconds if 0 < seconds < float("inf") else None


def is_composed(trial: FrozenTrial) -> bool:
    """Whether a trial's parameters tell its plan: it is no builder's, and none that refines the point."""
    return REFINED not in trial.user_attrs and trial.params.get(BUILDER, COMPOSED) == COMPOSED


def _given(trial: FrozenTrial) -> Genome:
    """The point that a trial was given, or else the one that it has come to."""
    found: Genome = trial.system_attrs.get("fixed_params", trial.params)
    return found


def _kind(trial: FrozenTrial) -> str:
    origin = str(trial.user_attrs.get(ORIGIN, "drawn"))
    return str(trial.params[BUILDER]) if origin == BASELINE else origin


def _sizes(study: optuna.Study) -> dict[str, Any]:
    """What a study says of its space, in the format of this release."""
    sizes: dict[str, Any] = _attribute(study, SPACE)
    check_format(sizes.get("format"), FORMAT, f"study '{study.study_name}'", StudyError)
    return sizes


def _attribute(study: optuna.Study, name: str) -> Any:
    attributes: Mapping[str, Any] = study.user_attrs
    if name not in attributes:
        raise StudyError(f"study '{study.study_name}': it does not say its '{name}', so it is not one of plans")
    return attributes[name]


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

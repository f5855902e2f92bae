"""Optuna studies of plans: their descriptions, their points, and their trials as samples.

A study stores its workload, its cluster and the level of semantics as user attributes. So any program that opens it can
build plans and samples from its trials' parameters.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState
from pydantic import Field

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Index, Record, allowed_names, check_format, checked, parse_json
from lightning_autosync.errors import PlanError
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.measure.drift import DriftCorrection, run_with_turns
from lightning_autosync.plan.space import BUILDER, Genome, PlanSpace, Value
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.search.passwords import without_password
from lightning_autosync.search.storages import (
    STEP_SECONDS,
    StudyError,
    missing_file,
    name_metrics,
    one_line,
    open_plan_storage,
    open_storage,
    storage_errors,
)
from lightning_autosync.search.trial_attributes import (
    BASELINE,
    ORIGIN,
    REFINED,
    RUN,
    attribute,
    drift_observation,
    enqueued_point,
    kind_of,
    measured_steps,
    plan_of,
    was_interrupted,
)
from lightning_autosync.workload import Workload

FORMAT = "autosync-study/2"
"""Version of the names and meanings of the attributes below."""
SPACE, WORKLOAD, CLUSTER, SEMANTICS = "autosync:space", "autosync:workload", "autosync:cluster", "autosync:semantics"
"""User attributes of a study: format, fingerprint and sizes of its space, and its documents as JSON text."""
MOST_RUNS, MOST_LONE = 64, 1024
"""Maximum sizes of a study's space; `PlanSpace` uses 4 and 6 by default."""
_DESCRIBE_TIMEOUT = 5.0
"""Seconds within which the creator of a study must describe it. After that it counts as dead."""
_POLL_INTERVAL = 0.05


class Suggesting(Protocol):
    """A live or a fixed trial of Optuna."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


class HasPoints(Protocol):
    """A space of points."""

    def used(self, genome: Genome, /) -> dict[str, Any]:
        """The parameters of a point that can change its plan."""


def distributions(space: PlanSpace) -> dict[str, CategoricalDistribution]:
    """The parameters of a space for Optuna: categorical, in a fixed order."""
    return {name: CategoricalDistribution(domain) for name, domain in space.parameters.items()}


def suggest(trial: Suggesting, space: PlanSpace) -> dict[str, Value]:
    """Suggest a point of the space for a trial. Parameters that the point does not use are left out of the trial."""
    point: dict[str, Value] = {}
    # Builder and methods tell which of the others are used.
    for name in sorted(space.parameters, key=lambda name: (name != BUILDER, not name.endswith("/method"))):
        if space.uses(point, name):
            point[name] = trial.suggest_categorical(name, space.parameters[name])
    return point


@storage_errors()
def open_study(
    storage: str | os.PathLike[str] | optuna.storages.BaseStorage,
    name: str,
    space: PlanSpace,
    *,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
    first: Sequence[Genome] = (),
) -> optuna.Study:
    """Create a study of this space, or open the existing study of that name.

    If several processes start a study at once, the process that creates it describes it. The others raise if their
    space differs.

    Args:
        storage: address for `open_plan_storage`, or an open storage.
        name: name of the study.
        space: space of the trials' points.
        sampler, pruner: Optuna's sampler and pruner.
        first: points of baselines that a new study measures first.

    Raises:
        StudyError: the storage cannot be opened, or the study is of another space or not a study of plans.
        StorageError: the storage does not answer.
    """
    opened = storage if isinstance(storage, optuna.storages.BaseStorage) else open_plan_storage(storage)
    study, is_ours = _create_or_load(opened, name, sampler, pruner)
    if not is_ours:
        _wait_for_description(study)
    if SPACE not in study.user_attrs:
        if WORKLOAD not in study.user_attrs and study.get_trials(deepcopy=False):
            raise StudyError(f"study '{name}': its trials are not plans; choose another name or storage")
        describe(study, space, first)
    check(study, space)
    name_metrics(study, [STEP_SECONDS])
    return study


@storage_errors()
def load_study(storage: str | os.PathLike[str], name: str | None = None) -> optuna.Study:
    """Open an existing study to read it; ``name`` may be None if the storage has a single study.

    Raises:
        StudyError: there is no such storage or study, or it is not a study of plans.
        StorageError: the storage does not answer.
    """
    text = os.fspath(storage)
    if (missing := missing_file(text)) is not None:
        raise StudyError(f"{missing}: this {'database' if '://' in text else 'journal file'} does not exist")
    opened, shown = open_storage(storage), without_password(text)
    names = [study.study_name for study in opened.get_all_studies()]
    if name is None and len(names) != 1:
        raise StudyError(f"{shown}: it has {len(names)} studies; choose one of {', '.join(names) or 'none'}")
    if name is not None and name not in names:
        raise StudyError(f"{shown}: it has no study '{name}'; {allowed_names(name, names)}")
    study = optuna.load_study(storage=opened, study_name=name or names[0])
    _sizes(study)
    return study


def describe(study: optuna.Study, space: PlanSpace, first: Sequence[Genome] = ()) -> None:
    """Store the description of a space in a study, and enqueue the baselines that it measures first."""
    study.set_user_attr(WORKLOAD, json.dumps(space.workload.to_dict()))
    study.set_user_attr(CLUSTER, json.dumps(space.cluster.to_dict()))
    study.set_user_attr(SEMANTICS, space.semantics)
    enqueue(study, space, first, BASELINE)
    # Written last: other processes wait for this attribute, and then need all the others.
    sizes = {"fingerprint": space.fingerprint, "runs": space.runs, "lone": space.lone}
    study.set_user_attr(SPACE, {"format": FORMAT, **sizes, "leaves_out": True})


def check(study: optuna.Study, space: PlanSpace) -> None:
    """Check that a study has the same workload, cluster and blocks as a space. Domains may differ (see `space_of`).

    Raises:
        StudyError: they differ.
    """
    sizes = _sizes(study)
    ours = {
        "workload": _content(space.workload),
        "cluster": space.cluster.fingerprint,
        "semantics": space.semantics,
        "space": f"{space.runs} runs, {space.lone} lone",
    }
    theirs = {
        "workload": _content(workload_of(study)),
        "cluster": cluster_of(study).fingerprint,
        "semantics": _semantics(study),
        "space": f"{sizes.runs} runs, {sizes.lone} lone",
    }
    names = {
        "workload": (workload_of(study).name, space.workload.name),
        "cluster": (cluster_of(study).name, space.cluster.name),
    }
    for what, value in ours.items():
        if theirs[what] != value:
            there, here = names.get(what, ("", ""))
            raise StudyError(
                f"study '{study.study_name}': it has another {what} ({f'{there} {theirs[what]}'.strip()}, not "
                f"{f'{here} {value}'.strip()})"
                f"{_other_times(study, space)}; choose another name or storage, or use the study as a transfer source"
            )


def _content(workload: Workload) -> str:
    """The fingerprint of a workload whatever its name, for a model may get another name in a later release."""
    return workload.model_copy(update={"name": "any"}).fingerprint


def _other_times(study: optuna.Study, space: PlanSpace) -> str:
    """A hint for the message if a study has the same variables but another workload; else empty."""
    known, own = workload_of(study), space.workload
    if _content(known) == _content(own) or known.variables_fingerprint != own.variables_fingerprint:
        return ""
    return (
        ": its variables are the same, but times or kinds of gradients differ; if another process measured this model "
        "meanwhile, start again to use those times"
    )


def _create_or_load(
    storage: optuna.storages.BaseStorage,
    name: str,
    sampler: optuna.samplers.BaseSampler | None,
    pruner: optuna.pruners.BasePruner | None,
) -> tuple[optuna.Study, bool]:
    """The study of that name, and whether this process created it."""
    kept: dict[str, Any] = {"storage": storage, "study_name": name, "sampler": sampler, "pruner": pruner}
    try:
        try:
            return optuna.create_study(direction="minimize", **kept), True
        except optuna.exceptions.DuplicatedStudyError:
            return optuna.load_study(**kept), False
    except Exception as error:
        raise StudyError(f"study '{name}': cannot be opened: {one_line(error)}") from None


def _wait_for_description(study: optuna.Study) -> None:
    """Wait until the creator of a study has described it, unless the creator seems dead."""
    deadline = time.monotonic() + _DESCRIBE_TIMEOUT
    while SPACE not in study.user_attrs and time.monotonic() < deadline:
        if WORKLOAD not in study.user_attrs and study.get_trials(deepcopy=False):
            return
        time.sleep(_POLL_INTERVAL)


def workload_of(study: optuna.Study) -> Workload:
    """The workload of a study."""
    return Workload.from_dict(_document(study, WORKLOAD), _where(study, WORKLOAD))


def cluster_of(study: optuna.Study) -> ClusterSpec:
    """The cluster of a study."""
    return ClusterSpec.from_dict(_document(study, CLUSTER), _where(study, CLUSTER))


def _document(study: optuna.Study, name: str) -> Any:
    return parse_json(_attribute(study, name), _where(study, name), StudyError)


def _where(study: optuna.Study, name: str | None = None) -> str:
    return f"study '{study.study_name}'" + (f": {name}" if name else "")


def space_of(study: optuna.Study) -> PlanSpace:
    """The space of a study from its attributes, with the domains of its trials.

    Raises:
        StudyError: it is not a study of plans, or its trials' parameters do not match its workload.
    """
    sizes = _sizes(study)
    if sizes.runs < 1:
        raise StudyError(
            f"study '{study.study_name}': its trials are bucket sizes (search=horovod), not plans; choose a study of "
            "another sampler"
        )
    about = workload_of(study), cluster_of(study), _semantics(study), sizes.runs, sizes.lone
    space = PlanSpace(*about)
    if space.fingerprint == sizes.fingerprint or not (recorded := _recorded_domains(study)):
        return space
    if sizes.leaves_out:  # no trial may have used some parameters
        recorded = {**space.parameters, **recorded}
    try:
        return PlanSpace(*about, recorded)
    except PlanError as error:
        raise StudyError(f"{_where(study)}: {error}") from None


def _recorded_domains(study: optuna.Study) -> dict[str, tuple[Value, ...]]:
    """The domains of parameters when the study began, since builders and topologies may have been added or removed.

    Empty before the first trial.
    """
    found: dict[str, tuple[Value, ...]] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, distribution in trial.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                found.setdefault(name, distribution.choices)  # type: ignore[arg-type]  # checked where they are used
    return found


@storage_errors()
def enqueue(study: optuna.Study, space: HasPoints, points: Sequence[Genome], origin: str) -> None:
    """Enqueue points of a space that the study has not measured or enqueued yet. Interrupted trials do not count.

    Raises:
        StorageError: the study's storage does not answer.
    """
    trials = study.get_trials(deepcopy=False)
    # A trial that runs or was killed may lack parameters that its point uses. Then it equals no point.
    known = [
        space.used(enqueued_point(trial))
        for trial in trials
        if not was_interrupted(trial) and REFINED not in trial.user_attrs
    ]
    for point in points:
        if (used := space.used(point)) not in known:
            study.enqueue_trial(dict(point), user_attrs={ORIGIN: origin})
            known.append(used)


def enqueue_baselines(study: optuna.Study, space: PlanSpace) -> None:
    """Enqueue every builder's plan."""
    enqueue(study, space, space.baselines(), BASELINE)


def samples_of(study: optuna.Study) -> list[Sample]:
    """The measured trials of a study, complete or pruned. Steps are corrected to the speed of one of its runs.

    Raises:
        StudyError: it is not a study of plans, or its trials are not points of its space.
    """
    space, correction = space_of(study), drift_correction(study)
    samples = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        if steps := measured_steps(trial):
            plan, factor = plan_of(trial, space), correction.convert(attribute(trial, RUN), trial.number, 1.0)
            brought = tuple(factor * seconds for seconds in steps)
            try:
                samples.append(Sample(space.workload, space.cluster, plan, brought, kind_of(trial)))
            except ValueError as error:
                raise StudyError(f"study '{study.study_name}': trial {trial.number}: {error}") from None
    return samples


def drift_correction(study: optuna.Study) -> DriftCorrection:
    """The correction to the run of the first trial, or if that has no reference, to the first run that has one."""
    observed = [drift_observation(trial) for trial in study.get_trials(deepcopy=False)]
    return DriftCorrection.of(observed, run_with_turns(observed, observed[0].run if observed else None))


class _Sizes(Record):
    """The attribute `SPACE`."""

    format: str
    fingerprint: str
    runs: Annotated[Index, Field(le=MOST_RUNS)]
    lone: Annotated[Index, Field(le=MOST_LONE)]
    leaves_out: bool = False
    """Whether trials leave out parameters that their points do not use; those of earlier releases have all of them."""


def _sizes(study: optuna.Study) -> _Sizes:
    sizes = _attribute(study, SPACE)
    found = sizes.get("format") if isinstance(sizes, dict) else None
    check_format(found, FORMAT, _where(study), StudyError)
    return checked(_Sizes, sizes, _where(study, SPACE), StudyError)


def _semantics(study: optuna.Study) -> Semantics:
    kind: Any = Semantics
    made: Semantics = checked(kind, _attribute(study, SEMANTICS), _where(study, SEMANTICS), StudyError)
    return made


def _attribute(study: optuna.Study, name: str) -> Any:
    if name not in study.user_attrs:
        raise StudyError(f"study '{study.study_name}': '{name}' is missing, so it is not a study of plans")
    return study.user_attrs[name]

"""Optuna studies of plans: what they are about, their points, and their trials as samples.

A study carries its workload, its cluster and the level of semantics as user attributes. So plans and samples can be
made from its trials' parameters by anybody who opens it.
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
from lightning_autosync.documents import Index, Record, check_format, checked, parse_json
from lightning_autosync.errors import PlanError
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.measure.drift import DriftCorrection, run_with_turns
from lightning_autosync.plan.space import Genome, PlanSpace, Value
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.search.passwords import without_password
from lightning_autosync.search.storages import StudyError, missing_file, one_line, open_storage, storage_errors
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
"""Limits of a study's space; `PlanSpace` makes 4 and 6 by default."""
_DESCRIBE_TIMEOUT = 5.0
"""Seconds in which the process that made a study must describe it; after that it is taken for dead."""
_POLL_INTERVAL = 0.05


class Suggesting(Protocol):
    """A live or a fixed trial of Optuna."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


def distributions(space: PlanSpace) -> dict[str, CategoricalDistribution]:
    """The parameters of a space as Optuna knows them: categorical, fixed, in a fixed order."""
    return {name: CategoricalDistribution(domain) for name, domain in space.parameters.items()}


def suggest(trial: Suggesting, space: PlanSpace) -> dict[str, Value]:
    """A point of the space from a trial. It asks for every parameter, always in the same order."""
    return {name: trial.suggest_categorical(name, domain) for name, domain in space.parameters.items()}


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
    """Create a study of this space, or open the one of that name.

    If several processes begin a study at once, the one that makes it describes it. The others are refused if their
    space differs.

    Args:
        storage: as `open_storage` takes it, or an open one.
        name: of the study.
        space: whose points the trials are.
        sampler, pruner: as Optuna takes them.
        first: points of baselines that a new study measures first.

    Raises:
        StudyError: the storage cannot be opened, or the study is of another space or no study of plans.
        StorageError: the storage does not answer.
    """
    opened = storage if isinstance(storage, optuna.storages.BaseStorage) else open_storage(storage)
    study, is_ours = _create_or_load(opened, name, sampler, pruner)
    if not is_ours:
        _wait_for_description(study)
    if SPACE not in study.user_attrs:
        if WORKLOAD not in study.user_attrs and study.get_trials(deepcopy=False):
            raise StudyError(f"study '{name}': it has trials, but none of plans; choose another name or storage")
        describe(study, space, first)
    check(study, space)
    return study


@storage_errors()
def load_study(storage: str | os.PathLike[str], name: str | None = None) -> optuna.Study:
    """Open an existing study to read it; ``name`` may be left out if the storage has one study only.

    Raises:
        StudyError: there is no such storage or study, or it is not one of plans.
        StorageError: the storage does not answer.
    """
    text = os.fspath(storage)
    if (missing := missing_file(text)) is not None:
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


def describe(study: optuna.Study, space: PlanSpace, first: Sequence[Genome] = ()) -> None:
    """Write into a study what it is about, and enqueue the baselines that it measures first."""
    study.set_user_attr(WORKLOAD, json.dumps(space.workload.to_dict()))
    study.set_user_attr(CLUSTER, json.dumps(space.cluster.to_dict()))
    study.set_user_attr(SEMANTICS, space.semantics)
    enqueue(study, first, BASELINE)
    # Last: whoever sees it finds the others too.
    study.set_user_attr(
        SPACE, {"format": FORMAT, "fingerprint": space.fingerprint, "runs": space.runs, "lone": space.lone}
    )


def check(study: optuna.Study, space: PlanSpace) -> None:
    """Check that a study is about the same workload, cluster and blocks as a space. Domains may differ (`space_of`).

    Raises:
        StudyError: it is not.
    """
    sizes = _sizes(study)
    ours = {
        "workload": space.workload.fingerprint,
        "cluster": space.cluster.fingerprint,
        "semantics": space.semantics,
        "space": f"{space.runs} runs, {space.lone} lone",
    }
    theirs = {
        "workload": workload_of(study).fingerprint,
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
                f"study '{study.study_name}': it is of another {what} ({f'{there} {theirs[what]}'.strip()}, not "
                f"{f'{here} {value}'.strip()})"
                f"{_other_times(study, space)}; choose another name or storage, or give it as a source of transfer"
            )


def _other_times(study: optuna.Study, space: PlanSpace) -> str:
    """A hint, if a study is of the same variables but of another workload."""
    known, own = workload_of(study), space.workload
    if known.fingerprint == own.fingerprint or known.variables_fingerprint != own.variables_fingerprint:
        return ""
    return (
        ": the same variables, but other times or kinds of gradients; where another process measured the times of this "
        "model meanwhile, start again to take those"
    )


def _create_or_load(
    storage: optuna.storages.BaseStorage,
    name: str,
    sampler: optuna.samplers.BaseSampler | None,
    pruner: optuna.pruners.BasePruner | None,
) -> tuple[optuna.Study, bool]:
    """The study of that name, and whether this process made it."""
    kept: dict[str, Any] = {"storage": storage, "study_name": name, "sampler": sampler, "pruner": pruner}
    try:
        try:
            return optuna.create_study(direction="minimize", **kept), True
        except optuna.exceptions.DuplicatedStudyError:
            return optuna.load_study(**kept), False
    except Exception as error:
        raise StudyError(f"study '{name}': cannot be opened: {one_line(error)}") from None


def _wait_for_description(study: optuna.Study) -> None:
    """Wait until the process that made a study has described it, unless that process seems dead."""
    deadline = time.monotonic() + _DESCRIBE_TIMEOUT
    while SPACE not in study.user_attrs and time.monotonic() < deadline:
        if WORKLOAD not in study.user_attrs and study.get_trials(deepcopy=False):
            return
        time.sleep(_POLL_INTERVAL)


def workload_of(study: optuna.Study) -> Workload:
    """The workload that a study is about."""
    return Workload.from_dict(_document(study, WORKLOAD), _where(study, WORKLOAD))


def cluster_of(study: optuna.Study) -> ClusterSpec:
    """The cluster that a study is about."""
    return ClusterSpec.from_dict(_document(study, CLUSTER), _where(study, CLUSTER))


def _document(study: optuna.Study, name: str) -> Any:
    return parse_json(_attribute(study, name), _where(study, name), StudyError)


def _where(study: optuna.Study, name: str | None = None) -> str:
    return f"study '{study.study_name}'" + (f": {name}" if name else "")


def space_of(study: optuna.Study) -> PlanSpace:
    """The space of a study by its attributes, with the domains that its trials have.

    Raises:
        StudyError: the study is not one of plans, or its trials have other parameters than its workload asks for.
    """
    sizes = _sizes(study)
    if sizes.runs < 1:
        raise StudyError(
            f"study '{study.study_name}': its trials are sizes of buckets (search=horovod) and no points of a space of "
            "plans; studies of the other samplers can be read here"
        )
    about = workload_of(study), cluster_of(study), _semantics(study), sizes.runs, sizes.lone
    space = PlanSpace(*about)
    if space.fingerprint == sizes.fingerprint or not (recorded := _recorded_domains(study)):
        return space
    try:
        return PlanSpace(*about, recorded)
    except PlanError as error:
        raise StudyError(f"{_where(study)}: {error}") from None


def _recorded_domains(study: optuna.Study) -> dict[str, tuple[Value, ...]]:
    """The domains of parameters when the study began: builders and topologies may have come or gone since.

    Empty before the first trial.
    """
    found: dict[str, tuple[Value, ...]] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, distribution in trial.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                found.setdefault(name, distribution.choices)  # type: ignore[arg-type]  # checked where they are used
    return found


@storage_errors()
def enqueue(study: optuna.Study, points: Sequence[Genome], origin: str) -> None:
    """Enqueue points, except those that the study has or has enqueued already. Interrupted trials do not count.

    Raises:
        StorageError: the study's storage does not answer.
    """
    trials = study.get_trials(deepcopy=False)
    known = [
        enqueued_point(trial) for trial in trials if not was_interrupted(trial) and REFINED not in trial.user_attrs
    ]
    for point in points:
        if point not in known:
            study.enqueue_trial(dict(point), user_attrs={ORIGIN: origin})
            known.append(point)


def enqueue_baselines(study: optuna.Study, space: PlanSpace) -> None:
    """Enqueue every builder's plan."""
    enqueue(study, space.baselines(), BASELINE)


def samples_of(study: optuna.Study) -> list[Sample]:
    """The measured trials of a study, complete or pruned. Steps are corrected to the speed of one of its runs.

    Raises:
        StudyError: the study is not one of plans, or its trials are not points of its space.
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
    """The correction to the run of the study's first trial, or to the first run that measured the reference."""
    observed = [drift_observation(trial) for trial in study.get_trials(deepcopy=False)]
    return DriftCorrection.of(observed, run_with_turns(observed, observed[0].run if observed else None))


class _Sizes(Record):
    """The attribute `SPACE`."""

    format: str
    fingerprint: str
    runs: Annotated[Index, Field(le=MOST_RUNS)]
    lone: Annotated[Index, Field(le=MOST_LONE)]


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
        raise StudyError(f"study '{study.study_name}': it does not say its '{name}', so it is not one of plans")
    return study.user_attrs[name]

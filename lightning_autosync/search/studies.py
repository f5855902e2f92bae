"""Optuna studies of plans: what they are about, their points, and their trials as samples.

A study carries its workload, its cluster and the level of semantics as user attributes, so that it tells everything to
whoever opens it: plans and samples are made anew from its trials' parameters.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState
from pydantic import Field

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Index, Record, check_format, checked, parse_json
from lightning_autosync.errors import PlanError
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.measure.drift import Footing, run_with_turns
from lightning_autosync.plan.space import Genome, PlanSpace, Value
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.search.passwords import without_password
from lightning_autosync.search.storages import (
    StudyError,
    answered,
    in_a_line,
    missing_file,
    open_storage,
)
from lightning_autosync.search.tried import (
    BASELINE,
    ORIGIN,
    REFINED,
    RUN,
    given_point,
    kind_of,
    measured_steps,
    plan_of,
    sight_of,
    told,
    was_interrupted,
)
from lightning_autosync.workload import Workload

FORMAT = "autosync-study/2"
"""What the attributes below are called and mean."""
SPACE, WORKLOAD, CLUSTER, SEMANTICS = "autosync:space", "autosync:workload", "autosync:cluster", "autosync:semantics"
"""User attributes of a study: format, fingerprint and sizes of its space, and its documents as JSON text."""
MOST_RUNS, MOST_LONE = 64, 1024
"""Of a study's space: `PlanSpace` makes 4 and 6 unless it is told otherwise."""
_DESCRIBING = 5.0
"""Seconds that a study's maker has for saying what it is about; after that it is taken to be dead."""
_LOOK = 0.05
"""Seconds between two looks whether it has."""


class Suggesting(Protocol):
    """A live or a fixed trial of Optuna."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


def distributions(space: PlanSpace) -> dict[str, CategoricalDistribution]:
    """The parameters of a space as Optuna knows them: categorical, fixed, in a fixed order."""
    return {name: CategoricalDistribution(domain) for name, domain in space.parameters.items()}


def suggest(trial: Suggesting, space: PlanSpace) -> dict[str, Value]:
    """A point of the space from a trial; every parameter is asked for, always in the same order."""
    return {name: trial.suggest_categorical(name, domain) for name, domain in space.parameters.items()}


@answered()
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
        StorageError: the storage does not answer.
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


@answered()
def load_study(storage: str | os.PathLike[str], name: str | None = None) -> optuna.Study:
    """Open a study that is there, to read it; ``name`` may be left out where the storage has one only.

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
    """See to it that a study is about the same workload and cluster as a space, and has blocks like it.

    Domains may differ: see `space_of`.

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
        raise StudyError(f"study '{name}': cannot be opened: {in_a_line(error)}") from None


def _await_description(study: optuna.Study) -> None:
    """Leave it to the process that made a study to say what it is about, unless that has died over it."""
    deadline = time.monotonic() + _DESCRIBING
    while SPACE not in study.user_attrs and time.monotonic() < deadline:
        if WORKLOAD not in study.user_attrs and study.get_trials(deepcopy=False):
            return
        time.sleep(_LOOK)


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
    """The space of a study, from what the study says of itself, with the domains that its trials have.

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
    """What each parameter could be when the study began: builders and topologies may have come or gone since.

    Empty before the first trial, when nothing binds a study to the domains of then.
    """
    found: dict[str, tuple[Value, ...]] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, distribution in trial.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                found.setdefault(name, distribution.choices)  # type: ignore[arg-type]  # checked where they are used
    return found


@answered()
def enqueue(study: optuna.Study, points: Sequence[Genome], origin: str) -> None:
    """Have these points tried next, but for those that the study has or waits for already.

    Trials that were interrupted do not count: nothing is known of their plans.

    Raises:
        StorageError: the study's storage does not answer.
    """
    trials = study.get_trials(deepcopy=False)
    known = [given_point(trial) for trial in trials if not was_interrupted(trial) and REFINED not in trial.user_attrs]
    for point in points:
        if point not in known:
            study.enqueue_trial(dict(point), user_attrs={ORIGIN: origin})
            known.append(point)


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
            plan, factor = plan_of(trial, space), footing.bring(told(trial, RUN), trial.number, 1.0)
            brought = tuple(factor * seconds for seconds in steps)
            try:
                samples.append(Sample(space.workload, space.cluster, plan, brought, kind_of(trial)))
            except ValueError as error:
                raise StudyError(f"study '{study.study_name}': trial {trial.number}: {error}") from None
    return samples


def footing_of_study(study: optuna.Study) -> Footing:
    """The footing of the run that has the study's first trial, or of the first that has turns of the reference."""
    sights = [sight_of(trial) for trial in study.get_trials(deepcopy=False)]
    return Footing.of(sights, run_with_turns(sights, sights[0].run if sights else None))


class _Sizes(Record):
    """What a study says of its space."""

    format: str
    fingerprint: str
    runs: Annotated[Index, Field(le=MOST_RUNS)]
    lone: Annotated[Index, Field(le=MOST_LONE)]


def _sizes(study: optuna.Study) -> _Sizes:
    """What a study says of its space, in the format of this release."""
    sizes = _attribute(study, SPACE)
    found = sizes.get("format") if isinstance(sizes, dict) else None
    check_format(found, FORMAT, _where(study), StudyError)
    return checked(_Sizes, sizes, _where(study, SPACE), StudyError)


def _semantics(study: optuna.Study) -> Semantics:
    kind: Any = Semantics
    made: Semantics = checked(kind, _attribute(study, SEMANTICS), _where(study, SEMANTICS), StudyError)
    return made


def _attribute(study: optuna.Study, name: str) -> Any:
    attributes: Mapping[str, Any] = study.user_attrs
    if name not in attributes:
        raise StudyError(f"study '{study.study_name}': it does not say its '{name}', so it is not one of plans")
    return attributes[name]

"""Transfer: a search starts from earlier results of other models, other clusters, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import optuna
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Configuration, Record, digest
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned import Estimator, load_simulator
from lightning_autosync.learned.dataset import Dataset, Sample
from lightning_autosync.plan.space import BUILDER, Block, PlanSpace, Value
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.search.storages import StudyError
from lightning_autosync.search.studies import cluster_of, drift_correction, load_study, space_of, workload_of
from lightning_autosync.search.trial_attributes import RUN, attribute, seconds_of
from lightning_autosync.workload import Workload

Text = Annotated[str, Field(min_length=1)]
Relation = Literal["any", "other_model", "other_cluster", "both_other"]


class StudySource(Record):
    """An earlier study.

    Attributes:
        storage: path of a journal file, or URL of a database.
        name: name of the study; None if the storage has only one.
        model: required name of its workload; None does not check.
        cluster: required name of its cluster; None does not check.
    """

    storage: Text
    name: Text | None = None
    model: Text | None = None
    cluster: Text | None = None


class DatasetSource(Record):
    """A part of a dataset.

    Attributes:
        path: folder of the dataset.
        models: names of workloads to use; empty for all.
        clusters: names of clusters to use; empty for all.
        relation: which of these samples to use: ``any``; ``other_model``, on the search's cluster; ``other_cluster``,
            of the search's model; or ``both_other``. Models are equal if their variables have the same names and
            shapes. Clusters are equal if their machines and links are. Names of models and clusters do not matter.
    """

    path: Text
    models: tuple[Text, ...] = ()
    clusters: tuple[Text, ...] = ()
    relation: Relation = "any"


class TransferSettings(Configuration):
    """The sources of a search (``conf/transfer``). The user gives each source a name.

    Attributes:
        studies: studies that train the simulator, and whose best points are measured again.
        datasets: datasets that train the simulator.
        simulator: directory of a fitted simulator; None keeps the search's own.
        rates: file of rates that a hybrid run measured on hosts like these; None measures them.
    """

    studies: dict[str, StudySource] = Field(default_factory=dict)
    datasets: dict[str, DatasetSource] = Field(default_factory=dict)
    simulator: Text | None = None
    rates: Text | None = None

    @classmethod
    def parse(cls, data: Any) -> TransferSettings:
        """Settings from plain data; None or an empty mapping means no source.

        Raises:
            DocumentError: a field is wrong; the message names it.
        """
        try:
            return super().parse(data or {})
        except DocumentError as error:
            raise DocumentError(f"transfer: {error}") from None


@dataclass(frozen=True)
class Transfer:
    """Opened sources for `AutoSyncSampler`.

    Attributes:
        samples: measured plans.
        estimator: fitted simulator; None without one.
    """

    studies: Sequence[optuna.Study] = ()
    samples: Sequence[Sample] = ()
    estimator: Estimator | None = None


def load_transfer(
    settings: TransferSettings, workload: Workload, cluster: ClusterSpec, semantics: Semantics = "exact"
) -> Transfer:
    """Open all sources of a search for a workload on a cluster, with plans up to this level of semantics.

    Raises:
        DocumentError: a source is missing or damaged, or has another model or cluster than the settings require; the
            message begins with the source's name.
    """
    estimator = None
    if settings.simulator is not None:
        estimator = _named("simulator", load_simulator, settings.simulator)
    studies = [
        _named(f"studies.{name}", lambda of: _study(of, workload, cluster, semantics), source)
        for name, source in settings.studies.items()
    ]
    samples = [
        sample
        for name, source in settings.datasets.items()
        for sample in _named(f"datasets.{name}", lambda of: _samples(of, workload, cluster), source)
    ]
    return Transfer(studies, samples, estimator)


def _named(name: str, load: Any, source: Any) -> Any:
    try:
        return load(source)
    except DocumentError as error:
        raise type(error)(f"transfer.{name}: {error}") from None


def _study(source: StudySource, workload: Workload, cluster: ClusterSpec, semantics: Semantics) -> optuna.Study:
    study = load_study(source.storage, source.name)
    space = space_of(study)  # raises if the study's points cannot be read
    if cluster.measured:
        space.cluster.require_measured()
    own = workload.fingerprint, cluster.fingerprint, semantics
    if (space.workload.fingerprint, space.cluster.fingerprint, space.semantics) == own:
        raise StudyError(
            f"study '{study.study_name}' has this job's model and cluster: resume it (study.storage, study.name)"
            " or choose another source"
        )
    found = {"model": workload_of(study).name, "cluster": cluster_of(study).name}
    for what, name in found.items():
        wanted = getattr(source, what)
        if wanted is not None and wanted != name:
            raise StudyError(f"{what}: study '{study.study_name}' has '{name}', not '{wanted}'")
    return study


def _samples(source: DatasetSource, workload: Workload, cluster: ClusterSpec) -> list[Sample]:
    dataset = Dataset.load(source.path)
    own = _Own(workload, cluster)
    found = [sample for sample in dataset if _is_wanted(sample, source, own)]
    if not found:
        raise DocumentError(
            f"{source.path}: none of its {len(dataset)} samples matches the model, cluster and relation "
            f"({_names(dataset)}; relation: {source.relation})"
        )
    return found


def _is_wanted(sample: Sample, source: DatasetSource, own: _Own) -> bool:
    if source.models and sample.workload.name not in source.models:
        return False
    if source.clusters and sample.cluster.name not in source.clusters:
        return False
    same_model, same_cluster = own.has_model(sample), own.has_cluster(sample)
    wanted: Mapping[Relation, bool] = {
        "any": True,
        "other_model": not same_model and same_cluster,
        "other_cluster": same_model and not same_cluster,
        "both_other": not same_model and not same_cluster,
    }
    return wanted[source.relation]


class _Own:
    """Compares the workloads and clusters of samples with those of the search, by content."""

    def __init__(self, workload: Workload, cluster: ClusterSpec) -> None:
        self._variables = workload.variables_fingerprint
        self._machines = _machines(cluster)
        self._known: dict[int, tuple[ClusterSpec, bool]] = {}

    def has_model(self, sample: Sample) -> bool:
        return sample.workload.variables_fingerprint == self._variables

    def has_cluster(self, sample: Sample) -> bool:
        """Whether a sample has the search's cluster; cached by cluster, since many samples share one."""
        identity = id(sample.cluster)
        if identity not in self._known:
            # Keep a reference to the cluster, so that no other object can get the same id.
            self._known[identity] = sample.cluster, _machines(sample.cluster) == self._machines
        return self._known[identity][1]


def _machines(cluster: ClusterSpec) -> str:
    """The fingerprint of a cluster without its name."""
    return digest({name: value for name, value in cluster.to_dict().items() if name != "name"})


def _names(samples: Sequence[Sample]) -> str:
    models = sorted({sample.workload.name for sample in samples})
    clusters = sorted({sample.cluster.name for sample in samples})
    return f"it has models {', '.join(models) or 'none'}, clusters {', '.join(clusters) or 'none'}"


MAX_BEST_POINTS = 12
"""Maximum number of points of a source study that are measured again."""


def best_points(study: optuna.Study, space: PlanSpace, count: int = MAX_BEST_POINTS) -> list[dict[str, Value]]:
    """The best distinct points of a study of another model or cluster, mapped to ``space``, fastest first.

    Raises:
        StudyError: it is not a study of plans.
    """
    source, correction = space_of(study), drift_correction(study)
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def corrected(trial: FrozenTrial) -> float:
        return correction.convert(attribute(trial, RUN), trial.number, seconds_of(trial) or 0.0)

    ranked = sorted((trial for trial in trials if seconds_of(trial) is not None), key=corrected)
    points: dict[tuple[Value, ...], dict[str, Value]] = {}
    for trial in ranked:
        if source.parameters.keys() <= source.complete(trial.params).keys() and len(points) < count:
            point = mapped_point(trial.params, source, space)
            points.setdefault(tuple(point.values()), point)
    return list(points.values())


def mapped_point(genome: Mapping[str, Value], source: PlanSpace, target: PlanSpace) -> dict[str, Value]:
    """The point of ``target`` that treats every block like the block of ``source`` at the same place of backward.

    A value that is not in the target's domain becomes the first value of the domain. So a builder that does not fit the
    target becomes ``composed``.
    """
    genome = source.normal(genome)
    point: dict[str, Value] = {name: domain[0] for name, domain in target.parameters.items()}
    if genome[BUILDER] in target.parameters[BUILDER]:
        point[BUILDER] = genome[BUILDER]
    source_places, places = _places(source), _places(target)
    blocks = {block.name: block for block in target.blocks}
    like = {name: _nearest(block, places[name], source, source_places) for name, block in blocks.items()}
    for name, domain in target.parameters.items():
        block, _, aspect = name.rpartition("/")
        if block in blocks:
            value = _mapped_value(genome, f"{like[block]}/{aspect}", source, domain, aspect)
            point[name] = domain[0] if value is None else value
    return target.normal(point)


def _mapped_value(
    genome: Mapping[str, Value], name: str, source: PlanSpace, domain: tuple[Value, ...], aspect: str
) -> Value | None:
    """The source's value if the target's domain has it; bucket sizes are mapped by their index in the domain."""
    if name in genome:
        if aspect == "bucket":
            return domain[min(source.parameters[name].index(genome[name]), len(domain) - 1)]
        if genome[name] in domain:
            return genome[name]
    return "native" if aspect == "method" and "native" in domain else None


def _places(space: PlanSpace) -> dict[str, float]:
    """The place of each block in backward, from 0 to 1: the share of bytes before its middle variable."""
    workload = space.workload
    before: dict[str, float] = {}
    passed = 0
    for name in workload.ready_order:
        before[name] = passed / max(1, workload.bytes)
        passed += workload.variable(name).bytes
    return {block.name: before[block.variables[len(block.variables) // 2].name] for block in space.blocks}


def _nearest(block: Block, place: float, source: PlanSpace, places: Mapping[str, float]) -> str:
    """The nearest block of the source, preferably of the same kind (dense or row-wise, one variable or several)."""

    def distance(other: Block) -> tuple[bool, bool, float]:
        differs_in_count = (len(other.variables) == 1) != (len(block.variables) == 1)
        return other.dense != block.dense, differs_in_count, abs(places[other.name] - place)

    return min(source.blocks, key=distance).name

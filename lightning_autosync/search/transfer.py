"""Transfer: what a search starts from, of other models, other clusters, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import optuna
from pydantic import Field, ValidationError

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Record, describe_validation_error, digest
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned import Estimator, load_simulator
from lightning_autosync.learned.dataset import Dataset, Sample
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.search.storages import StudyError
from lightning_autosync.search.studies import cluster_of, load_study, space_of, workload_of
from lightning_autosync.workload import Workload

Text = Annotated[str, Field(min_length=1)]
Relation = Literal["any", "other_model", "other_cluster", "both_other"]


class StudySource(Record):
    """An earlier study.

    Attributes:
        storage: file of its journal, or the URL of a database.
        name: of the study; None where the storage has one only.
        model: name of the workload that it is about; None does not check.
        cluster: name of the cluster that it is about; None does not check.
    """

    storage: Text
    name: Text | None = None
    model: Text | None = None
    cluster: Text | None = None


class DatasetSource(Record):
    """A part of a dataset.

    Attributes:
        path: folder of the dataset.
        models: names of the workloads that are taken; empty takes all.
        clusters: names of the clusters that are taken; empty takes all.
        relation: which of these are taken beside the search's own workload and cluster: ``any``; ``other_model``, on
            the same cluster; ``other_cluster``, of the same model; or ``both_other``. A model is the same whose
            variables have the same names and shapes, a cluster whose machines and links are the same, whatever either
            is called.
    """

    path: Text
    models: tuple[Text, ...] = ()
    clusters: tuple[Text, ...] = ()
    relation: Relation = "any"


class TransferSettings(Record):
    """The sources of a search, by names of the user's choice (``conf/transfer``).

    Attributes:
        studies: whose trials train the simulator, and whose best points are carried over.
        datasets: whose samples train the simulator.
        simulator: directory of a fitted simulator; None keeps the search's own.
    """

    studies: dict[str, StudySource] = Field(default_factory=dict)
    datasets: dict[str, DatasetSource] = Field(default_factory=dict)
    simulator: Text | None = None

    @classmethod
    def parse(cls, data: Any) -> TransferSettings:
        """Settings from plain data; None and an empty mapping name no source.

        Raises:
            DocumentError: the first thing wrong, by field.
        """
        try:
            return cls.model_validate(data or {})
        except ValidationError as error:
            raise DocumentError(f"transfer: {describe_validation_error(error)}") from None


@dataclass(frozen=True)
class Transfer:
    """Opened sources, as `AutoSyncSampler` takes them.

    Attributes:
        studies: of other models or clusters.
        samples: measured plans.
        estimator: a fitted simulator; None if no source is one.
    """

    studies: Sequence[optuna.Study] = ()
    samples: Sequence[Sample] = ()
    estimator: Estimator | None = None


def load_transfer(
    settings: TransferSettings, workload: Workload, cluster: ClusterSpec, semantics: Semantics = "exact"
) -> Transfer:
    """Open all sources of a search for a workload on a cluster, for plans of some level at most.

    Raises:
        DocumentError: a source is not there, is damaged, or is not what the settings say of it; the message begins with
            the source's name.
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
    space = space_of(study)  # refuses one whose points cannot be read
    if cluster.measured:
        space.cluster.require_measured()
    own = workload.fingerprint, cluster.fingerprint, semantics
    if (space.workload.fingerprint, space.cluster.fingerprint, space.semantics) == own:
        raise StudyError(
            f"study '{study.study_name}' is about this model on this cluster: go on with it (study.storage, study.name)"
            " or start from others"
        )
    found = {"model": workload_of(study).name, "cluster": cluster_of(study).name}
    for what, name in found.items():
        wanted = getattr(source, what)
        if wanted is not None and wanted != name:
            raise StudyError(f"{what}: study '{study.study_name}' is about '{name}', not '{wanted}'")
    return study


def _samples(source: DatasetSource, workload: Workload, cluster: ClusterSpec) -> list[Sample]:
    dataset = Dataset.load(source.path)
    own = _Own(workload, cluster)
    found = [sample for sample in dataset if _is_wanted(sample, source, own)]
    if not found:
        raise DocumentError(
            f"{source.path}: none of its {len(dataset)} samples is of the wanted models and clusters "
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
    """The search's own workload and cluster, with which those of samples are compared by what they are."""

    def __init__(self, workload: Workload, cluster: ClusterSpec) -> None:
        self._variables = workload.variables_fingerprint
        self._machines = _machines(cluster)
        self._known: dict[int, tuple[ClusterSpec, bool]] = {}

    def has_model(self, sample: Sample) -> bool:
        return sample.workload.variables_fingerprint == self._variables

    def has_cluster(self, sample: Sample) -> bool:
        """Worked out once for each of a dataset's clusters, however many samples share it."""
        identity = id(sample.cluster)
        if identity not in self._known:
            # The cluster is kept, so that no other can come to have the same identity.
            self._known[identity] = sample.cluster, _machines(sample.cluster) == self._machines
        return self._known[identity][1]


def _machines(cluster: ClusterSpec) -> str:
    """The fingerprint of a cluster but for what people call it."""
    return digest({name: value for name, value in cluster.to_dict().items() if name != "name"})


def _names(samples: Sequence[Sample]) -> str:
    models = sorted({sample.workload.name for sample in samples})
    clusters = sorted({sample.cluster.name for sample in samples})
    return f"it has models {', '.join(models) or 'none'}, clusters {', '.join(clusters) or 'none'}"

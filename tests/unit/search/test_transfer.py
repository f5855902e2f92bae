"""Transfer: sources by name, points carried over, and clear errors."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import optuna
import pytest
import yaml
from clusters import shared_nodes, uneven_cluster

from lightning_autosync.cluster import ClusterSpec, configuration_directory
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned import ReplayEstimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.plan.space import BUILDER, PlanSpace
from lightning_autosync.search import studies
from lightning_autosync.search.storages import StudyError
from lightning_autosync.search.transfer import TransferSettings, best_points, load_transfer, mapped_point
from lightning_autosync.search.tuning.samplers import BucketSpace
from lightning_autosync.workload import Variable, Workload


def layers(count: int, name: str = "layers") -> Workload:
    variables = tuple(Variable(name=f"v{number:02}", shape=(40, 50)) for number in range(count))
    return Workload(name=name, variables=variables)


SOURCE = PlanSpace(layers(30, "deep"), uneven_cluster(4))
TARGET = PlanSpace(layers(16), uneven_cluster(3))


def fill(study: optuna.Study, space: PlanSpace, count: int = 5) -> None:
    rng = Random(0)
    for number in range(count):
        study.enqueue_trial(space.draw(rng))
        trial = study.ask()
        studies.suggest(trial, space)
        study.tell(trial, 1.0 + number)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "deep.journal"
    fill(studies.open_study(path, "deep", SOURCE), SOURCE)
    return path


def parse(**sources: object) -> TransferSettings:
    return TransferSettings.parse(sources)


def test_every_place_of_backward_keeps_its_treatment() -> None:
    genome = SOURCE.draw(Random(1))
    genome |= {"run0/method": "ring", "run1/method": "native", "run2/method": "star", "run2/servers": "even"}
    point = mapped_point(genome, SOURCE, TARGET)
    assert TARGET.normal(point) == point
    assert [point[f"run{number}/method"] for number in range(3)] == ["ring", "native", "star"]
    assert point["run2/servers"] == "even"


def test_what_the_target_cannot_do_stays_at_its_first_value() -> None:
    source = PlanSpace(layers(30), shared_nodes(6))
    genome = source.normal({**source.draw(Random(1)), "run0/method": "hierarchical"})
    assert "hierarchical" not in TARGET.parameters["run0/method"]
    assert mapped_point(genome, source, TARGET)["run0/method"] == "native"


def test_a_builder_stays_itself() -> None:
    point = next(point for point in SOURCE.baselines() if point[BUILDER] == "byteps")
    assert mapped_point(point, SOURCE, TARGET)[BUILDER] == "byteps"


def test_the_best_points_of_a_study_come_first_and_once(journal: Path) -> None:
    study = studies.load_study(journal)
    points = best_points(study, TARGET, 3)
    assert points[0] == mapped_point(study.best_trial.params, SOURCE, TARGET)
    assert len({tuple(point.values()) for point in points}) == len(points) <= 3


def test_a_study_is_opened_and_checked_by_its_names(journal: Path) -> None:
    sources = parse(studies={"deep": {"storage": str(journal), "model": "deep", "cluster": SOURCE.cluster.name}})
    transfer = load_transfer(sources, TARGET.workload, TARGET.cluster)
    assert [study.study_name for study in transfer.studies] == ["deep"]
    assert (transfer.samples, transfer.estimator) == ([], None)
    wrong = parse(studies={"deep": {"storage": str(journal), "model": "vgg16"}})
    with pytest.raises(StudyError, match=r"transfer\.studies\.deep: model: study 'deep' has 'deep', not 'vgg16'"):
        load_transfer(wrong, TARGET.workload, TARGET.cluster)


def test_a_study_is_no_source_of_a_search_for_the_same(journal: Path) -> None:
    sources = parse(studies={"deep": {"storage": str(journal)}})
    with pytest.raises(StudyError, match=r"transfer\.studies\.deep: study 'deep' has this job's model and cluster"):
        load_transfer(sources, SOURCE.workload, SOURCE.cluster)


def test_a_study_without_rates_is_no_source_of_a_search_with_them(tmp_path: Path) -> None:
    unknown = PlanSpace(layers(30, "deep"), ClusterSpec.uniform(nodes=2, devices=1))
    assert not unknown.cluster.measured
    fill(studies.open_study(tmp_path / "x.journal", "x", unknown), unknown)
    sources = parse(studies={"x": {"storage": str(tmp_path / "x.journal")}})
    with pytest.raises(DocumentError, match=r"transfer\.studies\.x: cluster 'uniform': .*bandwidth: unknown"):
        load_transfer(sources, TARGET.workload, TARGET.cluster)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    for sources, message in (
        (parse(studies={"a": {"storage": str(tmp_path / "none.journal")}}), r"transfer\.studies\.a: .*does not exist"),
        (parse(datasets={"b": {"path": str(tmp_path)}}), r"transfer\.datasets\.b: "),
        (parse(simulator=str(tmp_path)), r"transfer\.simulator: .*not a simulator"),
    ):
        with pytest.raises(DocumentError, match=message):
            load_transfer(sources, TARGET.workload, TARGET.cluster)
    with pytest.raises(DocumentError, match=r"transfer: studies\.a\.stor: unknown field"):
        parse(studies={"a": {"storage": "x.journal", "stor": "y"}})


def test_a_fitted_simulator_is_loaded(tmp_path: Path) -> None:
    ReplayEstimator().save(tmp_path / "fitted")
    transfer = load_transfer(parse(simulator=str(tmp_path / "fitted")), TARGET.workload, TARGET.cluster)
    assert isinstance(transfer.estimator, ReplayEstimator)


@pytest.mark.parametrize(
    ("relation", "expected"),
    [
        ("any", {("deep", 3), ("deep", 4), ("layers", 3), ("layers", 4)}),
        ("other_model", {("deep", 3)}),
        ("other_cluster", {("layers", 4)}),
        ("both_other", {("deep", 4)}),
    ],
)
def test_a_dataset_gives_the_samples_of_a_relation(
    monkeypatch: pytest.MonkeyPatch, relation: str, expected: set[tuple[str, int]]
) -> None:
    samples = []
    for size in (3, 4):
        cluster = uneven_cluster(size).model_copy(update={"name": f"of{size}"})
        for workload in (layers(16), layers(30, "deep")):
            plan = PlanSpace(workload, cluster).plan(PlanSpace(workload, cluster).baselines()[0])
            samples.append(Sample(workload, cluster, plan, (1.0,)))
    monkeypatch.setattr("lightning_autosync.search.transfer.Dataset.load", lambda path: samples)
    target = uneven_cluster(3).model_copy(update={"name": "of3"})
    found = load_transfer(parse(datasets={"all": {"path": "d", "relation": relation}}), layers(16), target)
    assert {(sample.workload.name, sample.cluster.world_size) for sample in found.samples} == expected
    with pytest.raises(
        DocumentError, match=r"transfer\.datasets\.all: .*it has models deep, layers, clusters of3, of4"
    ):
        load_transfer(parse(datasets={"all": {"path": "d", "models": ["vgg16"]}}), layers(16), target)


def test_relations_look_at_what_models_and_clusters_are_and_not_at_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(workload: Workload, cluster: ClusterSpec) -> Sample:
        space = PlanSpace(workload, cluster)
        return Sample(workload, cluster, space.plan(space.baselines()[0]), (1.0,))

    own, cluster = layers(16), uneven_cluster(3)
    timed = own.model_copy(update={"name": "measured again", "backward_time": 0.5})
    other_links = ClusterSpec.star(bandwidths=[5e7, 1e7, 1e7], name=cluster.name)
    other_model = layers(30)  # by the same name
    renamed = cluster.model_copy(update={"name": "renamed"})
    samples = [sample(*pair) for pair in ((timed, other_links), (other_model, renamed), (other_model, other_links))]
    monkeypatch.setattr("lightning_autosync.search.transfer.Dataset.load", lambda path: samples)
    for relation, expected in (("other_cluster", 0), ("other_model", 1), ("both_other", 2)):
        found = load_transfer(parse(datasets={"all": {"path": "d", "relation": relation}}), own, cluster)
        assert found.samples == [samples[expected]]


def test_a_study_of_bucket_sizes_is_refused_as_a_source(tmp_path: Path) -> None:
    buckets: Any = BucketSpace(SOURCE.workload, SOURCE.cluster)
    studies.open_study(tmp_path / "horovod.journal", "tune", buckets)
    sources = parse(studies={"old": {"storage": str(tmp_path / "horovod.journal")}})
    with pytest.raises(StudyError, match=r"transfer\.studies\.old: study 'tune': its trials are bucket sizes"):
        load_transfer(sources, TARGET.workload, TARGET.cluster)


@pytest.mark.parametrize("path", sorted((configuration_directory() / "transfer").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_sources_parse(path: Path) -> None:
    TransferSettings.parse(yaml.safe_load(path.read_text()))

"""The pretrained simulator: its files and card, its accuracy on what it did not see, and the jobs that it is for."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path

import numpy
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_autosync.cluster import ClusterSpec, configuration_directory
from lightning_autosync.documents import digest, read_data
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.fitting.encoding import encode_samples
from lightning_autosync.lab.fitting.splits import FitSettings, cluster, family, hold_out
from lightning_autosync.lab.fitting.whole import HeldOutSamples
from lightning_autosync.learned import LearnedEstimator, ReplayEstimator, SimulatorError
from lightning_autosync.learned.card import HeldOut
from lightning_autosync.learned.dataset import Dataset, Sample
from lightning_autosync.learned.dataset.parts import load_manifest
from lightning_autosync.learned.pretrained import DIRECTORY, choose_pretrained, load_pretrained, pretrained_card
from lightning_autosync.learned.registry import SimulatorSettings
from lightning_autosync.measure import hosts
from lightning_autosync.search.tuning.job import PriorKnowledge, TuningJob
from lightning_autosync.search.tuning.settings import TuningSettings

DATASET = Path(__file__).parents[3] / "examples" / "datasets" / "emulated"
PLANS = 14
"""Number of plans of a held-out pair that are encoded here."""


@pytest.fixture(scope="module")
def pairs() -> list[Dataset]:
    """The samples of each pair of a workload and a cluster; they are read when they are used."""
    recorded = Dataset.load(DATASET)
    places = recorded.frame().groupby(["workload_name", "cluster_name"]).indices
    return [recorded.select(of.tolist()) for of in places.values()]


@pytest.fixture(scope="module")
def held_out(pairs: list[Dataset]) -> list[Sample]:
    """Some plans of one workload of each held-out model on each held-out cluster."""
    firsts = hold_out([of[0] for of in pairs], pretrained_card().held_out)[1]
    names = {(first.workload.name, cluster(first)) for first in firsts if first.workload.name.endswith("-0")}
    chosen = [of for of in pairs if (of[0].workload.name, cluster(of[0])) in names]
    return [sample for of in chosen for sample in of[:PLANS]]


def test_weights_are_small_and_the_card_names_the_shipped_dataset(pairs: list[Dataset]) -> None:
    card = pretrained_card()
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 1_000_000
    assert card.dataset == digest([part.sha256 for part in load_manifest(DATASET).parts])
    kept, apart = hold_out([of[0] for of in pairs], card.held_out)
    assert card.accuracy is not None
    assert (card.samples, card.accuracy.plans) == (84 * len(kept), 84 * len(apart))  # each pair has as many samples
    assert {len(of) for of in pairs} == {84}
    assert not {family(sample) for sample in kept} & set(card.held_out.models)
    assert not {cluster(sample) for sample in kept} & set(card.held_out.clusters)
    assert {"torch", "dgl", "numpy", "lightning-autosync"} <= card.versions.keys()


def test_the_command_in_the_card_fits_this_simulator() -> None:
    card = pretrained_card()
    program, verb, *words = shlex.split(card.command)
    assert (program, verb) == ("autosync", "fit")
    with initialize_config_dir(str(configuration_directory()), version_base="1.3"):
        composed = compose("fit", overrides=words)
    given = OmegaConf.to_container(composed)
    assert isinstance(given, dict)
    settings = FitSettings.parse(given)
    assert (Path(__file__).parents[3] / settings.dataset[0]).resolve() == DATASET.resolve()
    assert settings.held_out == card.held_out
    simulator = load_pretrained()
    assert simulator.kind.KIND == settings.simulator.kind == "hetero"
    assert (simulator.members, simulator.training) == (settings.simulator.members, settings.simulator.training)
    assert simulator.sizes.model_dump() == settings.simulator.network


def test_it_predicts_better_than_the_replay_what_it_did_not_see(held_out: list[Sample]) -> None:
    simulator = load_pretrained()
    encoded = encode_samples(held_out, simulator.constants, ("replay", "hetero"), 1)
    found = HeldOutSamples(encoded["hetero"], encoded["replay"]).judge(simulator)
    assert found.plans == len(held_out) == 6 * PLANS
    assert found.simulator.tau > found.replay.tau
    assert found.simulator.median_error < found.replay.median_error


def test_it_predicts_without_dgl(held_out: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dgl", None)  # importing it raises ImportError
    with pytest.raises(ImportError):
        import dgl  # noqa: F401
    sample = held_out[0]
    estimate = load_pretrained().estimate(sample.workload, sample.cluster, [sample.plan])
    assert numpy.isfinite(estimate.seconds).all()
    assert estimate.deviation[0] > 0  # the networks of an ensemble differ


def test_other_jobs_have_the_replay(held_out: list[Sample], caplog: pytest.LogCaptureFixture) -> None:
    sample, constants = held_out[0], load_pretrained().constants
    caplog.set_level(logging.INFO)
    assert isinstance(choose_pretrained(sample.workload, sample.cluster, constants), LearnedEstimator)
    assert "the pretrained simulator predicts times" in caplog.text
    links = [{**link, "latency": 0.005} for link in sample.cluster.to_dict()["links"]]
    slow = ClusterSpec.from_dict({**sample.cluster.to_dict(), "links": links})
    large = ClusterSpec.uniform(nodes=64, devices=1, bandwidth="400 Mbit/s")
    others = constants.model_copy(update={"cores": 64.0})
    for job, reason in (
        ((sample.workload, slow, constants), "largest latency of a link is 5 ms, but was "),
        ((sample.workload, large, constants), "number of ranks is 64, but was 4 to 8 in its dataset"),
        ((sample.workload, sample.cluster, others), "the hosts' cores is 64.0, but was 2.0 in its dataset"),
    ):
        caplog.clear()
        chosen = choose_pretrained(*job)
        assert isinstance(chosen, ReplayEstimator)
        assert chosen.constants == job[2]
        assert len(caplog.records) == 1
        assert reason in caplog.text


def test_settings_name_it() -> None:
    settings = SimulatorSettings.model_validate(read_data(configuration_directory() / "simulator" / "pretrained.yaml"))
    assert settings.kind == "pretrained"
    with pytest.raises(SimulatorError, match="'pretrained' is fitted"):
        settings.build(load_pretrained().constants, 0)
    with pytest.raises(ValueError, match="members: not allowed with 'pretrained'"):
        SimulatorSettings(kind="pretrained", members=2)
    with pytest.raises(DocumentError, match="simulator: kind: 'pretrained' is not known; allowed: replay"):
        FitSettings.parse({"dataset": "somewhere", "simulator": {"kind": "pretrained"}})
    with pytest.raises(DocumentError, match="held_out: allowed with compare="):
        FitSettings.parse(
            {"dataset": "d", "simulator": {"kind": "linear"}, "held_out": {"models": ["a"], "clusters": ["b"]}}
        )
    with pytest.raises(ValueError, match="give models and clusters, or neither"):
        HeldOut(models=("vgg",))


def test_tune_takes_it_for_emulated_links_alone(
    held_out: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "usable_cores", lambda: 2)
    held_out[0].workload.save(tmp_path / "workload.yaml")
    given = {
        "model": {"kind": "paced", "workload_file": str(tmp_path / "workload.yaml")},
        "cluster": held_out[0].cluster.to_dict(),
        "simulator": {"kind": "pretrained"},
    }
    for launch, expected in (("emulated", LearnedEstimator), ("local", ReplayEstimator)):
        settings = TuningSettings.parse({**given, "launch": {"kind": launch}})
        assert isinstance(PriorKnowledge.of(TuningJob.of(settings)).estimator, expected)

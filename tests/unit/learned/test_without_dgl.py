"""A fitted `hetero` predicts without DGL, and as it would with it; a search leaves it as it was fitted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import torch

from lightning_autosync.learned import LearnedEstimator, SimulatorError, Training, ensemble, load_simulator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.hetero import DGLSums, HeteroNetwork, TorchSums, batch_graphs
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.search import studies
from lightning_autosync.search.sampler import AutoSyncSampler
from tests.unit.learned.learned_samples import CONSTANTS, drawn, star, workload


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return drawn(12, (workload(), star(400, 100, 100)))


@pytest.fixture(scope="module")
def fitted(samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fitted")
    simulator = LearnedEstimator("hetero", CONSTANTS, members=1, training=Training(epochs=3, least_steps=10))
    simulator.fit(samples)
    simulator.save(directory)
    return directory


def test_torch_predicts_what_dgl_would_and_has_the_same_gradients(samples: list[Sample], fitted: Path) -> None:
    simulator = LearnedEstimator.load(fitted)
    network = simulator.networks[0].eval()
    assert isinstance(network, HeteroNetwork)
    batch, scores, gradients = batch_graphs(simulator.encode(samples).items), [], []
    for sums in (TorchSums, DGLSums):
        network.zero_grad()
        scores.append(network.score(network.embed_by(sums(batch), batch)))
        scores[-1].sum().backward()
        gradients.append([weight.grad for weight in network.parameters() if weight.grad is not None])
    assert scores[0].std() > 1e-3
    torch.testing.assert_close(*scores, rtol=0, atol=1e-6)
    assert len(gradients[0]) == len(gradients[1]) > 20
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_fitted_simulator_predicts_without_dgl(samples: list[Sample], fitted: Path) -> None:
    program = f"""
import sys
sys.modules["dgl"] = None  # importing it raises ImportError
from lightning_autosync.learned import load_simulator
from tests.unit.learned.learned_samples import drawn, star, workload
sample = drawn(1, (workload(), star(400, 100, 100)))[0]
print(load_simulator({str(fitted)!r}).estimate(sample.workload, sample.cluster, [sample.plan]).seconds[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    there = load_simulator(fitted).estimate(samples[0].workload, samples[0].cluster, [samples[0].plan])
    assert float(done.stdout) == pytest.approx(there.seconds[0], rel=1e-6)


def test_a_search_does_not_train_a_fitted_simulator(
    samples: list[Sample], fitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []
    monkeypatch.setattr(ensemble, "train", lambda *arguments: steps.append(arguments))
    space, elsewhere = PlanSpace(workload("gpt"), star(200, 200, name="other")), samples[:4]
    for simulator, trains in ((LearnedEstimator.load(fitted), False), (LearnedEstimator("hetero", CONSTANTS), True)):
        steps.clear()
        sampler = AutoSyncSampler(
            space, estimator=simulator, source_samples=elsewhere, seed=0, refit=2, population=8, batch=2
        )
        study = optuna.create_study(sampler=sampler)
        studies.describe(study, space)
        for number in range(3):
            trial = study.ask()
            studies.suggest(trial, space)
            study.tell(trial, 0.05 + 0.001 * number)
        assert bool(steps) == trains


def test_weights_of_another_encoding_are_refused(fitted: Path) -> None:
    header = fitted / "simulator.json"
    text = header.read_text()
    data = json.loads(text)
    load_simulator(fitted)
    data["settings"]["encoding"] = "0" * 12
    header.write_text(json.dumps(data))
    with pytest.raises(SimulatorError, match=r"settings\.encoding: expected '\w+', got '0+': .*fit it again"):
        load_simulator(fitted)
    header.write_text(text)

"""Simulators learn, are kept in files, and say clearly what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from learned_samples import CONSTANTS, drawn, plan_of, star, workload

from lightning_autosync.bench.fitting.accuracy import Accuracy
from lightning_autosync.errors import PlanError
from lightning_autosync.simulator.dataset import Sample
from lightning_autosync.simulator.learned import (
    SIMULATORS,
    LearnedEstimator,
    ReplayEstimator,
    Simulator,
    SimulatorError,
    Training,
    load_simulator,
)
from lightning_autosync.simulator.learned.training import scores

QUICK = Training(epochs=30, least_steps=0, learning_rate=4e-3, batch=32)
LEARNED = [name for name in SIMULATORS if name != "replay"]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    fat, even = star(400, 100, 100, name="fat"), star(200, 200, 200, name="even")
    return drawn(48, (workload("vgg"), fat), (workload("bert", layers=3, width=240), even))


@pytest.fixture(scope="module")
def fitted(samples: list[Sample]) -> LearnedEstimator:
    simulator = LearnedEstimator("hetero", CONSTANTS, members=2, training=QUICK)
    simulator.fit(samples[::2])
    return simulator


@pytest.mark.parametrize("name", SIMULATORS)
def test_all_are_estimators(name: str, samples: list[Sample]) -> None:
    simulator = SIMULATORS[name](constants=CONSTANTS)
    assert isinstance(simulator, Simulator)
    sample = samples[0]
    estimate = simulator.estimate(sample.workload, sample.cluster, [sample.plan, samples[1].plan])
    assert estimate.seconds.shape == estimate.deviation.shape == (2,)
    assert (estimate.seconds > 0).all()
    assert estimate.deviation.tolist() == [0, 0]
    assert simulator.estimate(sample.workload, sample.cluster, []).seconds.shape == (0,)


def test_untrained_it_says_what_the_replay_says(samples: list[Sample]) -> None:
    sample = samples[0]
    plans = [one.plan for one in samples[:5]]
    replayed = ReplayEstimator(CONSTANTS).estimate(sample.workload, sample.cluster, plans)
    ours = LearnedEstimator("hetero", CONSTANTS).estimate(sample.workload, sample.cluster, plans)
    assert ours.seconds == pytest.approx(replayed.seconds)


def test_it_learns_what_the_replay_does_not_know(samples: list[Sample], fitted: LearnedEstimator) -> None:
    unseen = fitted.encode(samples[1::2])
    replay = Accuracy.of(unseen, numpy.exp(unseen.base))
    ours = Accuracy.of(unseen, fitted.estimate_encoded(unseen.items, unseen.base).seconds)
    assert replay.ranking < 0.93  # there is something to learn
    assert ours.ranking > replay.ranking + 0.03
    assert ours.median < replay.median / 2.5  # 2.8 to 3.9 times less, over five seeds


@pytest.mark.parametrize(("name", "least"), [("linear", 0.54), ("recurrent", 0.7), ("attention", 0.7)])
def test_the_papers_simulators_learn_to_rank(name: str, least: float, samples: list[Sample]) -> None:
    simulator = LearnedEstimator(name, CONSTANTS, members=1, training=QUICK)
    seen = simulator.encode(samples)
    simulator.fit(samples)
    accuracy = Accuracy.of(seen, simulator.estimate_encoded(seen.items, seen.base).seconds)
    assert accuracy.ranking > least
    assert accuracy.median < 0.5


def test_the_deviation_is_by_how_much_the_networks_disagree(samples: list[Sample], fitted: LearnedEstimator) -> None:
    seen = fitted.encode(samples[:6])
    both = numpy.stack([seen.base + scores(fitted.kind, network, seen.items) for network in fitted.networks])
    estimate = fitted.estimate_encoded(seen.items, seen.base)
    assert estimate.deviation == pytest.approx(abs(both[0] - both[1]) / 2, rel=1e-4)
    assert numpy.log(estimate.seconds) == pytest.approx(both.mean(axis=0))
    assert estimate.deviation.min() > 0


def test_fit_goes_on_from_what_it_has(samples: list[Sample], fitted: LearnedEstimator, tmp_path: Path) -> None:
    target = drawn(40, (workload("vgg", layers=8), star(50, 200, 200, 200)))
    fitted.save(tmp_path)
    tuned, fresh = load_simulator(tmp_path), LearnedEstimator("hetero", CONSTANTS, members=2, training=QUICK)
    assert isinstance(tuned, LearnedEstimator)
    unseen = tuned.encode(target[20:])
    before = Accuracy.of(unseen, tuned.estimate_encoded(unseen.items, unseen.base).seconds)
    tuned.fit(target[:20])
    after = Accuracy.of(unseen, tuned.estimate_encoded(unseen.items, unseen.base).seconds)
    assert after.median < before.median
    untrained = Accuracy.of(unseen, fresh.estimate_encoded(unseen.items, unseen.base).seconds)
    assert before.median < untrained.median  # what was learned elsewhere carries over


def test_fitting_twice_the_same_gives_the_same(samples: list[Sample]) -> None:
    made = []
    for _ in range(2):
        simulator = LearnedEstimator("hetero", CONSTANTS, members=1, training=Training(epochs=2, least_steps=0))
        simulator.fit(samples[:20])
        sample = samples[0]
        made.append(simulator.estimate(sample.workload, sample.cluster, [sample.plan]).seconds)
    assert made[0] == pytest.approx(made[1], rel=1e-6)


@pytest.mark.parametrize("name", LEARNED)
def test_a_callers_own_draws_go_on_undisturbed(name: str, samples: list[Sample], tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    simulator = LearnedEstimator(name, CONSTANTS, members=2, training=Training(epochs=1, least_steps=0))
    simulator.fit(samples[:10])
    simulator.fit(samples[10:20])
    simulator.save(tmp_path)
    load_simulator(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", SIMULATORS)
def test_what_is_saved_is_what_is_loaded(name: str, samples: list[Sample], tmp_path: Path) -> None:
    options = {} if name == "replay" else {"members": 2, "training": Training(epochs=1, least_steps=0)}
    simulator = SIMULATORS[name](constants=CONSTANTS, **options)
    simulator.fit(samples[:10])
    simulator.save(tmp_path)
    loaded = load_simulator(tmp_path)
    plans = [sample.plan for sample in samples[:5]]
    one, other = (kind.estimate(samples[0].workload, samples[0].cluster, plans) for kind in (simulator, loaded))
    assert numpy.array_equal(one.seconds, other.seconds)
    assert numpy.array_equal(one.deviation, other.deviation)


def test_another_format_version_gives_one_clear_error(fitted: LearnedEstimator, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    header = tmp_path / "simulator.json"
    header.write_text(header.read_text().replace("autosync-simulator/2", "autosync-simulator/3"))
    with pytest.raises(SimulatorError, match=r"simulator\.json: format: 'autosync-simulator/3' was written by a newer"):
        load_simulator(tmp_path)


def test_wrong_files_give_clear_errors(fitted: LearnedEstimator, tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match="autosync fit"):
        load_simulator(tmp_path / "nowhere")
    fitted.save(tmp_path)
    header = json.loads((tmp_path / "simulator.json").read_text())
    _write(tmp_path, {**header, "kind": "oracle"})
    with pytest.raises(SimulatorError, match="'oracle' is not known; allowed: replay, linear"):
        load_simulator(tmp_path)
    _write(tmp_path, {**header, "settings": {**header["settings"], "members": 0}})
    with pytest.raises(SimulatorError, match="settings: members"):
        load_simulator(tmp_path)
    _write(tmp_path, {**header, "settings": {**header["settings"], "network": {"hidden": 16}}})
    with pytest.raises(SimulatorError, match="not the weights of this simulator"):
        load_simulator(tmp_path)
    _write(tmp_path, header)
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SimulatorError, match="not the weights of this simulator"):
        load_simulator(tmp_path)
    weights.unlink()
    with pytest.raises(SimulatorError, match=r"weights\.safetensors"):
        load_simulator(tmp_path)


def test_wrong_arguments_give_clear_errors(samples: list[Sample]) -> None:
    with pytest.raises(SimulatorError, match="'oracle' is not known"):
        LearnedEstimator("oracle")
    with pytest.raises(SimulatorError, match="not fitted yet"):
        LearnedEstimator("hetero").save("/nowhere")
    with pytest.raises(SimulatorError, match="widht"):
        LearnedEstimator("recurrent", network={"widht": 3}).fit(samples[:2])
    model, cluster = workload(), star(100, 100)
    with pytest.raises(PlanError, match="world_size"):
        LearnedEstimator("hetero").estimate(model, cluster, [plan_of(model, 3)])


def test_without_dgl_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, samples: list[Sample]) -> None:
    monkeypatch.setitem(sys.modules, "dgl", None)
    simulator = LearnedEstimator("hetero", CONSTANTS, members=1)
    with pytest.raises(SimulatorError, match="pip install 'dgl"):
        simulator.fit(samples[:2])
    LearnedEstimator("linear", CONSTANTS, training=Training(epochs=1, least_steps=0)).fit(samples[:2])


def test_dgl_is_imported_only_by_graph_simulators_and_says_nothing(tmp_path: Path) -> None:
    program = """
import sys
import lightning_autosync.simulator.learned as learned
learned.LearnedEstimator("linear")
assert "dgl" not in sys.modules
from lightning_autosync.simulator.learned.backend import load_dgl
assert load_dgl().__name__ == "dgl"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=_bare(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / ".dgl").exists()


def _bare(home: Path) -> dict[str, str]:
    import os

    kept = {name: value for name, value in os.environ.items() if not name.startswith("DGL")}
    return {**kept, "HOME": str(home)}


def _write(directory: Path, header: dict[str, object]) -> None:
    (directory / "simulator.json").write_text(json.dumps(header))

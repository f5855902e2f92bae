"""``autosync fit``: divisions that do not leak, metrics by hand, and the command from a dataset to a simulator."""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import numpy
import pytest
import torch
from learned_samples import CONSTANTS, drawn, plan_of, star, workload

from lightning_autosync.cli.fit import fit
from lightning_autosync.cluster import configuration_directory
from lightning_autosync.documents import read_data
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.fitting import comparison
from lightning_autosync.lab.fitting.comparison import (
    FORMAT,
    FitResult,
    FitRun,
    SimulatorAccuracy,
    compare,
    judge,
    summary,
)
from lightning_autosync.lab.fitting.encoding import encode_samples, spread
from lightning_autosync.lab.fitting.splits import (
    BLOCKS,
    SPLITS,
    FitSettings,
    SplitName,
    cluster,
    divide,
    family,
    for_all,
)
from lightning_autosync.lab.fitting.whole import regrets
from lightning_autosync.learned import LearnedEstimator, load_simulator, training
from lightning_autosync.learned.card import SimulatorCard
from lightning_autosync.learned.dataset import Conditions, Dataset, Entry, Sample, Writer
from lightning_autosync.learned.ensemble import KINDS
from lightning_autosync.learned.examples import Examples, Floats
from lightning_autosync.learned.registry import SimulatorSettings
from lightning_autosync.learned.training import CERTAIN, distinct_pairs
from lightning_autosync.plan import SyncPlan, compile_plan, signature
from lightning_autosync.replay import Replay
from lightning_autosync.run_files import RunFile, alone

CLUSTERS = ("a", "b", "c", "d", "e")
FAMILIES = ("vgg16", "bert_base", "bert_large", "gpt", "ncf", "resnet50")


@pytest.fixture(scope="module")
def grid() -> list[Sample]:
    """Ten plans of every family on every cluster, each measured twice, the second time under other names."""
    samples = []
    for name in CLUSTERS:
        machines = star(100, 100, 100, name=name)
        for model in FAMILIES:
            made = workload(model, layers=2, width=64)
            for size in range(10):
                plan = plan_of(made, 3, priority=size)
                samples += [Sample(made, machines, plan, (0.01,)), Sample(made, machines, _renamed(plan), (0.02,))]
    return samples


def _renamed(plan: SyncPlan) -> SyncPlan:
    """The same exchange, its messages called otherwise."""
    groups = tuple(group.model_copy(update={"name": f"{group.name}'"}) for group in plan.groups)
    return plan.model_copy(update={"groups": groups})


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("number", range(4))
def test_divisions_do_not_leak(grid: list[Sample], how: SplitName, number: int) -> None:
    split = divide(grid, how, 0, number)
    assert len(split.held_out) == 4
    assert len({tuple(part) for part in split.held_out}) > 1
    for part in split.held_out:
        held_out, test = set(part.tolist()), set(split.test.tolist())
        learned = set(split.train.tolist()) - held_out
        assert held_out < set(split.train.tolist())
        assert not test & set(split.train.tolist())
        _check_parts(*([grid[place] for place in places] for places in (learned, held_out, test)), how, split.unseen)


def _check_parts(
    learned: list[Sample], held_out: list[Sample], test: list[Sample], how: SplitName, unseen: Sequence[str]
) -> None:
    """No plan, cluster or family is on both sides of what the division is by."""
    if how == "trial":
        plans = [{signature(sample.plan) for sample in part} for part in (learned, held_out, test)]
        assert len(set().union(*plans)) == sum(map(len, plans)) == 10 * len(FAMILIES)
    for name in {"cluster": [cluster], "model": [family], "both": [cluster, family]}.get(how, []):
        names = [{name(sample) for sample in part} for part in (learned, held_out, test)]
        assert names[2]
        assert not names[2] & (names[0] | names[1])
        assert names[2] <= set(unseen)
        if how != "both":
            assert not names[0] & names[1]


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("seed", range(3))
def test_divisions_test_everything_once_before_anything_again(grid: list[Sample], how: SplitName, seed: int) -> None:
    splits = [divide(grid, how, seed, number) for number in range(BLOCKS)]
    tested = numpy.concatenate([split.test for split in splits])
    assert len(numpy.unique(tested)) == len(tested)
    if how == "both":  # a block of the one meets one of the other
        assert set().union(*(split.unseen for split in splits)) == {*CLUSTERS, *map(family, grid)}
    else:
        assert len(tested) == len(grid)


def test_then_they_are_shuffled_anew(grid: list[Sample]) -> None:
    few = [sample for sample in grid if sample.cluster.name in "abc"]
    found = [divide(few, "cluster", 0, number).unseen for number in range(9)]
    for start in (0, 3, 6):
        assert sorted(found[start : start + 3]) == [("a",), ("b",), ("c",)]
    orders = {tuple(found[start : start + 3]) for start in (0, 3, 6)}
    assert len(orders) > 1


def test_without_a_test_every_sample_is_learned_from(grid: list[Sample]) -> None:
    split = for_all(grid, 0, members=3)
    assert len(split.train) == len(grid)
    assert not len(split.test)
    learned = [set(split.train.tolist()) - set(part.tolist()) for part in split.held_out]
    assert set().union(*learned) == set(range(len(grid)))
    for part in split.held_out:
        assert len({grid[place].cluster.name for place in part}) == 1
    for samples, members in ((grid, 1), ([sample for sample in grid if sample.cluster.name in "ab"], 3)):
        names = {sample.cluster.name for sample in samples}
        for part in for_all(samples, 0, members).held_out:
            assert {samples[place].cluster.name for place in part} == names


def test_models_of_one_family_stay_together(grid: list[Sample]) -> None:
    assert {family(sample) for sample in grid} == {"vgg", "bert", "gpt", "ncf", "resnet"}


def test_a_division_follows_from_its_seed(grid: list[Sample]) -> None:
    def tests(seed: int, number: int = 0) -> list[int]:
        return divide(grid, "trial", seed, number).test.tolist()

    assert tests(1) == tests(1) != tests(2)
    assert tests(1, BLOCKS + 1) == tests(1, BLOCKS + 1) != tests(1, 1)


def test_too_few_clusters_give_a_clear_error(grid: list[Sample]) -> None:
    few = [sample for sample in grid if sample.cluster.name in "ab"]
    with pytest.raises(DocumentError, match=r"2 cluster names .*\(a, b\)"):
        divide(few, "cluster", 0)
    with pytest.raises(DocumentError, match="too few for training"):
        divide(grid[:2], "trial", 0)


@pytest.mark.slow
def test_runs_are_of_one_division_after_the_other(grid: list[Sample], tmp_path: Path) -> None:
    few = grid[::7]
    settings = FitSettings.parse({**_configuration(Path("somewhere")), "compare": ["linear"], "splits": ["cluster"]})
    settings = settings.model_copy(update={"seed": 3, "seeds": 3})
    encoded = encode_samples(few, CONSTANTS, ("linear",), processes=1)
    runs = list(compare(settings, few, encoded, CONSTANTS, empty_file(tmp_path)))
    assert [run.division for run in runs] == [0, 1, 2]
    assert [run.unseen for run in runs] == [divide(few, "cluster", 3, number).unseen for number in range(3)]


@pytest.mark.parametrize("given", [{}, {"key": "out"}])
def test_runs_made_with_other_settings_name_the_key_of_the_file(tmp_path: Path, given: dict[str, str]) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"format": FORMAT, "settings": {"seed": 1}}) + "\n")
    wanted = rf"^{path}: seed: its runs were made with 1, not 2; .* as {given.get('key', 'runs')}=FILE$"
    with pytest.raises(DocumentError, match=wanted):
        RunFile(path, FORMAT, "a comparison", {"seed": 2}, FitRun, **given)


def empty_file(directory: Path) -> RunFile[FitRun]:
    return RunFile(directory / "runs.jsonl", FORMAT, "a comparison", {}, FitRun)


def timed(target: Floats, pair: Sequence[int] = (), drift: float = 0.0, batch: Sequence[int] = ()) -> Examples:
    """Examples of a noise of 1%, of one pair and one batch unless told otherwise."""
    ones = numpy.array(pair or [0] * len(target)), numpy.array(batch or [0] * len(target))
    noise, drifts = (numpy.full(len(target), value) for value in (0.01, drift))
    return Examples([None] * len(target), target, target, noise, *ones, drifts)


def test_metrics_by_hand() -> None:
    """Four plans of one pair and two of another; the two fastest of the first are within noise of each other."""
    target = numpy.log([1.00, 1.01, 2.0, 4.0, 1.0, 3.0])
    examples = timed(target, pair=[0, 0, 0, 0, 1, 1])
    found = SimulatorAccuracy.of(examples, numpy.array([1.1, 1.0, 4.0, 2.0, 1.0, 1.0]))
    # Of 7 pairs one is left out; of the other 6, (2, 3) is wrong and (4, 5) is a tie.
    assert found.left_out == pytest.approx(1 / 7)
    assert found.ranking == pytest.approx(4.5 / 6)
    assert found.tau == pytest.approx(((4 - 2) / 6 + 0) / 2)
    errors = sorted([0.1, 0.01 / 1.01, 1.0, 0.5, 0.0, 2 / 3])
    assert found.median == pytest.approx((errors[2] + errors[3]) / 2)
    assert found.p90 == pytest.approx((errors[4] + errors[5]) / 2)


def test_perfect_and_reversed_predictions() -> None:
    target = numpy.log([1.0, 2.0, 3.0])
    examples = timed(target)
    assert SimulatorAccuracy.of(examples, numpy.exp(target)) == SimulatorAccuracy(1.0, 0.0, 1.0, 0.0, 0.0)
    assert SimulatorAccuracy.of(examples, numpy.exp(-target)).ranking == 0.0


def test_times_that_are_all_within_noise_give_a_clear_error() -> None:
    with pytest.raises(DocumentError, match="within noise of each other"):
        SimulatorAccuracy.of(timed(numpy.zeros(3)), numpy.ones(3))


def test_drift_hides_differences_between_batches_alone() -> None:
    """Two and two plans, batch by batch, 5% and 50% apart; the margin is 2.8% within a batch and 8.9% between two."""
    target = numpy.array([0.0, 0.05, 0.0, 0.5])
    apart = distinct_pairs(target, numpy.full(4, 0.01), numpy.full(4, 0.03), numpy.array([0, 0, 1, 1]))
    assert apart.tolist() == [[i != j and {i, j} not in ({0, 2}, {1, 2}) for j in range(4)] for i in range(4)]
    found = SimulatorAccuracy.of(timed(target, drift=0.03, batch=[0, 0, 1, 1]), numpy.exp(-target))
    assert found.left_out == pytest.approx(2 / 6)
    assert SimulatorAccuracy.of(timed(target, drift=0.03), numpy.exp(-target)).left_out == pytest.approx(1 / 6)
    assert SimulatorAccuracy.of(timed(target, batch=[0, 0, 1, 1]), numpy.exp(-target)).left_out == pytest.approx(1 / 6)


def test_what_drift_hides_is_no_label() -> None:
    """Of two plans that come the wrong way round, the loss of a kind without regression is of those told apart."""
    kind = KINDS["linear"]
    assert not kind.REGRESSION
    target, score = numpy.array([0.0, 0.05]), torch.tensor([0.3, 0.0])
    within, between = (timed(target, drift=0.03, batch=batch) for batch in ([0, 0], [0, 1]))
    assert float(training._loss(kind, score, within, 1.0)) > 0.5
    assert float(training._loss(kind, score, between, 1.0)) == 0.0


def batches(references: Sequence[float | None], of: int = 4, spread: float = 0.01) -> list[Sample]:
    """So many samples beside each reference, of one pair; their three steps deviate by `spread`, the medians do not."""
    model, machines = workload("vgg", layers=2, width=64), star(100, 100, 100)
    plan, steps = plan_of(model, 3), (1 - spread, 1.0, 1 + spread)
    return [
        Sample(model, machines, plan, steps, environment="here", reference=reference)
        for reference in references
        for _ in range(of)
    ]


def encoded(samples: Sequence[Sample]) -> Examples:
    return Examples.of(samples, [None] * len(samples), [0.0] * len(samples))


def test_the_drift_is_that_of_the_reference_less_its_noise() -> None:
    found = encoded(batches([1.0, 1.1, 1.21, 1.331]))
    assert found.batch.tolist() == [number for number in range(4) for _ in range(4)]
    # The logarithms' steps are 0.0953, and of their distances from the median, 0.5 and 1.5 steps, the median is 1.
    spread = 1.4826 * math.log(1.1)
    # Of a step the variance is 0.01^2 by three steps; Wilson and Hilferty's median of such a variance is 0.7 of it.
    error = 1.2533 * 0.01 / math.sqrt(3 * (1 - 2 / 18) ** 3)
    assert found.drift == pytest.approx(numpy.full(16, math.sqrt(0.14 * (spread**2 - error**2))), rel=1e-3)
    part = found.part(numpy.array([15, 0]))
    assert (part.batch.tolist(), part.drift.tolist()) == ([3, 0], found.drift[:2].tolist())


@pytest.mark.parametrize("of", [1, 40])
def test_each_reference_counts_once(of: int) -> None:
    samples = [*batches([1.0], of), *batches([1.1, 1.21, 1.331], 4)]
    expected = encoded(batches([1.0, 1.1, 1.21, 1.331])).drift[0]
    assert encoded(samples).drift == pytest.approx(numpy.full(len(samples), expected))


@pytest.mark.parametrize(
    ("references", "spread"),
    [
        ([1.0, 1.5], 0.01),  # two batches say nothing
        ([None, None, None, None], 0.01),
        ([1.0, 1.5, None], 0.01),
        ([1.0, 1.01, 1.02], 0.1),  # no more than its noise explains
    ],
)
def test_there_are_pairs_without_drift(references: Sequence[float | None], spread: float) -> None:
    assert not encoded(batches(references, spread=spread)).drift.any()


def test_samples_without_a_reference_are_batches_of_their_own() -> None:
    found = encoded(batches([None, 1.0, None], of=2))
    assert found.batch.tolist() == [0, 1, 2, 2, 3, 4]
    # Their machine drifts as the others of the pair show.
    mixed = encoded(batches([1.0, 1.1, 1.21, None]))
    assert mixed.drift.min() == mixed.drift.max() > 0
    # Without any, two times are told apart as they were when there were no batches.
    none, target = encoded(batches([None], of=6)), numpy.linspace(0, 0.1, 6)
    margin = CERTAIN * numpy.hypot(none.noise[:, None], none.noise[None, :])
    apart = distinct_pairs(target, none.noise, none.drift, none.batch)
    assert (apart == (abs(target[:, None] - target[None, :]) > margin)).all()
    assert 0 < apart.sum() < 30


def test_equal_references_of_other_pairs_or_machines_are_other_batches() -> None:
    one = batches([1.0], of=1)[0]
    others = [replace(one, environment="there"), replace(one, cluster=star(200, 100, 100)), replace(one)]
    assert encoded([one, *others]).batch.tolist() == [0, 1, 2, 0]


@pytest.mark.slow
def test_drift_of_the_shipped_dataset() -> None:
    """By cluster, the share of pairs of plans left out without and with drift is printed: ``pytest -s`` shows it."""
    dataset = Dataset.load(Path(__file__).parents[3] / "examples/datasets/emulated")
    with_drift = encoded(list(dataset))
    without = replace(with_drift, drift=numpy.zeros(len(with_drift)))
    names = numpy.array([sample.cluster.name for sample in dataset])
    print()
    for name in numpy.unique(names):
        places = numpy.flatnonzero(names == name)
        before, after = (
            SimulatorAccuracy.of(one.part(places), numpy.exp(one.target[places])).left_out
            for one in (without, with_drift)
        )
        print(f"{name:20} {before:.3f} -> {after:.3f}")
        assert before <= after < before + 0.15
    assert 0 < (with_drift.drift > 0).mean() < 0.5  # most pairs were measured on a machine that did not drift


def test_the_summary_has_every_run() -> None:
    runs = [SimulatorAccuracy(0.9, 0.1, 0.8, 0.05, 0.2), SimulatorAccuracy(1.0, 0.1, 0.9, 0.05, 0.2)]
    found = summary(runs)["ranking"]
    assert found.runs == (0.9, 1.0)
    assert found.mean == pytest.approx(0.95)
    assert found.deviation == pytest.approx(math.sqrt(0.005))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_work_is_spread_in_order_and_errors_come_through(processes: int) -> None:
    assert list(spread(partial, (pow, 2), range(9), processes)) == [2**number for number in range(9)]
    answers = spread(partial, (int,), ["1", "x", "3"], processes)
    assert next(answers) == 1
    with pytest.raises(ValueError, match="invalid literal"):
        list(answers)


def test_work_that_is_given_up_leaves_no_process_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = forked.context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forks)
    answers = spread(partial, (time.sleep,), [0, 3600, 3600], 2)
    assert next(answers) is None
    answers.close()  # as an interruption does
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_processes_at_work_do_not_hear_of_a_ctrl_c() -> None:
    look = signal.pthread_sigmask, signal.SIG_BLOCK
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert list(spread(partial, look, [(), ()], 2)) == [before | {signal.SIGINT}] * 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_file_of_runs_that_cannot_be_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_bytes(b"\xff\n")
    for path, message in ((tmp_path, "Is a directory$"), (tmp_path / "runs", "invalid start byte$")):
        with pytest.raises(DocumentError, match=f"^{path}(:1)?: cannot be read: .*{message}"):
            RunFile(path, FORMAT, "a comparison", {}, FitRun)
    with pytest.raises(DocumentError, match=r"lock: cannot be written: "), alone(tmp_path / "runs" / "a.jsonl"):
        pass


def test_cores_are_those_that_samples_were_measured_on(tmp_path: Path) -> None:
    for name, cores in (("two", 2), ("four", 4)):
        with Writer(tmp_path / name) as writer:
            pair = workload("vgg", layers=3, width=32), star(100, 100, name="even")
            writer.append(Entry(sample, Conditions({"cores": cores})) for sample in drawn(7, pair))
    alone = {"compare": [], "cores": None}
    fit(_configuration(tmp_path / "four", **alone), tmp_path)
    assert load_simulator(tmp_path / "simulator").constants.cores == 4
    both = [str(tmp_path / "two"), str(tmp_path / "four")]
    with pytest.raises(DocumentError, match="cores: samples were measured on 2 and 4 cores"):
        fit({**_configuration(tmp_path), "dataset": both, **alone}, tmp_path)


def test_encoding_keeps_the_order_of_samples() -> None:
    one, other = (workload("vgg"), star(100, 50, name="a")), (workload("gpt"), star(100, 100, 20, name="b"))
    first, second = drawn(3, one), drawn(3, other)
    mixed = [sample for pair in zip(first, second, strict=True) for sample in pair]
    encoded = encode_samples(mixed, CONSTANTS, ("replay", "linear"), processes=1)
    assert encoded["replay"].pair.tolist() == [0, 1, 0, 1, 0, 1]
    assert numpy.exp(encoded["linear"].target) == pytest.approx([sample.seconds for sample in mixed])
    simulator = LearnedEstimator("linear", CONSTANTS)
    alone = simulator.encode(mixed)
    assert numpy.array_equal(numpy.stack(alone.items), numpy.stack(encoded["linear"].items))
    for sample, base in zip(mixed, encoded["replay"].base, strict=True):
        schedule = compile_plan(sample.plan, sample.workload, sample.cluster)
        assert math.exp(base) == pytest.approx(
            Replay(sample.workload, sample.cluster, CONSTANTS).predict(schedule).step_time
        )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    contexts = [
        (workload(model, layers=3, width=128), star(*rates, name=name))
        for name, rates in (("fat", (400, 100, 100)), ("even", (200, 200, 200)), ("thin", (200, 50, 50)))
        for model in ("vgg", "bert", "gpt")
    ]
    path = tmp_path_factory.mktemp("dataset")
    with Writer(path) as writer:
        writer.append(Entry(sample, Conditions({"machine": "made up"})) for sample in drawn(7, *contexts))
    return path


def test_a_dataset_all_of_whose_samples_were_disturbed_says_so(tmp_path: Path) -> None:
    context = workload("vgg", layers=3, width=128), star(400, 100, 100, name="fat")
    with Writer(tmp_path / "samples") as writer:
        conditions = Conditions({"machine": "made up"}, disturbed=True)
        writer.append(Entry(sample, conditions) for sample in drawn(2, context))
    with pytest.raises(DocumentError, match=r"no undisturbed sample of .*; other processes disturbed 2 samples"):
        fit(_configuration(tmp_path / "samples"), tmp_path)


def _configuration(path: Path, **changes: Any) -> dict[str, Any]:
    simulator = {"kind": "hetero", "members": 1, "network": {"hidden": 16}, "training": {"epochs": 3, "least_steps": 0}}
    options = {"compare": ["replay", "linear", "hetero"], "seeds": 2, "cores": 2, "processes": 1}
    return {"dataset": str(path), "simulator": simulator, **options, **changes}


@pytest.mark.slow
def test_the_command_leaves_a_simulator_and_a_result(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(_configuration(dataset, splits=["trial", "both"]), tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["format"] == "autosync-fit/2"
    assert FitResult.read(tmp_path).to_dict() == result
    assert result["dataset"] == {
        "samples": 63,
        "clusters": ["even", "fat", "thin"],
        "families": ["bert", "gpt", "vgg"],
    }
    assert set(result["comparison"]) == {"trial", "both"}
    for rows in result["comparison"].values():
        assert list(rows) == ["replay", "linear", "hetero"]
        assert all(len(row[metric]["runs"]) == 2 for row in rows.values() for metric in ("ranking", "tau", "p90"))
        assert all(0.4 < row["ranking"]["mean"] <= 1 for name, row in rows.items() if name != "linear")
    assert len(result["runs"]) == 2 * 2 * 3
    assert all(len(run["unseen"]) == {"trial": 0, "both": 2}[run["split"]] for run in result["runs"])
    printed = capsys.readouterr().out
    assert "neither cluster nor family seen" in printed
    assert "pairs are within noise" in printed
    simulator = load_simulator(tmp_path / "simulator")
    assert isinstance(simulator, LearnedEstimator)
    assert simulator.kind.KIND == "hetero"
    assert simulator.constants.cores == 2

    again = _configuration(dataset, compare=[], start=str(tmp_path / "simulator"))
    with pytest.raises(DocumentError, match="its own constants"):
        fit(again, tmp_path / "further")
    fit({**again, "cores": None}, tmp_path / "further")
    further = load_simulator(tmp_path / "further" / "simulator")
    assert isinstance(further, LearnedEstimator)
    changed = [
        (one - other).abs().max().item() for one, other in zip(_weights(simulator), _weights(further), strict=True)
    ]
    assert 0 < max(changed) < 0.2  # trained further, and gently


def test_held_out_models_and_clusters_are_judged_and_not_learned_from(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = []
    fit_encoded = LearnedEstimator.fit_encoded

    def learning(simulator: LearnedEstimator, examples: Examples, held_out: Sequence[Any]) -> None:
        learned.append(len(examples))
        fit_encoded(simulator, examples, held_out)

    monkeypatch.setattr(LearnedEstimator, "fit_encoded", learning)
    held_out = {"models": ["gpt"], "clusters": ["thin"]}
    fit(_configuration(dataset, compare=[], held_out=held_out), tmp_path)
    card = SimulatorCard.load(tmp_path / "simulator" / "card.json")
    assert learned == [28]  # seven plans of two models on two clusters
    assert (card.samples, card.models, card.clusters) == (28, ("bert", "vgg"), ("even", "fat"))
    assert card.accuracy is not None
    assert (card.accuracy.pairs, card.accuracy.plans) == (1, 7)
    assert "simulator.network={hidden:16" in card.command
    assert "held_out.models=[gpt] held_out.clusters=[thin] cores=2.0 seed=0 compare=[]" in card.command
    assert "on 7 plans for 1 held-out pairs" in " ".join(capsys.readouterr().out.split())
    for names, message in (
        ({"models": ["gpt"], "clusters": ["moon"]}, "held_out.clusters: 'moon' is not in the dataset; it has even"),
        ({"models": ["bert", "gpt", "vgg"], "clusters": ["thin"]}, "held_out: nothing remains"),
    ):
        with pytest.raises(DocumentError, match=message):
            fit(_configuration(dataset, compare=[], held_out=names), tmp_path / "other")


def test_what_can_judge_no_simulator_is_refused_before_the_training(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LearnedEstimator, "fit_encoded", mock.Mock(side_effect=AssertionError("trained in vain")))
    apart = {"models": ["gpt"], "clusters": ["thin"]}
    with Writer(tmp_path / "alike") as writer:
        for sample in Dataset.load(str(dataset)):
            alike = replace(sample, steps=(0.01,)) if sample.cluster.name == "thin" else sample
            writer.append([Entry(alike, Conditions({"machine": "made up"}))])
    given = _configuration(tmp_path / "alike", compare=[], held_out=apart)
    with pytest.raises(DocumentError, match=r"within noise of each other; .* or hold out other models or clusters$"):
        fit(given, tmp_path)


def test_the_regret_is_that_of_the_plan_that_is_predicted_to_be_fastest(grid: list[Sample]) -> None:
    samples = [grid[0], grid[1], *grid[20:23]]  # 10 and 20 ms for one pair; 10, 20 and 10 ms for another
    examples = Examples.of(samples, [None] * 5, [0.0] * 5)
    assert list(regrets(examples, numpy.array([2.0, 1.0, 1.0, 2.0, 3.0])).values()) == pytest.approx([1.0, 0.0])


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = _configuration(dataset, splits=["trial"], compare=["replay", "linear"], simulator={"kind": "linear"})
    fit(given, tmp_path / "whole")
    whole = tmp_path / "whole" / "runs.jsonl"
    header, *lines = whole.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    runs = tmp_path / "runs.jsonl"
    runs.write_text("".join([header, *lines[:3], lines[3][:20]]))  # cut off while the last line was written
    judged = []

    def judging(*arguments: Any) -> Any:
        judged.append(arguments)
        return judge(*arguments)

    monkeypatch.setattr(comparison, "judge", judging)
    fit({**given, "runs": str(runs)}, tmp_path / "again")
    assert len(judged) == 1
    kept, made = (path.read_text().splitlines() for path in (whole, runs))
    assert made[:4] == kept[:4]
    assert json.loads(made[4]) == {**json.loads(kept[4]), "seconds": json.loads(made[4])["seconds"]}
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "again")]
    assert results[0]["comparison"] == results[1]["comparison"]

    for changes, field in (
        ({"seed": 1}, "seed"),
        ({"cores": 4}, "constants"),
        ({"simulator": {"kind": "linear", "members": 2}}, "simulator linear"),
    ):
        with pytest.raises(DocumentError, match=rf"runs\.jsonl: {field}: its runs were made with .*give another file"):
            fit({**given, **changes, "runs": str(runs)}, tmp_path / "other")
    runs.write_text(header + "{}\n")
    with pytest.raises(DocumentError, match=r"runs\.jsonl:2: not a run of a comparison of simulators"):
        fit({**given, "runs": str(runs)}, tmp_path / "other")


def _weights(simulator: LearnedEstimator) -> Sequence[Any]:
    return list(simulator.networks[0].parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": ["/nowhere"]}, "/nowhere"),
        ({"simulator": {"kind": "oracle"}}, "simulator.kind: 'oracle' is not known; allowed: replay, linear"),
        ({"simulator": {"kind": "hetero", "network": {"hidden": -1}}}, r"simulator: network\.hidden: .*greater than 0"),
        ({"simulator": {"kind": "hetero", "network": {"dropout": 1.0}}}, r"simulator: network\.dropout: .*less than 1"),
        (
            {"simulator": {"kind": "recurrent", "network": {"heads": 4}}},
            r"simulator: network\.heads: unknown field; 'recurrent' takes hidden, state, layers",
        ),
        ({"simulator": {"kind": "linear", "network": {"hidden": 4}}}, "'linear' takes no sizes"),
        (
            {"simulator": {"kind": "replay", "network": {"hidden": 4}}},
            "simulator: network: 'replay' is not a neural network",
        ),
        ({"simulator": {"kind": "linear", "training": {"sharpness": 5}}}, "simulator: training.sharpness: .*'linear'"),
        ({"compare": ["oracle"]}, "compare: 'oracle' is not known"),
        ({"splits": ["moon"]}, r"splits\[0\]"),
        ({"start": "/nowhere", "cores": None}, "not a simulator"),
        ({"epochs": 3}, "epochs: unknown field"),
        ({"constants": "constants.yaml", "cores": 3}, "cores: the file of constants has the number of cores; leave"),
    ],
)
def test_wrong_settings_give_one_clear_error(
    dataset: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DocumentError, match=message) as raised:
        fit(_configuration(dataset, **changes), tmp_path)
    assert "\n" not in str(raised.value)


def test_the_shipped_configuration_is_what_the_command_takes() -> None:
    configuration = read_data(configuration_directory() / "fit.yaml")
    keys = {key: value for key, value in configuration.items() if key not in ("defaults", "hydra")}
    options = sorted(path.stem for path in (configuration_directory() / "simulator").glob("*.yaml"))
    assert options == sorted(("replay", "linear", "recurrent", "attention", "hetero", "pretrained"))
    options.remove("pretrained")  # it is fitted
    for option in options:
        simulator = SimulatorSettings.shipped(option)
        assert simulator.kind == option
        assert simulator == SimulatorSettings(kind=option, network=simulator.network)
        assert simulator.members == 3  # no ensemble is compared with a lone network
        if option != "replay":
            estimator = LearnedEstimator(option)
            assert (estimator.members, estimator.training, estimator.tuning) == (
                simulator.members,
                simulator.training,
                simulator.tuning,
            )
        parsed = FitSettings.parse({**keys, "dataset": "somewhere", "simulator": simulator.model_dump()})
        assert parsed.dataset == ("somewhere",)

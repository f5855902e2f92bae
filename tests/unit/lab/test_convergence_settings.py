"""Comparisons of convergence: what they may be told, and what is made of their trainings."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_autosync.cluster import ClusterSpec, configuration_directory
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.convergence import trial
from lightning_autosync.lab.convergence.comparison import compare
from lightning_autosync.lab.convergence.isolation import simulate_groups, survey_table
from lightning_autosync.lab.convergence.output import remarks, result_table
from lightning_autosync.lab.convergence.result import (
    ConvergenceDocument,
    ConvergenceResult,
    Groups,
    TrainingRun,
    best_rate,
    load_rates,
    median_time,
)
from lightning_autosync.lab.convergence.settings import ConvergenceSettings
from lightning_autosync.lab.convergence.tasks import CharactersTask, DigitsTask, loss
from lightning_autosync.lab.convergence.trial import (
    ParameterHistory,
    TrainingBudget,
    TrainingEnd,
    _Training,
    judge,
    time_to,
)
from lightning_autosync.measure.models.straggler import Straggler, StragglerSettings

BASE: dict[str, Any] = {
    "task": {"kind": "digits"},
    "workers": 2,
    "methods": {"all_reduce": {}, "gossip": {"builder": "partial_reduce", "seeds": 1}},
    "speeds": {"equal": [], "slow": [{"ranks": [1], "factor": 4}]},
    "only": {"speeds": ["equal"]},
    "rates": [0.1],
    "steps": 10,
}


def composed(*overrides: str) -> ConvergenceSettings:
    with initialize_config_dir(str(configuration_directory()), version_base="1.3"):
        return ConvergenceSettings.parse(OmegaConf.to_container(compose("converge", list(overrides)), resolve=True))


def run(
    method: str, reached: float | None, rate: float = 0.1, final: float = 90.0, speed: str = "equal"
) -> TrainingRun:
    return TrainingRun(
        method=method,
        speed=speed,
        seed=0,
        rate=rate,
        final=final,
        reached=reached,
        seconds=4.0,
        steps=[10, 30],
        waiting=[0.5, 0.1],
        sent=[100.0, 300.0],
        state_bytes=[8, 24],
        moments=[0.0, 4.0],
        scores=[10.0, final],
        foreign_cores=None,
        groups=Groups(2, 1, 2, 0) if method == "gossip" else None,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 3.0}, "steps and limit: give exactly one of them"),
        ({"steps": None}, "steps and limit: give exactly one of them"),
        ({"workers": 1}, "workers: .*greater than or equal to 2"),
        ({"reference": "ddp"}, r"reference: 'ddp' is not among the methods to run \(all_reduce, gossip\)"),
        ({"only": {"methods": ["gossip"]}}, "reference: 'all_reduce' is not among"),
        ({"only": {"methods": ["magic"]}}, "only.methods: 'magic' is not known; allowed: all_reduce, gossip"),
        ({"only": {"speeds": ["light"]}}, "only.speeds: 'light' is not known; allowed: equal, slow"),
        ({"only": {}}, "pace: missing; slow workers need it"),
        ({"speeds": {"slow": [{"ranks": [2]}]}, "only": {}}, "speeds.slow: rank 2 is out of range; workers is 2"),
        ({"launch": {"kind": "ssh"}}, "launch: 'ssh' is not supported here; allowed: local, emulated"),
        ({"launch": {"kind": "emulated"}}, "cluster: missing; launch=emulated needs one"),
        ({"cluster_scale": 2.0}, "cluster: missing; cluster_scale, cluster_fastest and rank_order need a cluster"),
        ({"isolation": {"groups": 10}}, "pace: missing; isolation simulates paced steps"),
        ({"rates": [0.1, 0.2], "tuning_seeds": 0}, "tuning_seeds: must be 1 or more"),
        ({"rates": []}, "rates: .*at least 1 item"),
        ({"task": {"kind": "chess"}}, "task: .*'digits', 'characters'"),
        ({"methods": {"all_reduce": {"colour": 1}}}, "methods.all_reduce.colour: unknown field"),
        (
            {"methods": {"all_reduce": {"consistency": {"mode": "periodic"}}}},
            "period: missing; mode 'periodic' needs period and outer",
        ),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(DocumentError, match=message) as caught:
        ConvergenceSettings.parse({**BASE, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"builder": "magic"}, "methods.odd: .*'magic' is neither"),
        ({"builder": "ps", "arguments": {"speed": 1}}, "methods.odd: .*speed"),
        (
            {"consistency": {"mode": "partial_reduce", "group_size": 3, "weighting": "constant"}},
            "methods.odd: .*group_size: 3 is above world_size 2",
        ),
    ],
)
def test_a_method_that_cannot_be_is_found_before_any_worker_starts(method, message):
    settings = ConvergenceSettings.parse({**BASE, "methods": {"all_reduce": {}, "odd": method}})
    with pytest.raises(DocumentError, match=message):
        compare(settings)


def test_a_cluster_of_another_size_is_found_before_any_worker_starts():
    settings = ConvergenceSettings.parse({**BASE, "cluster": ClusterSpec.uniform(nodes=3, devices=1).to_dict()})
    with pytest.raises(DocumentError, match=r"workers: 2 requested, but cluster '.*' has 3 devices"):
        compare(settings)


@pytest.mark.slow
def test_groups_are_simulated_with_and_without_the_rule():
    """In all four settings every window connects all, which first come, first served does not."""
    settings = composed("experiment=isolation", "seeds=2", "isolation.groups=400")
    survey = simulate_groups(settings)
    assert [(row.speed, row.method) for row in survey.rows] == [
        (speed, method) for speed in settings.chosen_speeds for method in settings.chosen_methods
    ]
    assert len(settings.chosen_speeds) == 4
    assert all(row.ruled.apart == 0 and row.ruled.windows > 400 for row in survey.rows)
    assert all(0 <= row.ruled.bridging < 0.1 and 0 <= row.ruled.idle < 1 for row in survey.rows)
    assert any(row.free.apart > 0.5 * row.free.windows for row in survey.rows)
    assert all(row.free.bridging == 0 for row in survey.rows)
    assert survey_table(survey).row_count == len(survey.rows)
    assert len(json.loads(json.dumps(survey.to_dict(), allow_nan=False))["rows"]) == len(survey.rows)


def test_groups_of_what_has_none_are_not_simulated():
    settings = composed("experiment=isolation", "methods=memory", "reference=all_reduce")
    with pytest.raises(DocumentError, match=r"methods\.\w+: isolation needs mode partial_reduce, not sync"):
        simulate_groups(settings)


@pytest.mark.parametrize("synchronous", [True, False])
def test_backward_counts_as_waiting_only_where_it_exchanges(monkeypatch, synchronous: bool):
    now = [0.0]
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(trial.dist, "get_rank", lambda: 0)
    task = DigitsTask(kind="digits")
    module = task.module()

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    next(module.parameters()).register_hook(lambda gradient: pass_time(5.0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    way = SimpleNamespace(
        synchronous=synchronous, forward=module, optimizer=optimizer, step=lambda samples: pass_time(2.0), groups=()
    )
    budget = TrainingBudget(pace=None, steps=3, limit=None, target=None, patience=1, interval=1.0)
    course = ParameterHistory(module, 1.0)
    course.begin()
    training = _Training(way, task, course, Straggler(StragglerSettings(), 0), budget, dist.HashStore(), 0)
    for number in range(3):
        training._step(number)
    assert training._exchange == (21.0 if synchronous else 6.0)


def test_the_shipped_experiments():
    stragglers = composed("experiment=stragglers")
    assert stragglers.workers == 8
    assert stragglers.chosen_speeds == ["equal", "one_4x_slower", "random_pauses", "half_2x_slower"]
    assert {name: stragglers.seeds_of(name) for name in ("all_reduce", "partial_reduce", "ssp")} == {
        "all_reduce": 5,
        "partial_reduce": 5,
        "ssp": 3,
    }
    for task in ("digits", "characters"):
        convergence = composed("experiment=convergence", f"task={task}", "workers=8")
        assert convergence.task.kind == task
        assert len(convergence.chosen_methods) == 14
        assert all(convergence.seeds_of(name) >= 5 for name in convergence.chosen_methods)


@pytest.mark.parametrize("task", [DigitsTask(kind="digits"), CharactersTask(kind="characters")])
def test_a_task_is_learned_from_what_validation_does_not_see(task):
    inputs, labels = task.samples()
    kept, _ = task.training()
    assert 0.79 < len(kept) / len(inputs) < 0.81
    assert len(inputs) == len(labels)
    torch.manual_seed(0)
    module = task.module()
    before = loss(module, kept[:500], labels[:500]).item()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss(module, kept[:500], labels[:500]).backward()
        optimizer.step()
    assert loss(module, kept[:500], labels[:500]).item() < before
    assert 0 <= task.accuracy(module) <= 100


def test_each_vector_of_parameters_is_judged_by_itself():
    module = torch.nn.Linear(1, 1)
    vectors = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert judge(module, vectors, lambda one: (one.weight + one.bias).item()) == [3.0, 7.0]


def test_time_to_a_target():
    assert time_to(50.0, [0.0, 1.0, 2.0, 3.0], [10.0, 50.0, 40.0, 60.0]) == 1.0
    assert time_to(70.0, [0.0, 1.0], [10.0, 50.0]) is None


def test_who_marches_in_step_takes_the_last_step_too():
    store = dist.HashStore()
    first, same, free = (
        TrainingEnd(store, 0, True, None),
        TrainingEnd(store, 1, True, None),
        TrainingEnd(store, 2, False, None),
    )
    assert not first.reached(3)
    first.announce(3)
    first.announce(5)
    assert [first.reached(3), first.reached(4)] == [False, True]
    assert [same.reached(3), same.reached(4)] == [False, True]
    assert free.reached(1)


def test_a_given_number_of_steps_needs_no_announcement():
    ending = TrainingEnd(dist.HashStore(), 0, False, 2)
    assert [ending.reached(step) for step in range(3)] == [False, False, True]


def test_the_rate_is_the_one_that_is_soonest_and_then_the_best():
    assert best_rate([run("a", 3.0, 0.1), run("a", 2.0, 0.2), run("a", None, 0.4, final=99.0)]) == 0.2
    assert best_rate([run("a", None, 0.1, final=80.0), run("a", None, 0.2, final=85.0)]) == 0.2
    assert median_time([run("a", 1.0), run("a", None), run("a", None)]) == math.inf


@pytest.fixture
def result() -> ConvergenceResult:
    settings = ConvergenceSettings.parse({**BASE, "steps": None, "limit": 4.0, "target": 80.0})
    runs = [run("all_reduce", 3.0, final=90.0), run("all_reduce", 4.0, final=92.0), run("all_reduce", 2.0, final=91.0)]
    runs += [run("gossip", 1.5, final=90.0), run("all_reduce", 9.0, speed="slow")]
    return ConvergenceResult(settings, 1000, {"all_reduce": 0.1, "gossip": 0.1}, runs, [], {})


def test_a_summary(result):
    reference, gossip = result.summary("all_reduce", "equal"), result.summary("gossip", "equal")
    assert (reference.final, reference.deviation, reference.difference) == (91.0, 1.0, 0.0)
    assert (reference.reached, reference.times, reference.faster) == (3.0, [2.0, 3.0, 4.0], 1.0)
    assert (gossip.runs, gossip.difference, gossip.faster, gossip.deviation) == (1, -1.0, 2.0, 0.0)
    assert (gossip.steps, gossip.waiting) == (10.0, 0.3)
    assert (gossip.sent, gossip.sent_most) == (200.0, 300.0)
    assert (gossip.state_bytes, gossip.state_most) == (16, 24)
    assert (gossip.bridging, gossip.windows, gossip.apart) == (0.5, 2, 0)
    assert (reference.bridging, reference.windows) == (None, 0)
    assert result.ring_bytes == 1000


def test_a_target_that_is_met_before_training_has_no_speedup():
    settings = ConvergenceSettings.parse({**BASE, "steps": None, "limit": 4.0, "target": 80.0})
    runs = [run("all_reduce", 1.0), run("gossip", 0.0)]
    found = ConvergenceResult(settings, 1000, {"all_reduce": 0.1, "gossip": 0.1}, runs, [], {})
    assert found.summary("gossip", "equal").faster is None


def test_who_misses_the_target_is_not_left_out():
    settings = ConvergenceSettings.parse({**BASE, "steps": None, "limit": 4.0, "target": 80.0})
    runs = [run("all_reduce", 1.0), run("gossip", 2.0), run("gossip", None), run("gossip", None)]
    found = ConvergenceResult(settings, 1000, {"all_reduce": 0.1, "gossip": 0.1}, runs, [], {})
    summary = found.summary("gossip", "equal")
    assert summary.reached == math.inf
    assert summary.faster is None
    assert (
        json.loads(json.dumps(found.document().to_dict(), allow_nan=False))["summaries"]["equal"]["gossip"]["reached"]
        is None
    )
    assert "never" in "".join(str(cell) for column in result_table(found, "equal").columns for cell in column.cells)


@pytest.mark.parametrize("final", [90.0, math.nan])
def test_a_document_is_read_as_it_was_written(result, tmp_path: Path, final: float):
    """A training that diverged has no final metric: NaN here, and null in the file, because JSON has no NaN."""
    document = replace(result, runs=[replace(one, final=final, scores=[final]) for one in result.runs]).document()
    document.write(tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert json.dumps(written, allow_nan=False) == json.dumps(document.to_dict())
    assert written["runs"][0]["final"] == (None if math.isnan(final) else final)
    found = ConvergenceDocument.read(tmp_path)
    assert repr(found.runs[0].final) == repr(found.runs[0].scores[0]) == repr(final)
    assert found.to_dict() == document.to_dict()


def test_a_document_of_an_earlier_release_has_nan(result, tmp_path: Path):
    data = replace(result, runs=[replace(one, final=math.nan) for one in result.runs]).document().to_dict()
    data["runs"] = [{**run, "final": math.nan} for run in data["runs"]]
    (tmp_path / "result.json").write_text(json.dumps(data))
    assert math.isnan(ConvergenceDocument.read(tmp_path).runs[0].final)


def test_rates_of_an_earlier_result(result, tmp_path: Path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result.document().to_dict()))
    assert load_rates(str(path), result.settings) == {"all_reduce": 0.1, "gossip": 0.1}
    path.write_text(json.dumps({**result.document().to_dict(), "format": "autosync-convergence/1"}))
    assert load_rates(str(path), result.settings) == {"all_reduce": 0.1, "gossip": 0.1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "autosync-bench/1"}, "format: 'autosync-bench/1' cannot be read"),
        ({"rates": None}, "result.json: rates: "),
        ({"rates": {"gossip": "fast"}}, "result.json: rates.gossip: "),
        ({"rates": {"gossip": -1}}, "result.json: rates.gossip: "),
        ({"settings": None}, "result.json: settings: "),
        ({"settings": {"momentum": 0.25}}, "result.json: settings.momentum: its rates were tuned with 0.25, not"),
        ({"settings": {"workers": 17}}, "result.json: settings.workers: its rates were tuned with 17, not"),
        ({"settings": {"task": {"kind": "chess"}}}, "settings.task.kind: its rates were tuned with 'chess', not"),
    ],
    ids=str,
)
def test_rates_that_are_none_or_for_another_training(result, tmp_path: Path, changed: dict[str, Any], message: str):
    path = tmp_path / "result.json"
    data = result.document().to_dict()
    if changed.get("settings"):
        changed = {"settings": {**data["settings"], **changed["settings"]}}
    path.write_text(json.dumps({**data, **changed}))
    with pytest.raises(DocumentError, match=re.escape(message)):
        load_rates(str(path), result.settings)


def test_a_rate_that_is_neither_known_nor_to_be_chosen(result, tmp_path: Path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**result.document().to_dict(), "rates": {"all_reduce": 0.1}}))
    settings = ConvergenceSettings.parse({**BASE, "rates": [0.1, 0.2], "tuning_seeds": 0, "rates_of": str(path)})
    with pytest.raises(DocumentError, match=r"rates_of: .* has no rate of 'gossip'"):
        compare(settings)


def test_few_times_are_shown_one_by_one():
    settings = ConvergenceSettings.parse({**BASE, "steps": None, "limit": 4.0, "target": 80.0})
    times = [3.0, 1.0, 2.0, 4.0, 5.0]
    for count, shown in ((3, "1.00 2.00 3.00, 1 never"), (5, "1.00 2.00 3.00 4.00 5.00, 1 never")):
        runs = [run(name, seconds) for name in settings.methods for seconds in [*times[:count], None]]
        found = ConvergenceResult(settings, 1000, {"all_reduce": 0.1, "gossip": 0.1}, runs, [], {})
        assert shown in [cell for column in result_table(found, "equal").columns for cell in column.cells]
    runs = [run(name, seconds) for name in settings.methods for seconds in [*times, 6.0]]
    found = ConvergenceResult(settings, 1000, {"all_reduce": 0.1, "gossip": 0.1}, runs, [], {})
    assert "1.00 .. 6.00" in [cell for column in result_table(found, "equal").columns for cell in column.cells]


def test_the_table_has_a_row_a_method(result):
    table = result_table(result, "equal")
    assert table.row_count == 2
    assert any("time until the average" in line for line in remarks(result))
    assert any(line.startswith("groups of gossip, equal: 50.0% formed to connect") for line in remarks(result))

"""Rehearsals: hidden truths, runs that go on, and what they show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import compile_plan
from lightning_autosync.search.simulated.command import rehearse
from lightning_autosync.search.simulated.contest import Contest, Run, load_runs
from lightning_autosync.search.simulated.outcome import standings
from lightning_autosync.search.simulated.settings import Settings
from lightning_autosync.search.simulated.world import World
from lightning_autosync.simulator import Replay

SMALL = {
    "pairs": ["ncf@four_equal", "ncf@fat_node_star"],
    "samplers": ["transfer", "random"],
    "seeds": 1,
    "budget": 13,
    "source_budget": 13,
    "options": {"population": 16, "batch": 4},
}


def run(sampler: str, seconds: list[float], measured: list[float], origins: list[str], seed: int = 0) -> Run:
    return Run("m@c", sampler, seed, seconds, measured, origins, min(seconds), 2.0, [0.1] * len(seconds))


def test_the_truth_is_another_than_what_is_known_and_always_the_same() -> None:
    settings = Settings.parse(SMALL)
    one, other = World("ncf@four_equal", settings), World("ncf@four_equal", settings)
    plan = one.space.plan(one.space.baselines()[0])
    assert one.seconds(plan) == other.seconds(plan)
    as_known = World("ncf@four_equal", settings.model_copy(update={"misjudged": 0.0, "links": 0.0, "quirk": 0.0}))
    schedule = compile_plan(plan, one.space.workload, one.space.cluster)
    replayed = Replay(one.space.workload, one.space.cluster, one.known).predict(schedule).step_time
    assert as_known.seconds(plan) == pytest.approx(replayed)
    assert abs(one.seconds(plan) / replayed - 1) > 1e-3


def test_a_rehearsal_leaves_curves_and_goes_on(tmp_path: Path) -> None:
    rehearse(SMALL, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["format"] == "autosync-rehearsal/1"
    assert {(one["pair"], one["sampler"]) for one in result["standings"]} == {
        (pair, sampler) for pair in SMALL["pairs"] for sampler in SMALL["samplers"]
    }
    for one in result["standings"]:
        assert len(one["regret"]["median"]) == SMALL["budget"]
        assert min(one["regret"]["median"]) >= 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    kept = (tmp_path / "runs.jsonl").read_text()
    rehearse({**SMALL, "runs": str(tmp_path / "runs.jsonl")}, tmp_path)
    assert (tmp_path / "runs.jsonl").read_text() == kept


def test_a_run_is_the_same_again() -> None:
    settings = Settings.parse(SMALL)
    first, again = (Contest(settings).run("ncf@four_equal", "autosync", 3) for _ in range(2))
    assert first.measured == again.measured
    assert first.origins == again.origins


def test_what_counts_is_the_true_time_of_what_was_measured_fastest() -> None:
    lucky = run("a", [3.0, 1.5, 1.0], [3.0, 1.2, 1.4], ["baseline", "drawn", "drawn"])
    assert lucky.incumbents.tolist() == [3.0, 1.5, 1.5]
    assert lucky.hit_rate == 1.0
    sure = run("b", [1.0, 3.0, 3.0], [1.0, 3.0, 3.0], ["baseline", "drawn", "drawn"])
    one, other = standings([lucky, sure])
    assert (one.best, other.best) == (1.0, 1.0)
    assert one.regrets.tolist() == [[2.0, 0.5, 0.5]]
    assert one.trials == [None]
    assert (other.trials, other.proposals) == ([1], [0])
    assert other.ratios == [2.0]


def test_wrong_settings_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="expected MODEL@CLUSTER, got 'vgg16'"):
        Settings.parse({"pairs": ["vgg16"]})
    with pytest.raises(DocumentError, match="source: missing"):
        Settings.parse({"pairs": ["vgg16@four_equal"], "samplers": ["transfer"]})
    (tmp_path / "runs.jsonl").write_text("{}\n")
    with pytest.raises(DocumentError, match=r"runs\.jsonl:1: not a run"):
        load_runs(tmp_path / "runs.jsonl")

"""Rehearsals: hidden truths, runs that go on, and what they show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from locks import held_elsewhere

from lightning_autosync.cli.rehearse import rehearse
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.rehearsal.contest import SamplerContest, SamplerRun, run_file
from lightning_autosync.lab.rehearsal.outcome import RehearsalResult, standings
from lightning_autosync.lab.rehearsal.settings import RehearsalSettings
from lightning_autosync.lab.rehearsal.world import World
from lightning_autosync.plan import compile_plan
from lightning_autosync.replay import Replay

SMALL = {
    "pairs": ["ncf@four_equal", "ncf@fat_node_star"],
    "samplers": ["transfer", "random"],
    "seeds": 1,
    "budget": 13,
    "source_budget": 13,
    "options": {"population": 16, "batch": 4},
}


def run(sampler: str, seconds: list[float], measured: list[float], origins: list[str], seed: int = 0) -> SamplerRun:
    return SamplerRun("m@c", sampler, seed, seconds, measured, origins, min(seconds), 2.0, [0.1] * len(seconds))


def test_the_truth_is_another_than_what_is_known_and_always_the_same() -> None:
    settings = RehearsalSettings.parse(SMALL)
    one, other = World("ncf@four_equal", settings), World("ncf@four_equal", settings)
    plan = one.space.plan(one.space.baselines()[0])
    assert one.seconds(plan) == other.seconds(plan)
    as_known = World("ncf@four_equal", settings.model_copy(update={"misjudged": 0.0, "links": 0.0, "quirk": 0.0}))
    schedule = compile_plan(plan, one.space.workload, one.space.cluster)
    replayed = Replay(one.space.workload, one.space.cluster, one.known).predict(schedule).step_time
    assert as_known.seconds(plan) == pytest.approx(replayed)
    assert abs(one.seconds(plan) / replayed - 1) > 1e-3


def test_pairs_are_on_the_same_hosts_and_those_on_a_cluster_have_its_links() -> None:
    settings = RehearsalSettings.parse({**SMALL, "quirk": 0.0})
    one, other, neighbour = (World(pair, settings) for pair in (*SMALL["pairs"], "vgg16@four_equal"))
    assert one.hidden == other.hidden == neighbour.hidden != one.known
    assert one.links == neighbour.links != one.space.cluster
    assert one.links != other.links
    later = World("ncf@four_equal", settings.model_copy(update={"truth": 1}))
    assert later.hidden not in (one.hidden, one.known)


@pytest.mark.slow
def test_a_rehearsal_leaves_curves_and_goes_on(tmp_path: Path) -> None:
    rehearse(SMALL, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["format"] == "autosync-rehearsal/1"
    assert RehearsalResult.read(tmp_path).to_dict() == result
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
    settings = RehearsalSettings.parse(SMALL)
    first, again = (SamplerContest(settings).run("ncf@four_equal", "autosync", 3) for _ in range(2))
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
        RehearsalSettings.parse({"pairs": ["vgg16"]})
    with pytest.raises(DocumentError, match="source: missing"):
        RehearsalSettings.parse({"pairs": ["vgg16@four_equal"], "samplers": ["transfer"]})
    path = tmp_path / "runs.jsonl"
    run_file(path, RehearsalSettings.parse(SMALL)).append(run("random", [1.0], [1.0], ["drawn"]))
    for line, message in (("{}", r"runs\.jsonl:3: not a run"), ("[", r"runs\.jsonl:3: not a line of")):
        path.write_text("".join([*path.read_text().splitlines(keepends=True)[:2], f"{line}\n"]))
        with pytest.raises(DocumentError, match=message):
            run_file(path, RehearsalSettings.parse(SMALL))
    path.write_text("{}\n")
    with pytest.raises(DocumentError, match=r"runs\.jsonl:1: format: missing; expected 'autosync-rehearsal-runs/3'"):
        run_file(path, RehearsalSettings.parse(SMALL))


@pytest.mark.parametrize(
    ("field", "wrong", "why"),
    [
        ("pairs", "vgg16@nowhere", "no shipped cluster is named"),
        ("pairs", "vgg17@four_equal", "vgg17"),
        ("source", "vgg17@four_equal", "vgg17"),
    ],
)
def test_a_pair_that_is_not_known_is_named_before_any_run(tmp_path: Path, field: str, wrong: str, why: str) -> None:
    given = {**SMALL, field: wrong if field == "source" else [*SMALL["pairs"], wrong]}
    with pytest.raises(DocumentError, match=f"{field}: '{wrong}': .*{why}"):
        rehearse(given, tmp_path)
    assert not (tmp_path / "runs.jsonl").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("budget", 12), ("noise", 0.5), ("truth", 1), ("options", {"population": 17})]
)
def test_runs_that_were_made_with_other_settings_are_refused(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "runs.jsonl"
    run_file(path, RehearsalSettings.parse(SMALL)).append(run("random", [1.0], [1.0], ["drawn"]))
    with pytest.raises(DocumentError, match=rf"runs\.jsonl: {field}: its runs were made with .*give another file"):
        rehearse({**SMALL, field: value, "runs": str(path)}, tmp_path)
    more = {
        **SMALL,
        "seeds": 3,
        "samplers": ["random", "transfer", "tpe"],
        "pairs": [*SMALL["pairs"], "gpt@four_equal"],
    }
    assert set(run_file(path, RehearsalSettings.parse(more)).runs) == {("m@c", "random", 0)}


def test_a_run_of_transfer_from_another_source_is_refused(tmp_path: Path) -> None:
    path, settings = tmp_path / "runs.jsonl", RehearsalSettings.parse(SMALL)
    first, second = SMALL["pairs"]
    run_file(path, settings).append(SamplerRun(first, "transfer", 0, [1.0], [1.0], ["drawn"], 1.0, 2.0, [0.1], second))
    assert run_file(path, settings).runs[first, "transfer", 0].source == second
    elsewhere = RehearsalSettings.parse({**SMALL, "source": "gpt@four_equal"})
    with pytest.raises(DocumentError, match=rf"source: .* on {first} started from '{second}', not 'gpt@four_equal'"):
        run_file(path, elsewhere)


@pytest.mark.slow
def test_a_last_line_that_was_cut_off_is_dropped_and_its_run_made_again(tmp_path: Path) -> None:
    given = {**SMALL, "samplers": ["random"], "budget": 4, "runs": str(tmp_path / "runs.jsonl")}
    rehearse(given, tmp_path)
    whole = (tmp_path / "runs.jsonl").read_text()
    (tmp_path / "runs.jsonl").write_text(whole[:-40])
    rehearse(given, tmp_path)
    header, *lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert header["settings"]["budget"] == 4
    assert [(line["pair"], line["seconds"]) for line in lines] == [
        (json.loads(line)["pair"], json.loads(line)["seconds"]) for line in whole.splitlines()[1:]
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"pairs": ["vgg16@four_equal"], "source": "vgg16@four_equal"},
        {"source": "ncf@fat_node_star", "samplers": ["autosync"]},
        {"pairs": ["vgg16@four_equal", "vgg16@four_equal"]},
    ],
)
def test_transfer_from_a_pair_to_itself_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(DocumentError, match=r"source: '\w+@\w+' would start from its own study"):
        RehearsalSettings.parse({**SMALL, **given})


def test_two_processes_do_not_add_to_one_file(tmp_path: Path) -> None:
    refusal = pytest.raises(DocumentError, match=r"runs.jsonl: another process is adding runs to it")
    with held_elsewhere(tmp_path / ".runs.jsonl.lock"), refusal:
        rehearse({**SMALL, "runs": str(tmp_path / "runs.jsonl")}, tmp_path)
    assert not (tmp_path / "runs.jsonl").exists()

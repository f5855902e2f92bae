"""The report of a tuning run: what it says and shows, and what it says about wrong input."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tuning_runs import write_run

import lightning_autosync.cli.tune as tune_module
from lightning_autosync.cli.application import VERBS
from lightning_autosync.cli.report import report
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import write_text
from lightning_autosync.documents.records import _RESULTS
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.step_time import paired_ratio
from lightning_autosync.replay import Constants
from lightning_autosync.report import page as page_module
from lightning_autosync.report.page import write_report
from lightning_autosync.report.summary import summary
from lightning_autosync.report.tuning_run import TuningRun
from lightning_autosync.search.tuning.settings import TuningSettings

Edit = Callable[[dict[str, Any]], Any]
Changed = Callable[[Edit], Path]
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Elements, ids and text of a page whose elements are all closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.titles = 0
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "data", "poster"):
                self.links.append(value or "")
        if tag == "svg":
            assert ("role", "img") in attrs

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 46 trials; not to be changed."""
    directory = tmp_path_factory.mktemp("tuning")
    write_run(directory, budget=46, seed=1, model="gpt")
    return directory


@pytest.fixture(scope="module")
def told(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the verb leaves of the run."""
    directory = tmp_path_factory.mktemp("report")
    report({"run": str(kept), "runs": None, "file": str(directory / "it.html")}, directory)
    return directory


@pytest.fixture(scope="module")
def page(told: Path) -> Page:
    return Page((told / "it.html").read_text())


@pytest.fixture
def changed(kept: Path, tmp_path: Path) -> Changed:
    """A copy of the run, without its study, with fields of ``result.json`` replaced."""

    def change(edit: Edit) -> Path:
        data = json.loads((kept / "result.json").read_text())
        edit(data)
        write_text(tmp_path / "result.json", json.dumps(data))
        return tmp_path

    return change


def words(directory: Path) -> str:
    return " ".join(summary(TuningRun.load(directory)))


def test_the_page_needs_nothing_else(page: Page) -> None:
    assert all(link.startswith("#") for link in page.links)
    assert page.elements["script"] == 0
    text = page.text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_ids_are_unique_and_links_lead_somewhere(page: Page) -> None:
    assert [name for name, count in Counter(page.ids).items() if count > 1] == []
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_every_section_has_its_picture(page: Page) -> None:
    assert {"curve", "hits", "foresight", "contenders", "importance", "messages", "cluster", "steps"} <= set(page.ids)
    assert page.elements["svg"] == page.elements["figcaption"] == 8


def test_every_trial_is_a_mark_and_a_row(kept: Path, page: Page) -> None:
    data = json.loads((kept / "result.json").read_text())
    for trial in data["trials"]:
        lines = [text for text in page.words if text.startswith(f"trial {trial['number']}, {trial['origin']}")]
        assert len(lines) >= (2 if trial["origin"] != "baseline" else 1), trial
    assert f"All {len(data['trials'])} trials as a table" in page.text


def test_the_summary_has_the_ratios_of_the_last_comparison(changed: Changed) -> None:
    def win(data: dict[str, Any]) -> None:
        final = data["final"]
        builder, ddp = final["opponents"]["builder"], final["opponents"]["ddp"]
        rounds = {"tuned": [0.20, 0.22, 0.21], builder: [0.24, 0.22, 0.23], ddp: [0.40, 0.42, 0.41]}
        kinds = {"tuned": "plan", builder: "builder", ddp: "ddp"}
        final["contenders"] = {
            name: {"class": "exact", "kind": kinds[name], "round_seconds": times} for name, times in rounds.items()
        }
        final["winner"] = "tuned"
        data["best"] |= {"number": 33, "origin": "evolved", "builder": None}

    directory = changed(win)
    said = words(directory)
    over_ddp, over_builder = paired_ratio([0.40, 0.42, 0.41], [0.20, 0.22, 0.21]), "1.10 times"
    assert "The best plan (trial 33, evolved) takes 210 ms a step." in said
    assert f"1.95 times as fast (95% interval {over_ddp.low:.2f} to {over_ddp.high:.2f}) as the best-tuned DDP" in said
    assert f"as fast within noise ({over_builder}" in said
    assert "Links were emulated on one machine and computation was paced" in said


def test_hits_are_complete_proposals_faster_than_the_best_builder(changed: Changed) -> None:
    def slow_builder(data: dict[str, Any]) -> None:
        proposals = [t for t in data["trials"] if t["origin"] != "baseline" and t["state"] == "complete"]
        for rank, trial in enumerate(proposals):
            trial["seconds"] = 0.1 if rank < 7 else 0.3
        data["opponents"]["builder"]["seconds"] = 0.2

    run = TuningRun.load(changed(slow_builder))
    proposals = [trial for trial in run.trials if trial.origin != "baseline"]
    assert run.hits == 7
    assert run.hit_rate == pytest.approx(7 / len(proposals))
    assert f"Of {len(proposals)} proposals of the sampler 7 " in words(run.directory)


def test_the_page_counts_hits_and_says_what_times_are(kept: Path, page: Page) -> None:
    run = TuningRun.load(kept)
    assert f"proposals beat the best builder {run.hits} of {len(run.proposals)}" in page.text
    assert "mean 30 ms a proposal, median 30 ms, " in page.text
    assert "minutes: start of the workers, opponents, search and final comparison; the start of the" in page.text


def test_the_best_so_far_falls_to_the_best_trial(kept: Path) -> None:
    run = TuningRun.load(kept)
    data = json.loads((kept / "result.json").read_text())
    complete = [t["seconds"] for t in data["trials"] if t["state"] == "complete"]
    assert run.best_so_far[-1] == min(complete)
    assert run.best_so_far == sorted(run.best_so_far, reverse=True)
    count = run.trials_to_98
    assert count is not None
    assert run.best_so_far[count - 1] <= run.best_so_far[-1] / 0.98 < run.best_so_far[count - 2]


def test_times_are_relative_to_the_reference_where_the_machine_drifted(changed: Changed) -> None:
    def slow_down(data: dict[str, Any]) -> None:
        for trial in data["trials"]:
            if trial["number"] >= 30 and trial["seconds"]:
                trial["seconds"] *= 2.0
        data["drift"]["reference_by_trial"] = {str(n): 0.8 if n >= 30 else 0.4 for n in range(10, 46)}

    run = TuningRun.load(changed(slow_down))
    assert run.drift.seen
    ratios = {t.number: run.seconds(t) / t.seconds for t in run.trials if t.seconds is not None}
    first, last = (statistics.median(v for n, v in ratios.items() if (n < 30) == early) for early in (True, False))
    assert first / last == pytest.approx(2.0)
    assert "speed drifted by 100%" in words(run.directory)


def test_what_comes_from_the_run_is_escaped_and_the_environment_is_told_in_words(changed: Changed) -> None:
    load = {"before": 0.123456, "after": None}

    def inject(data: dict[str, Any]) -> None:
        data["environment"] = {"cores": 2, "machines": ["a", "b"], "swap": False, "load": load, "ranks": 1}
        data["workload"]["name"] = "<script>alert(1)</script>"
        failed = next(trial for trial in data["trials"] if trial["state"] != "complete")
        failed["error"] = '"><img src=x>'
        data |= {"best": None, "final": None}  # of which other pages have the pictures

    directory = changed(inject)
    write_report(TuningRun.load(directory), directory / "report.html")
    found = Page((directory / "report.html").read_text())
    assert found.elements["script"] == found.elements["img"] == 0
    assert "<script>alert(1)</script> on fat_node_star" in found.text
    assert "Environment cores 2 machines a, b swap no load.before 0.1235 load.after none ranks 1" in found.text


def test_a_builder_that_wins_is_told(changed: Changed) -> None:
    def lose(data: dict[str, Any]) -> None:
        final = data["final"]
        builder = final["opponents"]["builder"]
        final["contenders"][final["winner"]]["kind"] = "finalist"
        final["contenders"][builder]["kind"] = "plan"
        final["winner"] = builder
        data["best"] |= {"number": None, "origin": "baseline", "builder": builder}

    said = words(changed(lose))
    assert re.search(r"The best plan \(builder \w+\) takes", said)
    assert "In the rounds that choose the winner, no searched plan was faster than this builder's." in said
    assert "best hand-made builder" not in said


def test_a_plan_that_was_left_out_is_told(changed: Changed) -> None:
    said = words(changed(lambda data: data["final"].update(left_out={"trial_9": "rank 1 died"})))
    assert "trial_9 failed in this comparison and was left out: rank 1 died." in said
    assert "left out" not in words(changed(lambda data: None))


def test_without_a_last_comparison_nothing_is_claimed(changed: Changed) -> None:
    directory = changed(lambda data: data.update(final=None, interrupted=True))
    said = words(directory)
    assert "gives no speedup" in said
    assert "times as fast" not in said
    assert "interrupted" in said


def test_a_run_without_any_time_has_a_report(changed: Changed) -> None:
    def fail(data: dict[str, Any]) -> None:
        for trial in data["trials"]:
            trial |= {"state": "failed", "seconds": None, "steps": [], "error": "rank 1 is lost"}
        data |= {"best": None, "final": None, "opponents": {"ddp": None, "builder": None}}

    directory = changed(fail)
    write_report(TuningRun.load(directory), directory / "report.html")
    found = Page((directory / "report.html").read_text())
    assert "No trial completed, so there is no plan." in found.text
    assert "No hit rate" in found.text
    assert "There was no final comparison" in found.text


@pytest.mark.parametrize(
    ("interrupted", "why"),
    [(False, "because they come first and used up search.budget; give"), (True, "because they come first")],
)
def test_a_run_without_a_search_says_so_once_and_alike(changed: Changed, interrupted: bool, why: str) -> None:
    def builders_alone(data: dict[str, Any]) -> None:
        data["trials"] = [trial for trial in data["trials"] if trial["origin"] == "baseline"]
        data["interrupted"] = interrupted

    directory = changed(builders_alone)
    run = TuningRun.load(directory)
    (told,) = (line for line in run.result.lines() if "only builders' plans were tried" in line)
    assert told.startswith(f"only builders' plans were tried, {why}")
    assert f"The run tried {len(run.trials)} plans;" in words(directory)
    assert f"failed. O{told[1:]}." in words(directory)


def test_a_run_with_a_search_does_not_say_that_there_was_none(kept: Path) -> None:
    assert "builders' plans were tried" not in words(kept)
    assert TuningRun.load(kept).result.unsearched == ""


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        ({"launch": {"kind": "emulated"}, "model": {"kind": "paced"}}, (5, 128 * 1024, True)),
        ({"launch": {"kind": "emulated"}, "model": {"kind": "layers"}}, (5, 128 * 1024, False)),
        ({"launch": {"kind": "local"}, "model": {"kind": "layers"}}, (5, 0, False)),
        ({"launch": {"kind": "ssh"}, "model": {"kind": "flat"}}, (None, 0, True)),
        ({"launch": {"kind": "local"}, "within_job": True}, (None, 0, False)),
    ],
)
def test_the_page_predicts_with_the_hosts_of_the_search(
    changed: Changed, settings: dict[str, Any], hosts: tuple[int | None, int, bool]
) -> None:
    def start(data: dict[str, Any]) -> None:
        data["settings"] = {"search": {"budget": 50}, **settings}
        data["environment"]["cores"] = 5
        data["emulated"] = {"links": hosts[1] > 0, "compute": settings.get("model") == {"kind": "paced"}}

    found = page_module._constants(TuningRun.load(changed(start)))
    assert (found.cores, found.burst, found.accelerated) == hosts


def test_the_page_predicts_with_the_costs_that_workers_measured(changed: Changed) -> None:
    costs = Constants(gradient_cost=1e-3, cores=3)
    found = page_module._constants(TuningRun.load(changed(lambda data: data.update(constants=costs.to_dict()))))
    assert found == costs


def test_a_traced_step_is_predicted_with_the_hosts_of_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Constants] = []
    monkeypatch.setattr(tune_module, "WorkerPool", lambda *given, **options: nullcontext())
    monkeypatch.setattr(tune_module, "measure_timeline", lambda *given: None)
    monkeypatch.setattr(tune_module, "compare_timelines", lambda *given: seen.append(given[-1]))
    settings = TuningSettings.parse({"model": {"kind": "flat", "mib": 1}}).model_copy(
        update={"launch": SimpleNamespace(kind="ssh", open=lambda cluster: nullcontext())}
    )
    job = SimpleNamespace(settings=settings, cluster=ClusterSpec.uniform(2, bandwidth=1e8), workload=None)
    costs = Constants(gradient_cost=1e-3, cores=3)
    tune_module._trace(cast(Any, SimpleNamespace(job=job, plan=object(), constants=costs)), tmp_path)
    assert seen == [costs]


@pytest.mark.slow
def test_importance_says_why_there_is_none(changed: Changed, kept: Path, tmp_path: Path) -> None:
    directory = changed(lambda data: None)
    write_report(TuningRun.load(directory), directory / "report.html")
    assert "this journal file does not exist" in Page((directory / "report.html").read_text()).text
    few = tmp_path / "few"
    write_run(few, budget=14, model="gpt")
    write_report(TuningRun.load(few), few / "report.html")
    assert re.search(r"\d+ complete trials are too few for importances; at least 25", (few / "report.html").read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "autosync-tuning/1", "trials": [{"num', r"result\.json: not valid JSON"),
        ('{"format": "autosync-bench/1"}', r"result\.json: format: 'autosync-bench/1' cannot be read"),
        ('{"format": "autosync-tuning/2"}', r"result\.json: format: .* newer release"),
        ("{}", r"result\.json: format: missing; expected 'autosync-tuning/1'"),
        ("[]", r"result\.json: expected a mapping"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    write_text(tmp_path / "result.json", text)
    with pytest.raises(DocumentError, match=message) as caught:
        TuningRun.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data["trials"][3].update(seconds=-1), r"trials\[3\]\.seconds: .*greater than or equal to"),
        (lambda data: data["trials"][3].update(state="lost"), r"trials\[3\]\.state: 'lost' is not known; .*failed"),
        (lambda data: data["cluster"].pop("nodes"), r"cluster: "),
        (lambda data: data["workload"].pop("variables"), r"workload: variables: missing"),
        (lambda data: data["best"]["plan"].update(world_size=0), r"best\.plan: world_size"),
        (lambda data: data.pop("trials"), r"trials: missing"),
    ],
)
def test_a_wrong_field_is_named(changed: Changed, edit: Edit, message: str) -> None:
    with pytest.raises(DocumentError, match=rf"result\.json: {message}"):
        TuningRun.load(changed(edit))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda final: final.update(winner="nobody"), "final.contenders: no contender is named 'nobody'"),
        (lambda final: final.pop("opponents"), "final: opponents: missing"),
        (
            lambda final: final["contenders"]["ddp_view"].update(kind="x"),
            r"ddp_view\.kind: 'x' is not known; allowed: plan",
        ),
        (
            lambda final: final["contenders"]["ddp_view"].update(round_seconds=[0.0]),
            r"round_seconds\[0\]: .*greater than",
        ),
        (lambda final: final["contenders"]["ddp_view"].update(round_seconds=[1.0]), "contenders have unequal rounds"),
    ],
)
def test_a_wrong_comparison_is_named(changed: Changed, edit: Edit, message: str) -> None:
    run = TuningRun.load(changed(lambda data: edit(data["final"])))
    with pytest.raises(DocumentError, match=message):
        _ = run.final


def test_the_verb_writes_the_report_and_sums_up(kept: Path, told: Path) -> None:
    assert (told / "it.html").read_text().startswith("<!DOCTYPE html>")
    said = json.loads((told / "result.json").read_text())
    assert said["format"] == "autosync-report/1"
    (row,) = said["runs"]
    assert row["trials"] == 46
    run = TuningRun.load(kept)
    assert run.final is not None
    assert row["over_ddp"] == asdict(run.final.speedup(run.final.ddp))
    assert row["seconds"] == run.final.seconds
    assert 0 < row["bound_share"] < 1.1
    assert row["hit_rate"] == run.hit_rate
    assert row["left_out"] == {}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "run: give either run=DIR, or runs="),
        ({"run": "a", "runs": "b"}, "run: give either"),
        ({"run": "nowhere"}, "nowhere: not a directory"),
        ({"runs": ["nowhere"]}, "runs: nowhere: not a directory"),
        ({"run": "nowhere", "colour": "red"}, "colour: unknown field"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        report(asked, tmp_path)


def test_a_directory_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"no result\.json in it"):
        report({"run": str(tmp_path)}, tmp_path / "out")
    with pytest.raises(DocumentError, match=r"no result\.json of 'autosync tune' in it or below it"):
        report({"runs": str(tmp_path)}, tmp_path / "out")


def test_what_other_verbs_wrote_is_named(tmp_path: Path) -> None:
    for verb in VERBS:
        import_module(f"lightning_autosync.cli.{verb}")
    formats = [name for name, kind in _RESULTS.items() if kind.__module__.startswith("lightning_autosync.")]
    others = sorted(set(formats) - {"autosync-tuning/1", "autosync-hybrid-tuning/1"})
    named = set()
    for one in others:
        write_text(tmp_path / "result.json", json.dumps({"format": one}))
        with pytest.raises(DocumentError) as caught:
            report({"run": str(tmp_path)}, tmp_path / "out")
        said = re.fullmatch(
            rf"run: {tmp_path}: holds a result of 'autosync (\w+)'; "
            "allowed: the directory of one run of 'autosync tune'",
            str(caught.value),
        )
        assert said is not None, (one, caught.value)
        named.add(said[1])
    assert named == VERBS.keys() - {"tune", "cache", "serve"}


def test_a_sweep_is_to_be_compared(tmp_path: Path) -> None:
    write_text(tmp_path / "result.json", '{"format": "autosync-sweep/1"}')
    with pytest.raises(DocumentError, match=rf"holds a sweep; .*'autosync tune'; .*, give runs={tmp_path}$"):
        report({"run": str(tmp_path)}, tmp_path / "out")

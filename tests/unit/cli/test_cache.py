"""``autosync cache``: the plans that jobs remember, as a list, one by one, and away."""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from tuned_plans import tuned, workload

from lightning_autosync.cli import main
from lightning_autosync.cli.arguments import with_names
from lightning_autosync.cli.cache import cache, describe_tuned
from lightning_autosync.errors import DocumentError
from lightning_autosync.search.memory import TuningCache
from lightning_autosync.search.memory.cache import VARIABLE


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningCache:
    """An empty cache in the directory that the command uses; the current directory is another one."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plans"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return TuningCache()


class Command:
    """The command, within this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *line: str) -> str:
        """What it prints."""
        self._monkeypatch.setattr(sys, "argv", ["autosync", "cache", *line])
        main()
        return self._capsys.readouterr().out


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def rows(told: str) -> list[list[str]]:
    """The rows of a printed table."""
    lines = (line for line in told.splitlines() if line.startswith("│"))
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_the_list_has_a_row_per_plan(plans: TuningCache, command: Command) -> None:
    written = datetime.now(timezone.utc) - timedelta(days=3, hours=1)
    entry = tuned(workload(name="[red]model"), hosts=("a", "a", "b"), written=written)
    plans.store(entry)
    told = command("list")
    key = entry.key.fingerprint
    plan = ["bandwidth-proportional shards", "1.40 over native", "3 d"]
    assert rows(told) == [[key, "[red]model", "6,640", "26.4 kB", "3", "2", *plan]]
    assert told.endswith(f"{plans.directory}: 1 plan\n")
    assert command() == told
    assert list(Path().iterdir()) == []


def test_the_list_names_what_cannot_be_read(plans: TuningCache, command: Command) -> None:
    assert command("list") == f"{plans.directory}: 0 plans\n"
    plans.store(tuned())
    (one,) = plans.entries()
    one.path.write_text("{}")
    expected = f"unreadable: {one.path}: format: missing; expected 'autosync-tuned/1'\n{plans.directory}: 0 plans\n"
    assert command("list") == expected


def test_show_tells_the_evidence_and_the_plan(plans: TuningCache, command: Command) -> None:
    entry = tuned()
    plans.store(entry)
    told = command("show", entry.key.fingerprint[:5])
    for words in (
        f"key {entry.key.fingerprint}: small, 3 parameters of 26.4 kB, 3 ranks on 3 hosts (red 10.0.0.1: 1, ",
        "allowed: exact; messages: the builders' own size; device: cpu",
        f"written 2026-03-01T12:30:00+00:00 by lightning-autosync {entry.key.package} with torch 2.13.0+cpu, after ",
        "cluster 'star': 3 links of 80 to 320 Mbit/s",
        "plan: bandwidth-proportional shards; predicted: 0.09 s to synchronize a step",
        f"plan {entry.plan.fingerprint}: 3 ranks, synchronous, semantics exact",
        str(plans.entries()[0].path),
    ):
        assert words in told
    assert ["byteps", entry.plan.fingerprint, "0.1", "20", "-"] in rows(told)
    assert ["native", "0123456789ab", "0.14", "24", "1.40"] in rows(told)
    assert list(Path().iterdir()) == []


def test_what_is_unknown_is_said_to_be() -> None:
    evidence = tuned().evidence.model_copy(update={"predicted": None, "compared": ()})
    found = tuned(evidence=evidence, bucket_bytes=5)
    told = "\n".join(part for part in describe_tuned(found) if isinstance(part, str))
    assert "plan: bandwidth-proportional shards; no prediction" in told
    assert "messages: 5 bytes" in told
    assert "trials" not in told


def test_show_says_that_a_job_ended_before_its_trials() -> None:
    told = "\n".join(part for part in describe_tuned(tuned(unfinished=True)) if isinstance(part, str))
    assert "after 300 synchronized steps, before its trials had ended" in told


def test_clear_removes_one_or_all_or_what_is_old(plans: TuningCache, command: Command) -> None:
    made = [tuned(bucket_bytes=number + 1) for number in range(4)]
    for entry in made:
        plans.store(entry)
    last = time.time() - 31 * 86400
    for one in plans.entries():
        if one.fingerprint == made[0].key.fingerprint:
            os.utime(one.path, (last, last))
    assert command("clear", "all", "older=5w") == f"{plans.directory}: 0 plans removed\n"
    assert command("clear", "older=30d") == f"{plans.directory}: 1 plan removed\n"
    assert command("clear", made[1].key.fingerprint) == f"{plans.directory}: 1 plan removed\n"
    assert {one.fingerprint for one in plans.entries()} == {entry.key.fingerprint for entry in made[2:]}
    assert command("clear", "all") == f"{plans.directory}: 2 plans removed\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"action": "lst"}, r"action: 'lst' is not known; did you mean 'list'\? allowed: list, show, clear"),
        ({"action": "list", "key": "a"}, "key: 'list' takes none"),
        ({"action": "show"}, "key: missing; give a key of `autosync cache list`, or its beginning"),
        ({"action": "show", "key": "zz"}, r"key: no plan in .*/plans has a key that begins with 'zz'"),
        ({"action": "show", "key": ""}, "key: String should have at least 1 character"),
        ({"action": "show", "key": "a", "older": "3d"}, "older: only for 'clear'"),
        ({"action": "clear"}, "key: missing; give a key of `autosync cache list`, its beginning, or all, or older=AGE"),
        ({"action": "clear", "older": 30}, r"older: expected an age such as '12h', '30d' or '8w' \(got 30\)"),
        ({"action": "clear", "key": "all", "older": "3y"}, "older: expected an age such as '12h', '30d' or '8w'"),
    ],
)
def test_a_wrong_argument_is_one_line(
    given: dict[str, object], message: str, plans: TuningCache, tmp_path: Path
) -> None:
    with pytest.raises(DocumentError, match=rf"^{message}") as caught:
        cache(given, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_beginning_of_several_keys_is_refused(plans: TuningCache, tmp_path: Path) -> None:
    assert plans.directory is not None
    plans.store(tuned())
    for name in ("abc111111111", "abc222222222"):
        (plans.directory / f"{name}.tuned.json").touch()
    for action in ("show", "clear"):
        with pytest.raises(DocumentError, match=r"^key: 2 keys begin with 'abc'; give more of one: abc1+, abc2+$"):
            cache({"action": action, "key": "abc"}, tmp_path)
    with pytest.raises(DocumentError, match=re.escape(f"{plans.directory}/abc111111111.tuned.json: not valid JSON")):
        cache({"action": "show", "key": "abc1"}, tmp_path)
    cache({"action": "clear", "key": "abc1"}, tmp_path)
    assert len(plans.entries()) == 2


def test_words_are_values_of_keys() -> None:
    assert with_names("cache", ["show", "12e4"]) == ["action='show'", "key='12e4'"]
    line = ["clear", "older=3d", "key=12e4", "--cfg", "job", "hydra.run.dir=x"]
    assert with_names("cache", line) == ["action='clear'", "older=3d", "key='12e4'", *line[3:]]
    assert with_names("cache", ["key='12e4'"]) == ["key='12e4'"]
    assert with_names("bench", ["list"]) == ["list"]
    with pytest.raises(DocumentError, match=r"^'more': too many words; allowed: ACTION KEY, then key=value$"):
        with_names("cache", ["show", "a", "more"])


def test_a_key_that_looks_like_a_number_is_text(plans: TuningCache, command: Command) -> None:
    assert plans.directory is not None
    plans.store(tuned())
    for name in ("12e456789012", "123456789012"):
        (plans.directory / f"{name}.tuned.json").touch()
        assert command("clear", name) == f"{plans.directory}: 1 plan removed\n"

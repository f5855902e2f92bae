"""Files of documents: what cannot be read gives one clear error, what is written appears whole."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweeps import sweep

from lightning_autosync.cluster import ClusterSpec, read_resource_spec
from lightning_autosync.documents import (
    Configuration,
    append_lines,
    counted,
    identity,
    is_path,
    read_data,
    seconds_text,
    write_data,
    write_text,
)
from lightning_autosync.errors import ClusterError, DocumentError, PlanError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.plan import SyncPlan


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.000 ms"), (0.000412, "0.412 ms"), (0.0831, "83.10 ms"), (0.8124, "812.4 ms"), (1.24, "1.240 s"),
        (83.1, "83.10 s"), (4000.0, "4000 s"),
    ],
)  # fmt: skip
def test_seconds_are_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


class Limits(Configuration):
    RENAMED = {"least": "min_steps"}  # noqa: RUF012

    min_steps: int = 5


UNREADABLE: dict[str, tuple[str, str, str]] = {
    "cut short": ("a.yaml", "a: [1, 2", "not valid YAML: "),
    "cut short, JSON": ("a.json", '{"a": [1, 2', "not valid JSON: "),
    "no such day": ("a.yaml", "world_size: 2020-13-45", "not valid YAML: month must be in 1..12"),
    "no such truth": ("a.yaml", "a: !!bool maybe", "not valid YAML: 'maybe'"),
    "other objects": ("a.yaml", "a: !!python/object:os.system {}", "not valid YAML: could not determine a constructor"),
    "too deep": ("a.yaml", "[" * 5000 + "]" * 5000, "not valid YAML: nested too deeply"),
    "too deep, JSON": ("a.json", "[" * 100_000 + "]" * 100_000, "not valid JSON: nested too deeply"),
    "not finite": ("a.yaml", "a: {b: [1, .nan]}", "a.b[1]: nan is not finite"),
    "not finite, JSON": ("a.json", '{"a": [{"b": 1e999}]}', "a[0].b: inf is not finite"),
    "too large": ("a.json", '{"a": 1' + "0" * 320 + "}", "a: the number is beyond 1e+60"),
    "too long": (
        "a.yaml",
        "a: 1" + "0" * 500,
        "not valid YAML: a number has 501 digits; allowed: at most 400 (line 1)",
    ),
    "too many": (
        "a.json",
        "[" + "0," * 500_000 + "0]",
        "not valid JSON: it has about 500002 values; allowed: at most 500000",
    ),
    "too many, YAML": ("a.yaml", "[" + "a," * 100_000 + "a]", "not valid YAML: it has more than 100000 values"),
    "too many bytes": (
        "a.yaml",
        " " * 5_000_000,
        "the file has more than 4194304 bytes; allowed: 4194304 (JSON: 16777216)",
    ),
    "levels": ("a.json", '{"a": ' + "[" * 100 + "]" * 100 + "}", f"a{'[0]' * 33}...: nested too deeply; allowed: 64"),
    "a date": ("a.yaml", "a: 2020-12-24", "a: YAML reads it as a date; put it in quotes"),
    "a key that is no text": ("a.yaml", "a: {1: x}", "a: key 1 is not a string; put it in quotes"),
    "half a character": (
        "a.json",
        '{"a": "\\ud800"}',
        "a: the string contains a lone surrogate, which is not a character",
    ),
    "key twice": ("a.yaml", "a: 1\nb: 2\na: 1\n", "not valid YAML: key 'a' is given twice (line 3)"),
    "key twice inside": ("a.yaml", "a: [{b: 1, 'b': 2}]", "not valid YAML: key 'b' is given twice (line 1)"),
    "key twice, JSON": ("a.json", '{"x": {"a": 1, "b": 2, "a": 3}}', "not valid JSON: key 'a' is given twice"),
}


@pytest.mark.parametrize("case", sweep(UNREADABLE, UNREADABLE.keys() - {"too many, YAML", "too deep"}))
def test_unreadable_file(tmp_path: Path, case: str) -> None:
    name, text, expected = UNREADABLE[case]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DocumentError) as caught:
        read_data(path)
    assert str(caught.value).startswith(f"{path}: {expected}")
    assert "\n" not in str(caught.value)


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DocumentError, match=r"a\.yaml: cannot be read: "):
        read_data(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(DocumentError) as caught:
        read_data(tmp_path / "a.yaml")
    assert str(caught.value) == f"{tmp_path / 'a.yaml'}: cannot be read: No such file or directory"


def test_documents_raise_their_own_error(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("format: autosync-plan/1\nworld_size: 2\nworld_size: 4\n")
    with pytest.raises(PlanError, match=r"plan\.yaml: not valid YAML: key 'world_size' is given twice \(line 3\)"):
        SyncPlan.load(path)


LINES = {
    "nodes:\n- name: a\n- name: b\n  devices: 0\n": "nodes[1].devices: Input should be greater than 0 (got 0) (line 6)",
    "nodes:\n- devices: 1\n": "nodes[0].name: missing (line 4)",
    "switches: [s,\n  t,\n  s s]\nnodes: [{name: a}]\n": "switches[2]: String should match pattern",
    "\n# of mine\nuniform:\n  rate: 1\n  nodes: 2\n": "uniform.rate: unknown field; allowed: devices, latency, nodes, ",
    "nodes: [{name: a}]\nlinks: []\nrank_order: [b]\n": "rank_order[0]: 'b' is not a node; allowed: a (line 5)",
    "switches: []\n": "nodes: missing",
}


@pytest.mark.parametrize("text", LINES)
def test_errors_name_the_line_of_the_field(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"format: {ClusterSpec.FORMAT}\nname: mine\n{text}")
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.load(path)
    assert str(caught.value).startswith(f"{path}: {LINES[text]}")
    assert ("(line" in str(caught.value)) == (LINES[text] != "nodes: missing")


def test_so_do_those_of_json_and_of_other_files_of_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": ClusterSpec.FORMAT, "name": "mine", "star": {"bandwidths": ["x"]}}, indent=1))
    with pytest.raises(ClusterError, match=r"mine\.json: star\.bandwidths\[0\]: .* \(line 6\)$"):
        ClusterSpec.load(path)
    path = tmp_path / "resource_spec.yml"
    path.write_text("nodes:\n- address: a\n- address: b\n  gpus: 3\n")
    with pytest.raises(ClusterError, match=r"resource_spec\.yml: nodes\[1\]\.gpus: .* \(line 4\)$"):
        read_resource_spec(path)


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one: &one {a: 1, b: 2}\ntwo: &two {<<: *one, b: 3}\nthree: {<<: *two, a: 4}\n")
    assert read_data(path)["three"] == {"a": 4, "b": 3}
    path.write_text("one: &one {a: 1, b: 2}\ntwo: &two {b: 3, =: 4}\nthree: {<<: [*one, *two], c: 5}\n")
    assert read_data(path)["three"] == {"a": 1, "b": 2, "=": 4, "c": 5}
    path.write_text("one: &one [1]\ntwo: {<<: *one}\n")
    with pytest.raises(DocumentError, match=r"a\.yaml: .*<< merges mappings, not a scalar \(line 1\)"):
        read_data(path)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_an_endless_file_is_not_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.symlink_to("/dev/zero")  # its size reads as 0
    with pytest.raises(DocumentError, match=r"the file has more than \d+ bytes"):
        read_data(path)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_data_survives_a_file(tmp_path: Path, suffix: str) -> None:
    data = {"a": [1, 2.5, None, True], "b": {"c": "d", "e": []}}
    write_data(tmp_path / f"new/a.{suffix}", data)
    assert read_data(tmp_path / f"new/a.{suffix}") == data


@pytest.fixture(params=[0o022, 0o027, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_have_the_mode_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "text")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "after \ud800")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("torn", ["", '{"half', "x" * 200_000])
def test_lines_are_added_after_the_last_whole_one(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "made" / "lines.jsonl"
    append_lines(path, '{"first": 1}\n')
    with path.open("a") as file:
        file.write(torn)
    append_lines(path, '{"second": 2}\n{"third": 3}\n')
    assert path.read_text().splitlines() == ['{"first": 1}', '{"second": 2}', '{"third": 3}']


def test_a_file_without_a_whole_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("x" * 70_000)
    append_lines(path, "1\n")
    assert path.read_text() == "1\n"


def test_a_directory_keeps_its_name_and_shares_it_with_none(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    name = identity(here)
    assert name == identity(here)
    assert name.startswith(str(here))
    here.rename(there)
    assert identity(there) == name
    assert identity(here) != name


def test_two_processes_give_a_directory_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(Path, "exists", lambda path: False)  # each sees no name, because both look at the same time
    found += [identity(tmp_path), identity(tmp_path)]
    assert found[0] == found[1]
    assert [path.name for path in tmp_path.iterdir()] == [".identity"]


def test_a_directory_has_a_name_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*paths: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    assert identity(tmp_path) == identity(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".identity"]


@pytest.mark.parametrize(
    ("damage", "message"), [(b"\xff\xfe\x00", "cannot be read: "), (b" \n", "the file is empty, ")]
)
def test_a_damaged_name_of_a_directory_is_one_error(tmp_path: Path, damage: bytes, message: str) -> None:
    (tmp_path / ".identity").write_bytes(damage)
    with pytest.raises(DocumentError) as caught:
        identity(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/.identity: {message}")


def test_an_earlier_name_of_a_key_works_and_warns() -> None:
    with pytest.warns(FutureWarning, match="^least: this key is now named min_steps"):
        assert Limits.parse({"least": 3, "min_steps": 5}).min_steps == 3
    with pytest.warns(FutureWarning, match="least"), pytest.raises(DocumentError, match=r"^min_steps: .*integer"):
        Limits.parse({"least": "x"})
    assert Limits.parse({"min_steps": 4}).min_steps == 4


def test_a_count_of_one_has_a_singular_noun() -> None:
    assert [counted(count, "plan") for count in (0, 1, 2)] == ["0 plans", "1 plan", "2 plans"]


@pytest.mark.parametrize("value", ["a.yaml", "a.yml", "a.json", "plans/a", "./a", Path("a")])
def test_paths(value: str | Path) -> None:
    assert is_path(value)


@pytest.mark.parametrize("value", ["all_reduce", "fat_star_4", "a.b", ""])
def test_names(value: str) -> None:
    assert not is_path(value)


def test_kinds_of_documents_are_told_apart(tmp_path: Path) -> None:
    """By the format line alone, so that a newer or damaged document also gets the errors of its kind."""
    path = tmp_path / "plan.yaml"
    write_data(path, {"format": "autosync-plan/99"})
    assert SyncPlan.is_in(path)
    assert not HybridPlan.is_in(path)
    assert not SyncPlan.describes([{"format": "autosync-plan/1"}])

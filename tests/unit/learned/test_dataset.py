"""A dataset on disk: what goes in comes out, nothing is there twice, and damage is told."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plans
from sweeps import examples

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError, UnwritableError
from lightning_autosync.learned.dataset import Conditions, Dataset, Entry, Sample, Writer, sample_key
from lightning_autosync.learned.dataset.parts import MANIFEST, Manifest, describe_part, from_parquet, to_parquet
from lightning_autosync.learned.dataset.writer import JOURNAL
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.workload import Variable, Workload

CLUSTER = ClusterSpec.star([1e6, 2e6, 3e6], name="star")
OTHER = ClusterSpec.uniform(3, bandwidth=1e6, name="uniform")
WORKLOAD = Workload(name="two", variables=(Variable(name="fc", shape=(40, 10)), Variable(name="bias", shape=(40,))))
CONDITIONS = Conditions({"torch": "2.13", "cores": 2}, seed=3, foreign_cores=0.1, measured_at=1_700_000)


def entry(priority: int = 0, cluster: ClusterSpec = CLUSTER, **conditions: Any) -> Entry:
    plan = builders.all_reduce(WORKLOAD, cluster)
    return with_plan(
        plan.model_copy(update={"groups": (plan.groups[0].model_copy(update={"priority": priority}),)}),
        cluster,
        **conditions,
    )


def with_plan(plan: SyncPlan, cluster: ClusterSpec, reference: float | None = 0.25, **conditions: object) -> Entry:
    sample = Sample(WORKLOAD, cluster, plan, (0.1, 0.3, 0.2), "buckets", 0.15, reference=reference)
    return Entry(sample, replace(CONDITIONS, **conditions))  # type: ignore[arg-type]


def filled(folder: Path, count: int = 3) -> Path:
    with Writer(folder) as writer:
        writer.append(entry(priority=number) for number in range(2))
        writer.append([entry(cluster=OTHER)][: count - 2])
    return folder


@examples(25)
@given(st.data())
def test_what_goes_in_comes_out(data: st.DataObject) -> None:
    drawn = [data.draw(plans(WORKLOAD, 3, lossy=True)) for _ in range(data.draw(st.integers(1, 4)))]
    times = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=5).map(tuple)
    samples = {
        plan.fingerprint: Sample(
            WORKLOAD, data.draw(st.sampled_from([CLUSTER, OTHER])), plan, data.draw(times), "drawn", 1.0
        )
        for plan in drawn
    }
    with TemporaryDirectory() as folder:
        with Writer(folder) as writer:
            for sample in samples.values():
                assert writer.append([Entry(sample, CONDITIONS)]) == 1
                if data.draw(st.booleans()):
                    writer.flush()
        assert list(Dataset.load(folder)) == list(samples.values())


def test_documents_are_there_once(tmp_path: Path) -> None:
    filled(tmp_path)
    with Writer(tmp_path) as writer:
        writer.append([entry(priority=7, cluster=OTHER)])
    dataset = Dataset.load(tmp_path)
    assert len(dataset) == 4
    assert dataset[0].workload is dataset[3].workload
    assert dataset[2].cluster is dataset[3].cluster
    parts = json.loads((tmp_path / "manifest.json").read_text())["parts"]
    assert sum(part["rows"] for part in parts if part["table"] == "documents") == 4  # workload, clusters, environment
    assert dataset.environments == {next(iter(dataset.environments)): {"torch": "2.13", "cores": 2}}


def test_a_pair_is_there_once_and_the_first_measurement_stays(tmp_path: Path) -> None:
    filled(tmp_path)
    again = Entry(replace(entry().sample, steps=(9.0,)), CONDITIONS)
    with Writer(tmp_path) as writer:
        assert writer.append([again, entry(priority=7)]) == 1
        assert sample_key(*key_of(again)) in writer.keys
    dataset = Dataset.load(tmp_path)
    assert len(dataset) == 4
    assert dataset[0].steps == (0.1, 0.3, 0.2)


def key_of(one: Entry) -> tuple[str, str, str]:
    row = one.row()
    return row["cluster"], row["workload"], row["plan"]


def test_sequences_slices_and_selections(tmp_path: Path) -> None:
    dataset = Dataset.load(filled(tmp_path))
    assert dataset[-1] == dataset[2]
    assert list(dataset[1:]) == [dataset[1], dataset[2]]
    chosen = dataset.select([2, 0])
    assert [sample.cluster.name for sample in chosen] == ["uniform", "star"]
    assert chosen[1].workload is dataset[0].workload
    with pytest.raises(IndexError):
        dataset[3]
    for none in (dataset[0:0], dataset.select([]), dataset.select(iter(()))):
        assert list(none) == []
        assert list(none.frame()["seconds"]) == []


def test_disturbed_samples_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.append([entry(), entry(priority=7, disturbed=True)])
    assert len(Dataset.load(tmp_path)) == 1
    assert list(Dataset.load(tmp_path, disturbed=True).frame()["disturbed"]) == [False, True]


def timed(seconds: float, **conditions: object) -> Entry:
    """The same pair each time."""
    return Entry(replace(entry().sample, steps=(seconds,)), replace(CONDITIONS, **conditions))  # type: ignore[arg-type]


def times(folder: Path, **options: bool) -> list[tuple[float, ...]]:
    return [sample.steps for sample in Dataset.load(folder, **options)]


@pytest.mark.parametrize("flushed", [False, True])
def test_a_disturbed_pair_is_measured_again_until_it_is_not(tmp_path: Path, flushed: bool) -> None:
    added, done = [], []
    writer = Writer(tmp_path)
    for number, disturbed in enumerate([True, True, False, False, True], start=1):
        one = timed(float(number), disturbed=disturbed)
        added.append(writer.append([one]))
        done.append(sample_key(*key_of(one)) in writer.keys)
        if flushed:  # what is there is known from its parts, too
            writer.close()
            writer = Writer(tmp_path)
    writer.close()
    assert added == [1, 0, 1, 0, 0]
    assert done == [False, False, True, True, True]
    assert times(tmp_path) == times(tmp_path, disturbed=True) == [(3.0,)]


def test_of_a_pair_that_is_only_disturbed_the_first_measurement_is_read(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.append([timed(1.0, disturbed=True), timed(2.0, disturbed=True), entry(priority=7)])
    assert times(tmp_path) == [(0.1, 0.3, 0.2)]
    assert times(tmp_path, disturbed=True) == [(1.0,), (0.1, 0.3, 0.2)]
    assert list(Dataset.load(tmp_path, disturbed=True).frame()["disturbed"]) == [True, False]


def test_a_killed_writer_loses_no_second_measurement(tmp_path: Path) -> None:
    before = Writer(tmp_path)
    before.append([timed(1.0, disturbed=True), timed(2.0)])
    os.close(before._lock)
    Writer(tmp_path).close()
    assert times(tmp_path) == [(2.0,)]


def test_frame(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.append([entry(), entry(priority=7, reference=0.5), entry(priority=8, reference=0.25)])
        writer.append([entry(cluster=OTHER, reference=None)])
    frame = Dataset.load(tmp_path).frame()
    assert list(frame["seconds"]) == [0.2] * 4
    assert list(frame["noise"]) == pytest.approx([entry().sample.noise] * 4)
    assert list(frame["cluster_name"]) == ["star"] * 3 + ["uniform"]
    assert list(frame["ranks"]) == [3] * 4
    assert list(frame["drift"][:3]) == [1.0, 2.0, 1.0]
    assert frame["drift"].isna()[3]
    assert frame["steps"][0] == (0.1, 0.3, 0.2)


def test_a_sample_has_the_reference_beside_which_it_was_measured(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.append([entry(), entry(priority=7, reference=0.5), entry(priority=8, reference=None)])
    dataset = Dataset.load(tmp_path)
    assert [sample.reference for sample in dataset] == [0.25, 0.5, None]
    assert dataset[0] == entry().sample  # which is equal by what was measured, not by when


def test_an_empty_dataset_has_a_frame_too(tmp_path: Path) -> None:
    Writer(tmp_path).close()
    dataset = Dataset.load(tmp_path)
    assert len(dataset) == 0
    assert list(dataset.frame()["seconds"]) == []


def test_several_folders(tmp_path: Path) -> None:
    one, two = filled(tmp_path / "one"), filled(tmp_path / "two", count=2)
    assert len(Dataset.load([one, two])) == 5
    assert len(Dataset.load(str(one))) == 3


def test_a_killed_writer_loses_nothing(tmp_path: Path) -> None:
    before = Writer(tmp_path)
    before.append([entry()])
    before.flush()
    before.append([entry(priority=7), entry(cluster=OTHER)])
    os.close(before._lock)  # as when its process dies: the lock is gone, nothing else happens
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"table": "samples", "row": {"work')
    with Writer(tmp_path) as after:
        assert after.append([entry(priority=7)]) == 0
        assert after.append([entry(priority=8)]) == 1
    assert [sample.cluster.name for sample in Dataset.load(tmp_path)] == ["star", "star", "uniform", "star"]
    assert not (tmp_path / JOURNAL).exists()


def test_killed_between_manifest_and_journal(tmp_path: Path) -> None:
    before = Writer(tmp_path)
    before.append([entry()])
    journal = (tmp_path / JOURNAL).read_text()
    before.close()
    (tmp_path / JOURNAL).write_text(journal)
    Writer(tmp_path).close()
    assert len(Dataset.load(tmp_path)) == 1


def test_a_spoilt_journal_is_told(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text("nonsense\n{}\n")
    with pytest.raises(
        DocumentError,
        match=r"journal.jsonl:1: not a row: its text: not valid JSON: .*; delete the line",
    ):
        Writer(tmp_path)
    (tmp_path / JOURNAL).unlink()
    Writer(tmp_path).close()  # the lock was given back


def line(table: object, row: object) -> str:
    return json.dumps({"table": table, "row": row})


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ("[]", "not a mapping of table and row"),
        ("{}", "table: None is not known; allowed: samples, documents"),
        (line("others", {}), "table: 'others' is not known; allowed: samples, documents"),
        (line([], {}), r"table: \[\] is not known; allowed"),
        (line("samples", []), "row: not a mapping of columns"),
        (line("samples", {}), r"row\.workload: missing"),
        (line("samples", {**entry().row(), "disturbed": None}), r"row\.disturbed: missing"),
        (line("samples", {**entry().row(), "seed": "three"}), r"row\.seed: Could not convert 'three'"),
        (line("samples", {**entry().row(), "seed": 2**70}), r"row\.seed: "),
        (line("samples", {**entry().row(), "steps": []}), "steps: empty; a sample needs at least one"),
        (line("samples", {**entry().row(), "steps": [0.1, None]}), r"steps\[1\]: None is not a time"),
        (line("documents", {"kind": "cluster", "fingerprint": "0123"}), r"row\.document: missing"),
        (line("documents", {"kind": [], "fingerprint": "0123", "document": ""}), r"row\.kind: "),
    ],
)
def test_a_line_that_is_no_row_is_told(tmp_path: Path, spoilt: str, message: str) -> None:
    before = Writer(tmp_path)
    before.append([entry()])
    os.close(before._lock)
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(spoilt.encode("latin-1") + b"\n")
    with pytest.raises(DocumentError, match=rf"journal.jsonl:5: not a row: {message}.*; delete the line"):
        Writer(tmp_path)


def test_a_line_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b"\xff\n")
    with pytest.raises(DocumentError, match=r"journal.jsonl:1: cannot be read: 'utf-8' codec can't decode"):
        Writer(tmp_path)


@pytest.mark.parametrize("deleted", range(6))
def test_the_remedy_for_a_spoilt_line_works(tmp_path: Path, deleted: int) -> None:
    before = Writer(tmp_path)
    before.append([entry(), entry(cluster=OTHER)])
    os.close(before._lock)
    lines = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    tables = [json.loads(one)["table"] for one in lines]
    assert tables == ["documents"] * 3 + ["samples", "documents", "samples"]
    (tmp_path / JOURNAL).write_text("".join(lines[:deleted] + lines[deleted + 1 :]))
    with Writer(tmp_path) as after:
        left = len(after.keys)
        assert left == [0, 1, 0, 1, 1, 1][deleted]  # without the workload, the star, the environment ...
        assert len(Dataset.load(tmp_path)) == left
        assert after.append([entry(), entry(cluster=OTHER)]) == 2 - left
    assert {sample.cluster.name for sample in Dataset.load(tmp_path)} == {"star", "uniform"}


def test_a_line_that_was_cut_off_is_repaired(tmp_path: Path) -> None:
    before = Writer(tmp_path)
    before.append([entry()])
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"table": "samples", "row": {"work')  # as of a full disk, after which the writer went on
    before.append([entry(priority=7)])
    os.close(before._lock)
    Writer(tmp_path).close()
    assert len(Dataset.load(tmp_path)) == 2


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Writer(tmp_path), pytest.raises(DocumentError, match="another process adds to this dataset"):
        Writer(tmp_path)
    Writer(tmp_path).close()


def first_part(folder: Path) -> Path:
    return folder / "samples-00000.parquet"


def truncate(folder: Path) -> None:
    first_part(folder).write_bytes(first_part(folder).read_bytes()[:-7])


def alter(folder: Path) -> None:
    content = bytearray(first_part(folder).read_bytes())
    content[len(content) // 2] ^= 1
    first_part(folder).write_bytes(content)


def lose(folder: Path) -> None:
    first_part(folder).unlink()


def miscount(folder: Path) -> None:
    rewrite(folder, rows=7)


def forge(folder: Path) -> None:
    content = bytearray(first_part(folder).read_bytes())
    content[4:400] = bytes(396)  # within the columns, whereas the footer is whole
    rewrite(folder, content=bytes(content))


def rewrite(folder: Path, content: bytes | None = None, rows: int = 3) -> None:
    """Give the first part of samples another content, or another count, and the manifest what belongs to it."""
    content = content or first_part(folder).read_bytes()
    first_part(folder).write_bytes(content)
    part = describe_part(first_part(folder).name, "samples", rows, content)
    manifest = Manifest.load(folder / MANIFEST)
    parts = tuple(part if one.file == part.file else one for one in manifest.parts)
    manifest.model_copy(update={"parts": parts}).save(folder / MANIFEST)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"samples-00000.parquet: truncated: it has \d+ of \d+ bytes; restore it .* its 3 samples"),
        (alter, r"samples-00000.parquet: altered: its SHA-256 is not the one in manifest.json; restore it"),
        (lose, r"samples-00000.parquet: cannot be read \(No such file or directory\); restore it"),
        (miscount, r"samples-00000.parquet: it has 3 rows, but manifest.json says 7; restore manifest.json"),
        (forge, r"samples-00000.parquet: not a table of samples, or of another version: "),
    ],
)
def test_damage_is_one_clear_error(tmp_path: Path, damage: object, message: str) -> None:
    filled(tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(DocumentError, match=message) as told:
        Dataset.load(tmp_path)
    assert "\n" not in str(told.value)
    with pytest.raises(DocumentError, match=message):
        Writer(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("steps", None, "steps: empty; a sample needs at least one"),
        ("steps", [], "steps: empty; a sample needs at least one"),
        ("steps", [0.1, None], r"steps\[1\]: (None|nan) is not a time; allowed: .* seconds"),
        ("steps", [0.0], r"steps\[0\]: 0.0 is not a time"),
        ("steps", [0.1, 0.1, math.nan], r"steps\[2\]: nan is not a time"),
        ("plan", None, "plan: not valid JSON"),
        ("plan", "{", "plan: not valid JSON: Expecting"),
        ("plan", '{"format": "autosync-plan/9"}', "plan: format: 'autosync-plan/9' was written by a newer release"),
    ],
)
def test_a_row_that_is_no_sample_is_told(tmp_path: Path, column: str, value: Any, message: str) -> None:
    rows = from_parquet("samples", first_part(filled(tmp_path)).read_bytes(), "").to_pylist()
    rows[1][column] = value
    rewrite(tmp_path, content=to_parquet("samples", rows))
    chosen = Dataset.load(tmp_path).select([2, 1])
    assert chosen[0].steps == (0.1, 0.3, 0.2)
    with pytest.raises(DocumentError, match=rf"samples-00000.parquet: row 1: {message}"):
        chosen[1]
    if column == "steps":
        with pytest.raises(DocumentError, match=rf"samples-00000.parquet: row 1: {message}"):
            chosen.frame()


@pytest.mark.parametrize("steps", [(), (0.0,), (0.1, -0.1), (math.nan,), (0.1, math.inf)])
def test_steps_are_times(steps: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"steps(\[[01]\])?: "):
        replace(entry().sample, steps=steps)


def test_a_document_that_is_none_is_told(tmp_path: Path) -> None:
    rows = [{"kind": kind, "fingerprint": entry().row()[kind], "document": "{"} for kind in entry().documents()]
    (tmp_path / JOURNAL).write_text("".join(line("documents", row) + "\n" for row in rows))
    with Writer(tmp_path) as writer:
        writer.append([entry()])
    with pytest.raises(DocumentError, match=r"documents-00000.parquet: row 0: workload [0-9a-f]{12}: not valid JSON"):
        Dataset.load(tmp_path)[0]


def test_the_remedy_works(tmp_path: Path) -> None:
    filled(tmp_path)
    with Writer(tmp_path) as writer:
        writer.append([entry(priority=7)])
    alter(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["parts"] = [part for part in manifest["parts"] if part["file"] != "samples-00000.parquet"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert len(Dataset.load(tmp_path)) == 1
    with Writer(tmp_path) as writer:  # what went with the part can be measured again
        assert writer.append([entry(), entry(priority=7)]) == 1
    assert len(Dataset.load(tmp_path)) == 2


def test_lost_documents_are_told(tmp_path: Path) -> None:
    filled(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["parts"] = [part for part in manifest["parts"] if part["table"] == "samples"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DocumentError, match=r"samples need workload [0-9a-f]{12}, but no part contains it"):
        Dataset.load(tmp_path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"not a dataset: it has no manifest.json; `autosync collect dataset=DIR`"):
        Dataset.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "autosync-dataset/2", "parts": []}')
    with pytest.raises(DocumentError, match="was written by a newer release; this one reads 'autosync-dataset/1'"):
        Dataset.load(tmp_path)


def test_leftovers_of_an_interruption_do_not_belong(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "samples-00001.parquet").write_bytes(b"half")
    assert len(Dataset.load(tmp_path)) == 3
    with Writer(tmp_path) as writer:
        writer.append([entry(priority=7)])
    assert len(Dataset.load(tmp_path)) == 4
    assert (tmp_path / "samples-00001.parquet").read_bytes() == b"half"  # whatever it is, it is not overwritten


def parts_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


@pytest.mark.parametrize("journaled", [False, True])
@pytest.mark.parametrize("lost", ["documents", "samples", "neither"])
def test_a_lost_manifest_is_not_made_anew(tmp_path: Path, journaled: bool, lost: str) -> None:
    filled(tmp_path)
    if journaled:  # which explains some of what is there, but not all
        before = Writer(tmp_path)
        before.append([entry(priority=7)])
        os.close(before._lock)
    manifest = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).unlink()
    (tmp_path / f"{lost}-00000.parquet").unlink(missing_ok=True)
    there = parts_of(tmp_path)
    count = 2 if lost == "neither" else 1
    message = rf"manifest.json: missing, but {count} of its parts exist, .*; restore it from a copy, or"
    for reader in (Dataset.load, Writer):
        with pytest.raises(DocumentError, match=message) as told:
            reader(tmp_path)
        assert "collect" not in str(told.value)
    assert parts_of(tmp_path) == there
    if lost == "neither":
        (tmp_path / MANIFEST).write_text(manifest)
        Writer(tmp_path).close()
        assert len(Dataset.load(tmp_path)) == 3 + journaled


@pytest.mark.parametrize("cut", ["documents", "samples", "manifest"])
def test_killed_in_the_first_flush(tmp_path: Path, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Writer(tmp_path)
    before.append([entry(), entry(priority=7, cluster=OTHER)])
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", replace_until(cut))
        with pytest.raises(UnwritableError):
            before.flush()
        os.close(before._lock)
        with pytest.raises(UnwritableError):  # once more, while it recovers
            Writer(tmp_path)
    assert Manifest.load(tmp_path / MANIFEST).parts == ()
    there = parts_of(tmp_path)
    with Writer(tmp_path) as after:
        assert len(after.keys) == 2
        assert after.append([entry(), entry(priority=8)]) == 1
    assert len(Dataset.load(tmp_path)) == 3
    assert there.items() <= parts_of(tmp_path).items()


def replace_until(name: str) -> Callable[..., None]:
    """`os.replace` until the process is killed, before it comes to a file."""
    original = os.replace

    def made(source: Path, target: Path) -> None:
        if target.name.startswith(name):
            raise InterruptedError
        original(source, target)

    return made


def test_parts_without_a_manifest_are_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "samples-00000.parquet").write_bytes(b"half")
    with pytest.raises(DocumentError, match="restore it from a copy, or use another folder"):
        Writer(tmp_path)


def test_files_of_other_names_are_no_parts(tmp_path: Path) -> None:
    (tmp_path / "samples-old.parquet").write_bytes(b"")
    (tmp_path / "others-00003.parquet").write_bytes(b"")
    filled(tmp_path)
    assert first_part(tmp_path).exists()


def test_the_shipped_dataset_is_read() -> None:
    folder = Path(__file__).parents[3] / "examples" / "datasets" / "emulated"
    dataset = Dataset.load(folder, disturbed=True)
    assert len(dataset) == len(Dataset.load(folder)) == 10_080
    assert dataset[-1].seconds > 0

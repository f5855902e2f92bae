"""A dataset on disk: what goes in comes out, nothing is there twice, and damage is told."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plans

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.simulator.dataset import Conditions, Dataset, Entry, Sample, Writer, sample_key
from lightning_autosync.simulator.dataset.journal import JOURNAL
from lightning_autosync.workload import Variable, Workload

CLUSTER = ClusterSpec.star([1e6, 2e6, 3e6], name="star")
OTHER = ClusterSpec.uniform(3, bandwidth=1e6, name="uniform")
WORKLOAD = Workload(name="two", variables=(Variable(name="fc", shape=(40, 10)), Variable(name="bias", shape=(40,))))
CONDITIONS = Conditions({"torch": "2.13", "cores": 2}, seed=3, reference=0.25, foreign_cores=0.1, measured_at=1_700_000)


def entry(priority: int = 0, cluster: ClusterSpec = CLUSTER, **conditions: object) -> Entry:
    plan = builders.all_reduce(WORKLOAD, cluster)
    return with_plan(
        plan.model_copy(update={"groups": (plan.groups[0].model_copy(update={"priority": priority}),)}),
        cluster,
        **conditions,
    )


def with_plan(plan: SyncPlan, cluster: ClusterSpec, **conditions: object) -> Entry:
    sample = Sample(WORKLOAD, cluster, plan, (0.1, 0.3, 0.2), "buckets", 0.15)
    return Entry(sample, replace(CONDITIONS, **conditions))  # type: ignore[arg-type]


def filled(folder: Path, count: int = 3) -> Path:
    with Writer(folder) as writer:
        writer.append(entry(priority=number) for number in range(2))
        writer.append([entry(cluster=OTHER)][: count - 2])
    return folder


@settings(max_examples=25, deadline=None)
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


def test_disturbed_samples_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.append([entry(), entry(priority=7, disturbed=True)])
    assert len(Dataset.load(tmp_path)) == 1
    assert list(Dataset.load(tmp_path, disturbed=True).frame()["disturbed"]) == [False, True]


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
    with pytest.raises(DocumentError, match=r"journal.jsonl:1: not a row; delete the line"):
        Writer(tmp_path)
    (tmp_path / JOURNAL).unlink()
    Writer(tmp_path).close()  # the lock was given back


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"samples-00000.parquet: truncated: \d+ of \d+ bytes are there; restore it .* its 3 samples"),
        (alter, r"samples-00000.parquet: altered: its SHA-256 is not the one in manifest.json; restore it"),
        (lose, r"samples-00000.parquet: cannot be read \(No such file or directory\); restore it"),
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
    with pytest.raises(DocumentError, match=r"workload [0-9a-f]{12} is named by samples but in no part"):
        Dataset.load(tmp_path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"no dataset: it has no manifest.json; `autosync collect dataset=DIR`"):
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

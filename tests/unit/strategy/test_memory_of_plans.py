"""What a further plan needs, and what the system and its control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import Compressor, builders, compile_plan
from lightning_autosync.plan.spec import WeightedTree
from lightning_autosync.strategy.tuning import memory
from lightning_autosync.workload import Variable, Workload

GIB = 2**30
MODEL = Workload(name="model", variables=(Variable(name="weight", shape=(1000,)),))


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with 8 GiB of memory left, without control groups."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:    {8 * GIB // 1024} kB\n")
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    return tmp_path


def group(folder: Path, limit: str, used: int, files: tuple[str, str, str], spare: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(files, (limit, str(used), ""), strict=True):
        (folder / name).write_text(f"{content}\n")
    (folder / "memory.stat").write_text(f"cache 1\n{files[2]} {spare}\n")


def test_without_control_groups_the_system_says_what_is_left(system: Path) -> None:
    assert memory.available_memory() == 8 * GIB
    (system / "meminfo").unlink()
    assert memory.available_memory() is None


def test_the_tightest_control_group_around_this_process_counts(system: Path) -> None:
    (system / "cgroup").write_text("0::/pod/rank\n")
    files = memory._FILES[""]
    group(system / "groups" / "pod" / "rank", "max", GIB, files)
    assert memory.available_memory() == 8 * GIB
    group(system / "groups" / "pod", str(4 * GIB), 3 * GIB, files, spare=GIB)
    assert memory.available_memory() == 2 * GIB


def test_control_groups_of_version_1_count_too(system: Path) -> None:
    """Containers see their own group as the root, and name it as the host does."""
    (system / "cgroup").write_text("3:cpuset:/x\n4:cpu,memory:/host/name/of/it\n")
    group(system / "groups" / "memory", str(3 * GIB), 2 * GIB, memory._FILES["memory"])
    assert memory.available_memory() == GIB


@pytest.mark.parametrize(("topology", "expected"), [("native", 1001), ("star", 1001 + 2 * 334)])
def test_buffers_include_what_other_ranks_contribute(topology: str, expected: int) -> None:
    """On a star of shards, each rank sums a third of the elements for the two others."""
    cluster = ClusterSpec.uniform(3, bandwidth="1 Gbit/s")
    schedule = compile_plan(builders.all_reduce(MODEL, cluster, topology=topology), MODEL, cluster)
    assert max(memory.buffer_bytes(schedule, rank) for rank in range(3)) == 4 * expected


def test_two_roots_hold_the_sum_of_the_other_and_a_copy_of_their_own() -> None:
    """Ranks stand in a line of three: the last one in it receives nothing on the way up."""
    cluster = ClusterSpec.uniform(3, bandwidth="1 Gbit/s")
    trees = (WeightedTree(weight=1, parents=(-1, 0, 1)),)
    plan = builders.packed_trees(MODEL, cluster)
    groups = tuple(group.model_copy(update={"trees": trees}) for group in plan.groups)
    schedule = compile_plan(plan.model_copy(update={"groups": groups}), MODEL, cluster)
    assert {each.second_root for each in schedule.messages[0].rounds[0].transfers} == {1}
    assert [memory.buffer_bytes(schedule, rank) for rank in range(3)] == [4 * 1001 * ranges for ranges in (3, 4, 1)]


def test_pairs_hold_what_they_add_and_copies_of_whole_sums() -> None:
    """Of five ranks, rank 0 sends its contribution to rank 1 before the exchanges among the other four."""
    cluster = ClusterSpec.uniform(5, bandwidth="1 Gbit/s")
    for topology, further in (
        ("recursive_doubling", [0, 5, 4, 4, 4]),
        ("halving_doubling", [0, 1.75, 0.75, 0.75, 0.75]),
    ):
        schedule = compile_plan(builders.all_reduce(MODEL, cluster, topology=topology), MODEL, cluster)
        found = [memory.buffer_bytes(schedule, rank) / 4 / 1001 - 1 for rank in range(5)]
        assert found == pytest.approx(further, abs=1e-2)


def test_what_compression_has_lost_takes_as_much_as_gradients() -> None:
    cluster = ClusterSpec.uniform(3, bandwidth="1 Gbit/s")
    taken = {}
    for feedback in (False, True):
        kind = Compressor(kind="topk", error_feedback=feedback)
        plan = builders.all_reduce(MODEL, cluster, topology="star", compressor=kind)
        taken[feedback] = memory.buffer_bytes(compile_plan(plan, MODEL, cluster), 1)
    assert taken[True] - taken[False] == MODEL.bytes


def test_a_plan_may_take_half_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterSpec.uniform(2, bandwidth="1 Gbit/s")
    schedule = compile_plan(builders.all_reduce(MODEL, cluster), MODEL, cluster)
    monkeypatch.setattr(memory, "available_memory", lambda: 4 * 4004)
    assert memory.buffer_fault(schedule, 0, sharing=2) == ""
    assert "16 kB of memory left" in memory.buffer_fault(schedule, 0, sharing=3)
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    assert memory.buffer_fault(schedule, 0, sharing=10**9) == ""

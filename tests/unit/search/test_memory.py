"""The memory of jobs that tune themselves: keys, entries, the directory that jobs share, and sources nearby."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

import pytest
from clusters import asymmetric_cluster
from disks import read_only, small_disk
from hypothesis import given
from hypothesis import strategies as st
from plans import plans
from sweeps import examples
from tuned_plans import CLUSTER, HOSTS, WRITTEN, tuned, workload

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.memory import Evidence, StepTime, TunedPlan, TuningCache, TuningKey
from lightning_autosync.search.memory import cache as module
from lightning_autosync.search.memory.cache import VARIABLE, default_directory


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path / "plans")


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def file_of(cache: TuningCache, entry: TunedPlan) -> Path:
    assert cache.directory is not None
    return cache.directory / f"{entry.key.fingerprint}.tuned.json"


def used_at(cache: TuningCache, entry: TunedPlan, seconds: float) -> None:
    os.utime(file_of(cache, entry), (seconds, seconds))


def lossy_plan() -> SyncPlan:
    data = tuned().plan.to_dict()
    data["groups"][0]["compressor"] = "bf16"
    return SyncPlan.from_dict(data)


# Keys


def test_times_and_the_name_of_the_model_are_no_part_of_the_key() -> None:
    key = TuningKey.of(workload(), HOSTS, "cpu")
    described = workload(name="other").model_copy(update={"forward_time": 0.0, "backward_time": 0.0})
    variables = tuple(one.model_copy(update={"ready": None, "rows": None}) for one in described.variables)
    other = TuningKey.of(described.model_copy(update={"variables": variables}), HOSTS, "cpu")
    assert other.fingerprint == key.fingerprint
    assert key.workload.backward_time == 0
    assert {variable.ready for variable in key.workload.variables} == {None}


def variable_changed(**update: Any) -> Any:
    model = workload()
    return model.model_copy(update={"variables": (model.variables[0].model_copy(update=update), *model.variables[1:])})


OTHERS = {
    "name": {"workload": variable_changed(name="first")},
    "shape": {"workload": variable_changed(shape=(9, 64))},
    "dtype": {"workload": variable_changed(dtype="float16")},
    "kind": {"workload": variable_changed(kind="row_sparse")},
    "host": {"hosts": ("red 10.0.0.1", "green 10.0.0.2", "blue 10.0.0.4")},
    "grouping": {"hosts": (*HOSTS[:2], HOSTS[0])},
    "order of ranks": {"hosts": HOSTS[::-1]},
    "device": {"device": "cuda"},
    "semantics": {"semantics": "compressed"},
    "bucket_bytes": {"bucket_bytes": 2**20},
    "overlap": {"overlap": "step"},
}


@pytest.mark.parametrize("part", OTHERS)
def test_every_other_part_is(part: str) -> None:
    arguments: dict[str, Any] = {"workload": workload(), "hosts": HOSTS, "device": "cpu"}
    assert TuningKey.of(**arguments | OTHERS[part]).fingerprint != TuningKey.of(**arguments).fingerprint


def test_of_torch_s_version_the_first_two_numbers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(torch: str, package: str = "1.0") -> str:
        monkeypatch.setattr(
            "lightning_autosync.search.memory.entry.version", lambda name: torch if name == "torch" else package
        )
        return TuningKey.of(workload(), HOSTS, "cpu").fingerprint

    assert fingerprint("2.13.0+cpu") == fingerprint("2.13.1") != fingerprint("2.14.0")
    assert fingerprint("2.13.0", "1.1") != fingerprint("2.13.0")


# Entries


@st.composite
def entries(draw: st.DrawFn) -> TunedPlan:
    size = draw(st.integers(3, 5))
    lossy = draw(st.booleans())
    model = workload(draw(st.integers(1, 20)))
    shape = draw(st.sampled_from(["ring", "mesh", "star", "racks"]))
    cluster = asymmetric_cluster(shape, size, Random(draw(st.integers(0, 99))))
    seconds = st.floats(1e-9, 1e6)
    times = st.builds(
        StepTime, name=st.text(min_size=1, max_size=9), plan=st.just("a"), seconds=seconds, steps=st.just(3)
    )
    plan = draw(plans(model, size, lossy))
    return tuned(
        model,
        hosts=tuple(draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))),
        cluster=cluster,
        plan=plan,
        semantics="relaxed" if lossy else "exact",
        bucket_bytes=draw(st.none() | st.integers(1, 2**40)),
        evidence=Evidence(
            predicted=draw(st.none() | seconds),
            measured=draw(times),
            compared=tuple(draw(st.lists(times, max_size=3))),
            synchronized_steps=draw(st.integers(0, 2**40)),
        ),
        written=draw(st.datetimes(timezones=st.just(timezone.utc))),
    )


@examples(20)
@given(entry=entries())
def test_what_is_written_is_read_again(entry: TunedPlan, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = TuningCache(tmp_path_factory.mktemp("plans"))
    cache.store(entry)
    assert cache.find(entry.key) == entry
    assert TunedPlan.from_dict(json.loads(json.dumps(entry.to_dict()))) == entry


def test_the_documents_within_have_their_own_format_lines() -> None:
    data = tuned().to_dict()
    assert data["format"] == "autosync-tuned/1"
    found = [data["plan"]["format"], data["cluster"]["format"], data["key"]["workload"]["format"]]
    assert found == ["autosync-plan/1", "autosync-cluster/1", "autosync-workload/1"]
    data["plan"]["format"] = "autosync-plan/2"
    with pytest.raises(DocumentError, match=r"plan: SyncPlan: format: 'autosync-plan/2' was written by a newer"):
        TunedPlan.from_dict(data)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"plan": tuned().plan.model_copy(update={"world_size": 4})}, "plan.world_size: 4 ranks, but key.hosts h"),
    "cluster": ({"cluster": ClusterSpec.star([1e7, 1e7])}, "cluster: 2 ranks, but key.hosts has 3"),
    "rates": ({"cluster": ClusterSpec.uniform(nodes=3)}, "cluster: the rates of its links are missing"),
    "model": ({"plan": tuned(workload(65)).plan}, "plan.workload: the plan was made for other parameters"),
    "variables": (
        {"plan": tuned().plan.model_copy(update={"groups": tuned().plan.groups[:1], "workload": None})},
        "plan.groups: their variables are not those of key.workload",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_entry_whose_parts_do_not_fit_each_other_is_refused(case: str) -> None:
    changes, message = UNFIT[case]
    data = {**tuned().to_dict(), **{name: part.to_dict() for name, part in changes.items()}}
    with pytest.raises(DocumentError, match=message):
        TunedPlan.from_dict(data)


def test_a_plan_that_the_job_does_not_allow_is_refused() -> None:
    with pytest.raises(DocumentError, match="plan: its semantics are compressed, but key allows exact"):
        TunedPlan.from_dict({**tuned().to_dict(), "plan": lossy_plan().to_dict()})


def test_the_speedup_is_over_the_plan_at_the_beginning() -> None:
    evidence = tuned().evidence
    assert evidence.speedup == pytest.approx(1.4)
    assert evidence.model_copy(update={"compared": ()}).speedup is None


# The directory


def test_the_last_writer_wins(cache: TuningCache) -> None:
    first, last = tuned(), tuned(origin="packed trees")
    assert cache.find(first.key) is None
    cache.store(last)
    cache.store(first)
    assert cache.find(last.key) == first
    assert [one.entry for one in cache.entries()] == [first]


def test_only_the_user_may_look_into_the_directory(cache: TuningCache) -> None:
    cache.store(tuned())
    assert cache.directory is not None
    assert cache.directory.stat().st_mode & 0o777 == 0o700


def test_the_directory_is_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "lightning-autosync" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert default_directory() == tmp_path / ".cache" / "lightning-autosync" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert default_directory() == tmp_path / "caches" / "lightning-autosync" / "plans"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert TuningCache().directory == tmp_path / "mine"
    monkeypatch.setenv(VARIABLE, "")
    cache = TuningCache()
    cache.store(tuned())  # without a warning
    assert cache.directory is None
    assert cache.find(tuned().key) is None


def test_a_job_without_a_home_directory_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", missing)
    cache = TuningCache()
    assert cache.find(tuned().key) is None
    assert cache.nearest(tuned().key, CLUSTER) == []
    with pytest.warns(UserWarning, match=f"not saved .*: there is no home directory; set {VARIABLE}"):
        cache.store(tuned())


def newer(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "format": "autosync-tuned/2"}


def of_another_key(data: dict[str, Any]) -> dict[str, Any]:
    return tuned(bucket_bytes=5).to_dict()


def untrained(data: dict[str, Any]) -> dict[str, Any]:
    data["evidence"]["measured"]["steps"] = 0
    return data


DAMAGED = {
    "newer": (newer, "format: 'autosync-tuned/2' was written by a newer release; this one reads 'autosync-tuned/1'"),
    "another key": (of_another_key, "key: the file is named after another key"),
    "a wrong field": (untrained, "evidence.measured.steps: Input should be greater than 0"),
    "foreign": (lambda data: data["plan"], "format: 'autosync-plan/1' cannot be read; expected 'autosync-tuned/1'"),
    "no mapping": (lambda data: [data], "expected a mapping of fields, got list"),
}


def assert_ignored(cache: TuningCache, path: Path, reason: str) -> None:
    """One line names the file; a second look says nothing."""
    with pytest.warns(UserWarning, match="^a saved plan is ignored: ") as caught:
        assert cache.find(tuned().key) is None
    assert cache.find(tuned().key) is None
    (told,) = (str(one.message) for one in caught)
    assert told.startswith(f"a saved plan is ignored: {path}: ")
    assert reason in told
    assert "\n" not in told
    (listed,) = cache.entries()
    assert listed.entry is None
    assert told.endswith(listed.fault)
    assert cache.nearest(tuned().key, CLUSTER) == []


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_cannot_be_used_costs_one_line(case: str, cache: TuningCache) -> None:
    change, reason = DAMAGED[case]
    cache.store(tuned())
    path = file_of(cache, tuned())
    path.write_text(json.dumps(change(tuned().to_dict())))
    assert_ignored(cache, path, reason)


@pytest.mark.parametrize("content", [b"", b'{"format": "autosync-tu', b"\xff\x00", b"[" * 100_000])
def test_so_does_one_that_is_damaged(content: bytes, cache: TuningCache) -> None:
    cache.store(tuned())
    path = file_of(cache, tuned())
    path.write_bytes(content)
    assert_ignored(cache, path, "")
    cache.store(tuned())
    assert cache.find(tuned().key) == tuned()


def test_what_is_named_like_an_entry_and_is_no_file_is_left_alone(cache: TuningCache) -> None:
    path = file_of(cache, tuned())
    path.mkdir(parents=True)
    assert cache.find(tuned().key) is None
    assert cache.entries() == []
    with pytest.warns(UserWarning, match=rf"not saved for later jobs: {path}: cannot be written"):
        cache.store(tuned())
    assert cache.clear() == 0


def test_a_directory_that_cannot_be_written_costs_one_line(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "plans")
    cache.store(tuned())
    with read_only(tmp_path / "plans"):
        assert cache.find(tuned().key) == tuned()
        with pytest.warns(UserWarning, match="not saved for later jobs: .*Read-only file system"):
            cache.store(tuned(bucket_bytes=5))
        cache.store(tuned(bucket_bytes=6))


def test_so_does_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", 4) as disk:
        (disk / "filler").write_bytes(bytes(4096))
        with pytest.warns(UserWarning, match="not saved for later jobs: .*No space left on device"):
            TuningCache(disk / "plans").store(tuned())


def test_an_entry_that_is_removed_is_gone_and_others_stay(cache: TuningCache) -> None:
    cache.remove(tuned().key)
    for entry in (tuned(), tuned(bucket_bytes=5)):
        cache.store(entry)
    cache.remove(tuned().key)
    assert cache.find(tuned().key) is None
    assert cache.find(tuned(bucket_bytes=5).key) is not None
    file_of(cache, tuned()).mkdir()
    with pytest.warns(UserWarning, match="cannot be removed: "):
        cache.remove(tuned().key)


def use_in_vain(cache: TuningCache) -> None:
    """Do what jobs do with a directory that has the entry of ``tuned()``, and see that it is not used."""
    assert cache.find(tuned().key) is None
    assert cache.nearest(tuned().key, CLUSTER) == []
    cache.store(tuned(bucket_bytes=5))


def test_a_directory_that_all_users_may_write_to_is_not_used(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "plans")
    cache.store(tuned())
    (tmp_path / "plans").chmod(0o777)
    told = rf"{tmp_path}/plans: all users may write to it \(mode 0777\); plans are neither read from it nor saved"
    with pytest.warns(UserWarning, match=told) as caught:
        use_in_vain(cache)
    assert len(caught) == 1
    (tmp_path / "plans").chmod(0o770)  # a group may share plans
    assert cache.find(tuned().key) == tuned()
    assert len(cache.entries()) == 1


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_neither_is_one_that_belongs_to_another_user(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "plans")
    cache.store(tuned())
    os.chown(tmp_path / "plans", 12345, 12345)
    told = "belongs to user 12345, but this job runs as user 0; plans are neither read"
    with pytest.warns(UserWarning, match=told) as caught:
        use_in_vain(cache)
    assert len(caught) == 1
    assert len(cache.entries()) == 1


_AS_ANOTHER_USER = """
import os, sys, warnings
sys.path.insert(0, sys.argv[2])
from tuned_plans import CLUSTER, tuned
from lightning_autosync.errors import DocumentError
from lightning_autosync.search.memory import TuningCache
if os.geteuid() == 0:
    os.setuid(12345)
cache = TuningCache(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert cache.find(tuned().key) is None
    assert cache.nearest(tuned().key, CLUSTER) == []
    cache.store(tuned())
print(*(one.message for one in caught), sep="\\n")
try:
    cache.entries()
except DocumentError as error:
    print(error)
"""


@pytest.mark.slow
def test_so_does_a_directory_of_another_user(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "plans")
    cache.store(tuned())
    (tmp_path / "plans").chmod(0)
    line = [sys.executable, "-c", _AS_ANOTHER_USER, str(tmp_path / "plans"), str(Path(__file__).parents[2])]
    told = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()
    (tmp_path / "plans").chmod(0o700)
    assert len(told) == 2
    assert told[0].startswith(f"the plan that this job found is not saved for later jobs: {tmp_path}/plans")
    assert told[0].endswith("Permission denied")
    assert told[1] == f"{tmp_path}/plans: cannot be read: Permission denied"


_WRITES = """
import sys
sys.path.insert(0, sys.argv[3])
from tuned_plans import tuned
from lightning_autosync.search.memory import TuningCache
cache = TuningCache(sys.argv[1])
entry = tuned(origin=sys.argv[2] * 400)
print("ready", flush=True)
input()
for _ in range(100):
    cache.store(entry)
    assert cache.find(entry.key) is not None
"""


@pytest.mark.slow
def test_jobs_that_write_one_entry_at_once_leave_a_whole_file(cache: TuningCache) -> None:
    lines = [
        [sys.executable, "-W", "error", "-c", _WRITES, str(cache.directory), letter, str(Path(__file__).parents[2])]
        for letter in "ab"
    ]
    jobs = [subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for line in lines]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
    origins = set()
    while any(job.poll() is None for job in jobs):
        if (found := cache.find(tuned().key)) is not None:  # a torn file would be a warning, which is an error here
            origins.add(found.origin)
    assert [job.wait() for job in jobs] == [0, 0]
    for job in jobs:
        job.communicate()
    assert origins <= {"a" * 400, "b" * 400}
    assert cache.directory is not None
    assert [path.name for path in cache.directory.iterdir()] == [f"{tuned().key.fingerprint}.tuned.json"]


def test_what_was_not_used_for_longest_goes_first(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ENTRIES", 3)
    made = [tuned(bucket_bytes=number + 1) for number in range(4)]
    for number, entry in enumerate(made[:3]):
        cache.store(entry)
        used_at(cache, entry, 1000.0 + number)
    assert cache.find(made[0].key) == made[0]
    cache.store(made[3])
    assert {one.fingerprint for one in cache.entries()} == {made[number].key.fingerprint for number in (0, 2, 3)}


def test_the_size_is_bounded_too(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [tuned(bucket_bytes=number + 1) for number in range(4)]
    cache.store(made[0])
    size = file_of(cache, made[0]).stat().st_size
    monkeypatch.setattr(module, "MOST_CACHED_BYTES", int(2.5 * size))
    for number, entry in enumerate(made):
        cache.store(entry)
        used_at(cache, entry, 1000.0 + number)
    assert [one.fingerprint for one in cache.entries()] == [entry.key.fingerprint for entry in (made[3], made[2])]
    monkeypatch.setattr(module, "MOST_CACHED_BYTES", 1)
    cache.store(made[1])
    assert [one.entry for one in cache.entries()] == [made[1]]


def test_an_entry_that_no_job_could_read_is_not_written(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    with pytest.warns(UserWarning, match="not saved for later jobs: .*the entry has more than 100 bytes"):
        cache.store(tuned())
    assert cache.directory is not None
    assert not cache.directory.exists()


def test_clear_takes_entries_and_nothing_else(cache: TuningCache) -> None:
    made = [tuned(bucket_bytes=number + 1) for number in range(4)]
    for entry in made:
        cache.store(entry)
    assert cache.directory is not None
    own = file_of(cache, made[0])
    fresh, abandoned = (cache.directory / f".{own.name}.{digit * 16}" for digit in "ab")
    foreign = [cache.directory / name for name in ("plan.json", "0123456789ab.json", "notes.tuned.json")]
    for path in (fresh, abandoned, *foreign):
        path.write_text("")
    os.utime(abandoned, (1.0, 1.0))
    used_at(cache, made[1], 1000.0)
    assert cache.clear(fingerprint="0123456789ab") == 0
    assert cache.clear(older_than=3600, fingerprint=made[0].key.fingerprint) == 0
    assert cache.clear(older_than=3600) == 1
    assert cache.clear(fingerprint=made[2].key.fingerprint) == 1
    assert {one.fingerprint for one in cache.entries()} == {made[number].key.fingerprint for number in (0, 3)}
    assert cache.clear() == 2
    assert sorted(cache.directory.iterdir()) == sorted([fresh, *foreign])


@pytest.mark.slow
def test_a_job_that_remembers_loads_no_optimizer_of_plans() -> None:
    loaded = "{'optuna', 'hydra', 'dgl', 'matplotlib'} & {*sys.modules}"
    program = f"import sys, lightning_autosync.search.memory; print({loaded})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# Entries nearby

ELSEWHERE = ("one", "two", "three")


def test_entries_nearby_are_those_of_the_model_and_settings_on_links_alike(cache: TuningCache) -> None:
    data = ClusterSpec.star([4e7, 1e7]).to_dict()
    data["nodes"][0]["devices"] = 2
    by_name = {
        "earlier": tuned(hosts=ELSEWHERE, written=WRITTEN - timedelta(days=1)),
        "elsewhere": tuned(hosts=ELSEWHERE[::-1]),
        "slower": tuned(hosts=HOSTS[::-1], cluster=CLUSTER.scaled(0.85)),
        "own": tuned(written=WRITTEN + timedelta(days=1)),
        "much slower": tuned(hosts=("a", "b", "c"), cluster=CLUSTER.scaled(0.5)),
        "places": tuned(hosts=("a", "a", "b"), cluster=ClusterSpec.from_dict(data)),
        "model": tuned(workload(65)),
        "settings": tuned(bucket_bytes=7),
        "overlap": tuned(overlap="step"),
        "lossy": tuned(semantics="compressed", plan=lossy_plan()),
        "on GPUs": tuned(device="cuda"),
    }
    for entry in by_name.values():
        cache.store(entry)
    names = {entry.fingerprint: name for name, entry in by_name.items()}
    assert len(names) == len(by_name)
    found = [names[entry.fingerprint] for entry in cache.nearest(tuned().key, CLUSTER)]
    assert found == ["own", "elsewhere", "earlier", "slower"]


@pytest.mark.parametrize(("factor", "near"), [(1.05, True), (0.81, True), (1.24, True), (0.78, False), (1.27, False)])
def test_rates_are_near_up_to_a_factor(factor: float, near: bool, cache: TuningCache) -> None:
    cache.store(tuned(hosts=ELSEWHERE))
    assert bool(cache.nearest(tuned().key, CLUSTER.scaled(factor))) == near


def test_one_slow_link_and_a_shared_link_are_differences(cache: TuningCache) -> None:
    four = ("a", "b", "c", "d")
    racks = ClusterSpec.racks(racks=2, nodes_per_rack=2, bandwidth=1e7, uplink=1e7)
    flat = ClusterSpec.star([1e7, 1e7, 1e7, 1e7])
    entry = tuned(hosts=four, cluster=flat)
    cache.store(entry)
    assert cache.nearest(entry.key, flat) == [entry]
    assert cache.nearest(entry.key, ClusterSpec.star([1e7, 1e7, 1e7, 5e6])) == []
    assert cache.nearest(entry.key, racks) == []


def test_of_many_nodes_only_some_are_compared(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(tuned())
    between = ClusterSpec.star([4e7, 1e6, 1e7])
    assert cache.nearest(tuned().key, between) == []
    monkeypatch.setattr("lightning_autosync.search.memory.nearness.MOST_NODES", 2)
    assert cache.nearest(tuned().key, between) == [tuned()]


def test_a_job_waits_for_few_files_only(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_COMPARED", 2)
    made = [tuned(hosts=tuple(hosts)) for hosts in ("abc", "bca", "cab")]
    for number, entry in enumerate(made):
        cache.store(entry)
        used_at(cache, entry, 1000.0 + number)
    found = {entry.fingerprint for entry in cache.nearest(tuned().key, CLUSTER)}
    assert found == {entry.fingerprint for entry in made[1:]}

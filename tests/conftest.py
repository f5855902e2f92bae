"""What all tests share: one pool of worker processes."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import forked
import hypothesis
import parsed_files
import pytest
import torch
import torch.distributed as dist
from shared_pool import SharedPool
from sweeps import examples

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.measure.launches.launch import LocalLaunch

TESTS = Path(__file__).parent
WORLD_SIZE = 5
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID",
    "MASTER_ADDR", "MASTER_PORT",  # where an earlier test's store may still listen
)  # fmt: skip

POOLS = ("pool", "duo", "quartet|pair")
"""Fixtures of processes that are shared by tests of many files."""

os.environ["LIGHTNING_AUTOSYNC_CACHE"] = ""  # no test finds or leaves plans in the user's cache
hypothesis.settings.register_profile("tests", examples())  # without deadlines, which slow machines miss
hypothesis.settings.load_profile("tests")
parsed_files.remember()
if "COVERAGE_RUN" in os.environ:
    LocalLaunch.parting = 5.0  # pools end workers by SIGTERM before SIGKILL, so that they save which lines ran
torch.set_num_threads(1)  # tensors here are small, and tests' own workers want the other cores


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("workers", 0):
        forked.start_server()  # it imports while this process collects, and all workers use it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a pool run in one worker, which starts it once."""
    used: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        used[item.path] |= {pool for pool in POOLS if {*pool.split("|")} & fixtures}
    for item in items:
        pools = sorted(used[item.path])
        if len(pools) > 1:
            raise pytest.UsageError(f"{item.path}: its tests use {', '.join(pools)}; use one pool in a file")
        if pools:
            item.add_marker(pytest.mark.together(pools[0]))


@pytest.fixture(autouse=True, scope="session")
def forked_workers() -> None:
    """Pools fork their workers, which takes a small part of the time of new interpreters."""
    forked.fork_workers()


@pytest.fixture
def new_interpreters() -> Iterator[None]:
    """Pools of this test start their workers as they do for users."""
    forked.start_workers()
    yield
    forked.fork_workers()


@pytest.fixture(autouse=True)
def own_interrupts() -> Iterator[None]:
    """A command that a test runs in this process changes what a Ctrl-C does."""
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    yield
    signal.signal(signal.SIGINT, before[0])
    sys.unraisablehook = before[1]


@pytest.fixture(autouse=True)
def own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers leave in the environment which rank a process is, and where its store is; the next test has its own."""
    for name in list(os.environ):
        if name in RANK_VARIABLES or name.startswith("TORCHELASTIC_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def own_process_group() -> Iterator[None]:
    """A Trainer leaves its process group behind; the next test may make one of its own."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def pool() -> Iterator[SharedPool]:
    """Five ranks on this machine, shared by all tests; smaller worlds are ``dist.new_group`` of them."""
    with SharedPool(WORLD_SIZE, [TESTS / "distributed", TESTS], timeout=180.0) as shared:
        yield shared


@pytest.fixture(scope="session")
def quartet() -> Iterator[SharedPool]:
    """Four ranks in which Trainers and Fabrics are made."""
    with SharedPool(4, [TESTS, TESTS / "strategy"], timeout=280.0) as shared:
        yield shared


@pytest.fixture(scope="session")
def diamond() -> ClusterSpec:
    """Two ways from the middle to the target: what is best depends on the sender's own link."""
    links = [
        ("slow", "middle", 50e6),
        ("fast", "middle", 1000e6),
        ("middle", "narrow", 100e6),
        ("narrow", "target", 100e6),
        ("middle", "wide", 400e6),
        ("wide", "target", 400e6),
    ]
    return ClusterSpec.from_dict(
        {
            "format": "autosync-cluster/1",
            "name": "diamond",
            "nodes": [{"name": name} for name in ("slow", "fast", "target")],
            "switches": ["middle", "narrow", "wide"],
            "links": [{"a": a, "b": b, "bandwidth": rate} for a, b, rate in links],
        }
    )

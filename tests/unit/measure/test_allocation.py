"""Allocations of SLURM: how they are read and requested, and how srun starts workers on their nodes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.launches.allocation import Allocation, SlurmLaunch, open_allocation, salloc_options
from lightning_autosync.measure.launches.settings import SlurmSettings

SCONTROL = """
case "$3" in
  "rack[1-2],big") printf 'rack1\\nrack2\\nbig\\n' ;;
  *) echo "Invalid hostlist: $3" >&2; exit 1 ;;
esac
"""
SALLOC = """
echo "$@" > "$STAND_IN/options"
env > "$STAND_IN/environment"
[ "$1" = --nodes=9 ] && { echo "salloc: error: More nodes than there are" >&2; exit 1; }
echo "salloc: Granted job allocation 7" >&2
while [ "$1" != sh ]; do shift; done
SLURM_JOB_ID=7 SLURM_JOB_NODELIST='rack[1-2],big' SLURM_TASKS_PER_NODE='2(x2),1' "$@"
echo over > "$STAND_IN/over"
"""
JOB = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "rack[1-2],big", "SLURM_TASKS_PER_NODE": "4(x2),1"}
ALLOCATION = Allocation("42", {"rack1": 4, "rack2": 4, "big": 1})


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a stand-in for SLURM notes what it was asked for; this process is in no job."""
    for name, script in {"scontrol": SCONTROL, "salloc": SALLOC, "srun": ""}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
    for name in (*JOB, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    return tmp_path


def test_a_slurm_that_does_not_answer_does_not_hold_the_verb(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its salloc waits for ever, and SIGTERM does not end it."""
    monkeypatch.setattr("lightning_autosync.measure.launches.allocation._RELEASE", 0.3)
    hangs = SALLOC.replace("echo over", "trap '' TERM; while :; do sleep 0.1; done; echo over")
    (slurm / "bin" / "salloc").write_text(f"#!/bin/sh\n{hangs}")
    begin = time.monotonic()
    with open_allocation((2, 1), {}) as allocation:
        assert allocation.job == "7"
    assert time.monotonic() - begin < 20.0
    assert not (slurm / "over").exists()


def named(*names: str, devices: int = 1) -> ClusterSpec:
    nodes = [{"name": name, "devices": devices} for name in names]
    links = [{"a": name, "b": "switch"} for name in names]
    document = {"format": ClusterSpec.FORMAT, "name": "mine", "nodes": nodes, "switches": ["switch"], "links": links}
    return ClusterSpec.from_dict(document)


def test_the_job_of_this_process_is_read(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    with open_allocation((2, 1), {}) as allocation:
        assert allocation == ALLOCATION
    assert not (slurm / "options").exists()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "[")
    with pytest.raises(LaunchError, match=r"launch=slurm: scontrol show hostnames \[: Invalid hostlist: \["):
        open_allocation(None, {}).__enter__()


def test_a_job_is_requested_and_given_back(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SLURM_CPU_BIND", "cores")  # would be an option of salloc
    with open_allocation((3, 2), {"slurm_partition": "gpu"}) as allocation:
        assert allocation == Allocation("7", {"rack1": 2, "rack2": 2, "big": 1})
        assert not (slurm / "over").exists()
        options = (slurm / "options").read_text()
        assert options.startswith("--nodes=3 --ntasks-per-node=2 --job-name=autosync --partition=gpu sh -c ")
    assert (slurm / "over").exists()
    known = {line.partition("=")[0] for line in (slurm / "environment").read_text().splitlines()}
    assert "SLURM_CONF" in known
    assert "SLURM_CPU_BIND" not in known


def test_a_refused_request_is_told(slurm: Path) -> None:
    message = "launch=slurm: salloc: salloc: error: More nodes than there are"
    with pytest.raises(LaunchError, match=message), open_allocation((9, 1), {}):
        pass


def test_a_verb_that_srun_multiplied_is_refused(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(LaunchError, match="start it once, without srun"):
        open_allocation((1, 1), {}).__enter__()


def test_a_missing_slurm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="launch=slurm: 'srun' is not installed"):
        open_allocation((1, 1), {}).__enter__()


def test_parameters_become_options() -> None:
    parameters: dict[str, Any] = {
        "name": "mine", "timeout_min": 30, "slurm_gpus_per_node": 4, "slurm_exclusive": True, "slurm_overcommit": False,
        "nodes": 2, "tasks_per_node": 4,
    }  # fmt: skip
    options = ["--job-name=mine", "--time=30", "--gpus-per-node=4", "--exclusive"]
    assert salloc_options(None, parameters) == ["--nodes=2", "--ntasks-per-node=4", *options]
    assert salloc_options((3, 1), parameters) == ["--nodes=3", "--ntasks-per-node=1", *options]
    with pytest.raises(DocumentError, match=r"launch\.parameters\.nodes: missing; outside a SLURM job set"):
        salloc_options(None, {})
    for wrong in ({"mem": 4}, {"slurm_setup": ["module load"]}):
        with pytest.raises(DocumentError, match=rf"launch\.parameters\.{next(iter(wrong))}: not an option of salloc"):
            salloc_options((1, 1), wrong)


def test_ranks_run_on_the_hosts_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "9")
    monkeypatch.setenv("OTHER", "here")
    launch = SlurmLaunch(ALLOCATION)
    assert (launch.world_size, launch.address) == (9, "rack1")
    assert launch.environment(8) == {"LOCAL_RANK": "0", "GROUP_RANK": "2"}
    assert launch.environment(5) == {"LOCAL_RANK": "1", "GROUP_RANK": "1"}
    command, variables = launch.command(5, [sys.executable, "-m", "worker"], {"RANK": "5"})
    assert command[0] == "srun"
    assert {"--jobid=42", "--nodelist=rack2", "--nodes=1", "--ntasks=1", "--overlap"} <= set(command)
    assert command[-3:] == [sys.executable, "-m", "worker"]
    assert (variables["RANK"], variables["OTHER"]) == ("5", "here")
    assert "SLURM_NTASKS" not in variables


def test_nodes_run_on_hosts_of_their_names_or_else_in_order() -> None:
    def hosts(cluster: ClusterSpec) -> list[str]:
        launch = SlurmLaunch(ALLOCATION, cluster)
        commands = [launch.command(rank, [], {})[0] for rank in range(cluster.world_size)]
        return [word.partition("=")[2] for command in commands for word in command if word.startswith("--nodelist=")]

    assert hosts(named("big", "rack1")) == ["big", "rack1"]
    assert hosts(named("node0", "node1", devices=2)) == ["rack1", "rack1", "rack2", "rack2"]
    alternating = named("node0", "node1", devices=2).with_rank_order(["node0", "node1", "node0", "node1"])
    assert hosts(alternating) == ["rack1", "rack2", "rack1", "rack2"]
    assert SlurmLaunch(ALLOCATION, alternating).environment(2) == {"LOCAL_RANK": "1", "GROUP_RANK": "0"}
    with pytest.raises(LaunchError, match="cluster 'mine' has node rack7, but the SLURM job has rack1, rack2, big"):
        hosts(named("big", "rack7"))
    with pytest.raises(LaunchError, match="cluster 'mine' has 4 nodes, but the SLURM job has rack1, rack2, big"):
        hosts(named("a", "b", "c", "d"))


def test_only_a_training_need_not_wait() -> None:
    with (
        pytest.raises(DocumentError, match=r"launch\.wait: only train"),
        SlurmSettings(kind="slurm", wait=False).open(None),
    ):
        pass

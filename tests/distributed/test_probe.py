"""The probe on emulated links, on this machine, and within a job that torchrun started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest

from lightning_autosync.cli import probe as command
from lightning_autosync.cli.probe import probe, run_probe
from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.probe.settings import ProbeDocument, ProbeSettings
from lightning_autosync.measure.probe.table import link_rows
from lightning_autosync.measure.workers import LaunchError
from lightning_autosync.replay import Constants

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

emulated = [pytest.mark.root, pytest.mark.skipif(bool(UNABLE), reason=UNABLE)]
slow = [*emulated, pytest.mark.slow]


def two_nodes_of_two() -> ClusterSpec:
    return ClusterSpec.uniform(2, devices=2, bandwidth="100 Mbit/s", name="two_nodes_of_two")


def two_sites_without_latency() -> ClusterSpec:
    """The shipped `two_sites_wan` without its 20 ms, for which each of the probe's many collectives would wait."""
    cluster = resolve_cluster("two_sites_wan")
    line = cluster.links[-1].model_copy(update={"latency": 0.0001})
    return cluster.model_copy(update={"links": (*cluster.links[:-1], line)})


@pytest.mark.timeout(900)  # disturbed transfers are repeated
@pytest.mark.parametrize(
    ("truth", "scale", "links"),
    [
        pytest.param(resolve_cluster("fat_node_star"), 0.25, 4, marks=slow),
        pytest.param(two_nodes_of_two(), 1.0, 2, marks=slow),
        pytest.param(resolve_cluster("four_equal"), 0.1, 4, marks=slow),
        # The two up-links are in a row with nothing but a switch between them, which is one link to those who measure.
        pytest.param(resolve_cluster("two_racks_2to1"), 0.25, 9, marks=slow),
        pytest.param(resolve_cluster("four_racks_of_four"), 0.05, 20, marks=slow),
        pytest.param(resolve_cluster("ring_of_four"), 0.25, 4, marks=slow),
        pytest.param(two_sites_without_latency(), 0.1, 9, marks=slow),
    ],
    ids=lambda value: value.name if isinstance(value, ClusterSpec) else "",
)
def test_links_are_recovered(truth, scale, links):
    settings = ProbeSettings(
        launch={"kind": "emulated"},
        cluster=truth.to_dict(),
        cluster_scale=scale,
        constants=False,
        every_pair=False,
        head=0.1,
        window=0.2,
    )
    answer = run_probe(settings)
    found = ClusterSpec.from_dict(answer["cluster"])
    rows = link_rows(found, truth.scaled(scale))
    assert {f"{row['from']} > {row['to']}": row["deviation"] for row in rows} == {
        f"{row['from']} > {row['to']}": pytest.approx(0, abs=0.1) for row in rows
    }
    assert found.rank_nodes == truth.rank_nodes
    assert len(rows) == 2 * links
    for pair in answer["pairs"]:
        alone, trips = pair["alone"], pair["round_trip_loaded"]
        assert [trip is None for trip in trips] == [rate is None for rate in alone]


def on_narrow_links(**changes):
    """Two nodes at the ends of links of 10 Mbit/s."""
    truth = ClusterSpec.uniform(2, bandwidth="10 Mbit/s", name="narrow")
    return {
        "launch": {"kind": "emulated"},
        "cluster": truth.to_dict(),
        "constants": False,
        "head": 0.2,
        "window": 0.3,
        **changes,
    }


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_round_trips_are_measured_under_load_each_way(tmp_path, capsys):
    probe(on_narrow_links(), tmp_path)
    (pair,) = json.loads((tmp_path / "result.json").read_text())["pairs"]
    for trip in pair["round_trip_loaded"]:
        # What stands in the queue: two packets of a full stream, 64 KiB each, take ten times as long.
        assert trip["median"] > max(0.01, pair["round_trip"]["least"])
        assert trip["least"] <= trip["median"]
    printed = capsys.readouterr().out
    assert "pairs of nodes" in printed
    assert "halves of idle round trips" in printed


def test_the_local_machine_is_one_node_and_the_files_can_be_read(tmp_path, capsys, caplog):
    caplog.set_level("INFO", "lightning_autosync")
    probe({"launch": {"kind": "local"}, "ranks": 2, "head": 0.05, "window": 0.1}, tmp_path)
    assert "probe: measures links, then hosts" in caplog.text
    assert "probe: 0 of 4: round trips" in caplog.text
    assert "probe: 4 of 4" in caplog.text
    cluster = ClusterSpec.load(tmp_path / "cluster.yaml")
    assert [node.devices for node in cluster.nodes] == [2]
    assert cluster.local_bandwidth > 1e7
    constants = Constants.load(tmp_path / "constants.yaml")
    assert 1.0 <= constants.cores <= (os.cpu_count() or 1)
    for name in ("frame_cost", "message_cost", "collective_cost", "gradient_cost", "merge_cost", "step_cost"):
        assert 0 < getattr(constants, name) < 5e-3, name
    for name in ("wake_up", "pass_cost", "due_cost"):  # what is left of a time without others, which may be nothing
        assert 0 <= getattr(constants, name) < 5e-3, name
    result = ProbeDocument.read(tmp_path)
    assert result.costs is not None
    assert set(result.costs["small_collectives"]) == {"none", "batch"}
    assert "constants.yaml" in capsys.readouterr().out


@pytest.mark.slow
def test_within_a_job_of_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--no-python", sys.executable, "-c", "from lightning_autosync.cli import main; main()", "probe"]
    command += ["launch=torchrun", "constants=false", "head=0.05", "window=0.1"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
    }
    job = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stderr
    cluster = ClusterSpec.load(tmp_path / "cluster.yaml")
    assert cluster.world_size == 2
    assert len(cluster.nodes) == 1


def test_within_a_job_ranks_wait_for_others_as_long_as_the_settings_say(tmp_path, monkeypatch):
    waits = []

    def meet(backend, timeout):
        waits.append(timeout)
        raise ConnectionError

    monkeypatch.setattr(command, "require_torchrun", lambda verb: None)
    monkeypatch.setattr(command.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(command.dist, "init_process_group", meet)
    with pytest.raises(DocumentError, match="timeout: must be at least head"):
        probe({"launch": {"kind": "torchrun"}, "timeout": 0.1}, tmp_path)
    with pytest.raises(ConnectionError):
        probe({"launch": {"kind": "torchrun"}, "timeout": 9}, tmp_path)
    assert waits == [timedelta(seconds=9)]


def test_outside_a_job_the_command_says_how_to_start_one(tmp_path):
    with pytest.raises(LaunchError, match="torchrun --nnodes"):
        probe({"launch": {"kind": "torchrun"}}, tmp_path)

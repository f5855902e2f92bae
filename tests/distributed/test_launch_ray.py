"""Workers that actors start on the nodes of a Ray cluster; skipped where Ray is not installed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import worker_calls

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError, ExchangeError, MissingPackageError
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.launches import ray_cluster, relay
from lightning_autosync.measure.launches.ray_cluster import RayLaunch, RayNode, connected, hosts_of
from lightning_autosync.measure.launches.settings import RaySettings
from lightning_autosync.measure.workers import WorkerError, WorkerPool

HERE = Path(__file__).parent
SMALL = ["model=flat", "model.mib=1", "ddp=short", "rounds=2", "steps=2", "warm_up=1"]
NODES = [RayNode("1", "10.0.0.1", "head", 4.0), RayNode("2", "10.0.0.2", "big", 8.0)]


def test_nodes_are_found_by_name_or_address_or_else_in_order() -> None:
    assert hosts_of(ClusterSpec.uniform(nodes=2), NODES, 1.0) == NODES
    assert hosts_of(named("big", "head"), NODES, 1.0) == NODES[::-1]
    assert hosts_of(named("10.0.0.2"), NODES, 1.0) == NODES[1:]


@pytest.mark.parametrize(
    ("cluster", "cpus", "message"),
    [
        (ClusterSpec.uniform(nodes=3), 1.0, r"has 3 nodes, but Ray has head \(10\.0\.0\.1\), big \(10\.0\.0\.2\)"),
        (ClusterSpec.uniform(nodes=2, devices=8), 1.0, r"has 8 ranks, but Ray has 4 CPUs on head; .* up to 0\.5"),
    ],
)
def test_what_ray_lacks_is_told(cluster: ClusterSpec, cpus: float, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        hosts_of(cluster, NODES, cpus)


def test_a_node_that_ray_does_not_have_is_named() -> None:
    with pytest.raises(LaunchError, match=r"cluster 'mine' has node small, but Ray has head"):
        hosts_of(named("head", "small"), NODES, 1.0)


def test_nodes_without_enough_cpus_are_skipped() -> None:
    small = RayNode("0", "10.0.0.0", "head-only", 0.0)
    assert hosts_of(ClusterSpec.uniform(nodes=2), [small, *NODES], 1.0) == NODES
    with pytest.raises(LaunchError, match=r"has 3 ranks, but Ray has 4 CPUs on head; allowed: launch\.cpus up to 1$"):
        hosts_of(ClusterSpec.uniform(nodes=2, devices=3), NODES, 2.0)


def test_nodes_with_addresses_run_nowhere_else() -> None:
    with pytest.raises(LaunchError, match=r"has node one at 10\.0\.0\.9, but Ray has head"):
        hosts_of(named("one", addresses=["10.0.0.9"]), NODES, 1.0)
    with pytest.raises(LaunchError, match=r"nodes head and other of .* are both Ray's node head \(10\.0\.0\.1\)"):
        hosts_of(named("head", "other", addresses=["10.0.0.1", "10.0.0.1"]), NODES, 1.0)


def test_cpus_are_those_that_ray_can_count() -> None:
    assert RaySettings(kind="ray", cpus=0.5).cpus == 0.5
    with pytest.raises((DocumentError, ValueError), match=r"got 1\.33; Ray allows fractions below 1, or whole numbers"):
        RaySettings(kind="ray", cpus=1.33)


def test_a_node_of_ray_may_have_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "::1"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    worker = ray_cluster.WorkerHost()
    address = worker.listen("key")
    with worker._listener, socket.create_connection(address) as connection:
        assert connection.getpeername()[:2] == address


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "local", "10.0.0.1"])
def test_other_addresses_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", exc_type=ImportError, reason="Ray is not installed")
    with pytest.raises(LaunchError, match=rf"launch\.address: got '{address}'; allowed: HOST:PORT"), connected(address):
        pass
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(LaunchError, match=rf"RAY_ADDRESS: got '{address}'; allowed: HOST:PORT"), connected(None):
        pass


@pytest.mark.slow
def test_a_second_cluster_is_refused(ray_cluster_of_two: str) -> None:
    with connected(None):
        with connected(ray_cluster_of_two):
            pass
        with (
            pytest.raises(LaunchError, match=r"got '192\.0\.2\.77:1', but .* connected to .*"),
            connected("192.0.2.77:1"),
        ):
            pass


def named(*names: str, addresses: Sequence[str] = ()) -> ClusterSpec:
    nodes = [{"name": name} for name in names]
    for node, address in zip(nodes, addresses, strict=False):
        node["address"] = address
    links = [{"a": name, "b": "switch"} for name in names]
    document = {"format": ClusterSpec.FORMAT, "name": "mine", "nodes": nodes, "switches": ["switch"], "links": links}
    return ClusterSpec.from_dict(document)


def test_a_cluster_is_needed_and_ray_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DocumentError, match=r"^cluster: missing; launch=ray needs one"), open_launch(None):
        pass
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(MissingPackageError, match=r'^launch=ray needs ray, .*"\.\[ray\]" in a checkout'),
        open_launch(ClusterSpec.uniform(nodes=1)),
    ):
        pass


def open_launch(cluster: ClusterSpec | None) -> Any:
    return RaySettings(kind="ray").open(cluster)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a Ray cluster of two nodes, both on this machine."""
    pytest.importorskip("ray", exc_type=ImportError, reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 2, "object_store_memory": 100_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture
def ray_cluster_of_two(address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("LOCAL_RANK", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    return address


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def wait_until(over: Any) -> None:
    for _ in range(100):
        if over():
            return
        time.sleep(0.2)
    raise AssertionError("not over within 20 s")


@pytest.mark.slow
def test_a_pool_on_the_nodes_of_ray(ray_cluster_of_two: str, new_interpreters: None) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        open_launch(ClusterSpec.uniform(nodes=2)) as launch,
        WorkerPool(2, launch, timeout=120.0, extra_paths=[HERE]) as pool,
    ):
        assert signal.getsignal(signal.SIGTERM) is before
        assert pool.run(worker_calls.sum_of_ranks) == [1.0, 1.0]
        with pytest.raises(WorkerError, match="rank 1 raised ValueError: no luck on 1"):
            pool.run(worker_calls.fail_on, rank=1)
        pids = pool.run(os.getpid)
        assert not set(pids) & set(pool.pids)
        assert len({_parent(pid) for pid in pids}) == 2  # each has an actor of its own
        pool.close()
        wait_until(lambda: ended(pids))
        with WorkerPool(2, launch, timeout=120.0, extra_paths=[HERE]) as again:  # as after a crash, on the same CPUs
            os.kill(again.run(os.getpid)[1], signal.SIGKILL)
            with pytest.raises(WorkerError, match="rank 1 died"):
                again.run(worker_calls.sum_of_ranks)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(ray_cluster_of_two: str, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal\n"
        "from lightning_autosync.cluster import ClusterSpec\n"
        "from lightning_autosync.measure.launches.settings import RaySettings\n"
        "from lightning_autosync.measure.workers import WorkerPool\n"
        "with RaySettings(kind='ray').open(ClusterSpec.uniform(nodes=2)) as launch:\n"
        "    pool = WorkerPool(2, launch, timeout=120.0)\n"
        "    print(*pool.run(os.getpid), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], env={**os.environ, **paths}, capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: ended(pids))


@pytest.mark.slow
def test_a_connection_without_the_key_gets_no_worker(ray_cluster_of_two: str) -> None:
    with connected(None) as ray, ExitStack() as opened:
        actor = ray.remote(ray_cluster.WorkerHost).options(runtime_env={"env_vars": _paths()}).remote()
        host, port = ray.get(actor.listen.remote("key"), timeout=60)
        started = actor.start.remote(["python", "-c", "print('hello')"], {})
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"yekt")
            assert stranger.recv(10) == b""
        talk, errors, status = (opened.enter_context(socket.create_connection((host, port))) for _ in range(3))
        talk.sendall(b"keyt")
        errors.sendall(b"keye")
        status.sendall(b"keys")
        assert talk.makefile("rb").readline() == b"hello\n"
        assert status.makefile("rb").read() == b"0"
        assert ray.get(started, timeout=30) > 0
        ray.kill(actor)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("exit(3)", 3, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("nul \0", 1, "was not started: ValueError: embedded null byte"),
    ],
)
def test_the_relay_ends_as_its_worker_does(ray_cluster_of_two: str, code: str, status: int, message: str) -> None:
    with connected(None) as ray, closing(RayLaunch(ray, ClusterSpec.uniform(nodes=1))) as launch:
        command, environment = launch.command(0, ["python", "-c", code], _paths())
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == status
        assert message in done.stderr


@pytest.mark.slow
def test_children_of_workers_end_with_the_pool(ray_cluster_of_two: str) -> None:
    sleep = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); sys.stdin.read()"
    with connected(None) as ray, closing(RayLaunch(ray, ClusterSpec.uniform(nodes=1))) as launch:
        command, environment = launch.command(0, ["python", "-c", sleep], _paths())
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as local:
            assert local.stdout is not None
            child = int(local.stdout.readline())
            assert not ended([child])
            local.kill()
    wait_until(lambda: ended([child]))


def test_a_relay_that_cannot_connect_says_where() -> None:
    command = [sys.executable, relay.__file__, "127.0.0.1", "1"]
    done = subprocess.run(command, env={relay.KEY: "key"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"launch=ray: no connection .* 127\.0\.0\.1:1: .*refused; allowed: .*\n", done.stderr)


def _paths() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["bench", "tune"])
def test_verbs_run_on_ray(verb: str, ray_cluster_of_two: str, tmp_path: Path) -> None:
    cluster = tmp_path / "two.yaml"
    ClusterSpec.uniform(nodes=2, bandwidth="1 Gbit/s", latency="50 us").save(cluster)
    line = [*SMALL, f"cluster={cluster}", "launch=ray", f"hydra.run.dir={tmp_path / 'run'}"]
    if verb == "bench":
        line += ["contenders=native"]
    else:
        line += ["search.budget=2", "search.baselines=false", "prediction_seconds=0", "trial.min_steps=2"]
    command = [sys.executable, "-m", "lightning_autosync.cli", verb, *line]
    done = subprocess.run(command, env={**os.environ, **_paths()}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["format"].startswith({"bench": "autosync-bench", "tune": "autosync-tuning"}[verb])


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", exc_type=ImportError, reason="Ray is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(LaunchError, match=r"^launch=ray: no Ray cluster answers at .*; start one by `ray start --head`"),
        connected("127.0.0.1:1"),
    ):
        pass


def test_causes_of_failures_are_one_line() -> None:
    exceptions = pytest.importorskip("ray.exceptions", exc_type=ImportError, reason="Ray is not installed")
    failed = exceptions.RayTaskError("listen", "Traceback ...\n", ExchangeError("no port is free from 1 to 2"))
    assert ray_cluster._cause(failed) == "ExchangeError: no port is free from 1 to 2"
    versions = "Version mismatch: The cluster was started with:\n    Ray: 2.59\n    Python: 3.11\n"
    assert ray_cluster._cause(RuntimeError(versions)).endswith("was started with: Ray: 2.59 Python: 3.11")
    died = "The actor died in its creation:\n  File 'x.py', line 1\nModuleNotFoundError: No module named 'x'\n"
    assert ray_cluster._cause(RuntimeError(died)) == "ModuleNotFoundError: No module named 'x'"


def test_the_launch_has_a_rank_for_each_device() -> None:
    class Ray:
        @staticmethod
        def nodes() -> list[dict[str, Any]]:
            names = ("NodeID", "NodeManagerAddress", "NodeManagerHostname")
            known = [dict(zip(names, (one.id, one.address, one.host), strict=True)) for one in NODES]
            return [{**one, "Alive": True, "Resources": {"CPU": 4.0}} for one in (known[1], known[0])]

    assert [ray_cluster._order(one) for one in ("10.0.0.2", "10.0.0.10")] == sorted(
        ray_cluster._order(one) for one in ("10.0.0.10", "10.0.0.2")
    )
    launch = RayLaunch(Ray, ClusterSpec.uniform(nodes=2, devices=2))
    assert launch.world_size == 4
    assert launch.address == "10.0.0.1"
    assert launch.environment(3) == {"LOCAL_RANK": "1", "GROUP_RANK": "1"}

"""Emulated links: rates, routes, isolation, and that nothing is ever left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.workers import EmulatedLaunch, LaunchError, WorkerError, WorkerPool, check, netns
from lightning_autosync.workers.link_check import check_links

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(UNABLE), reason=UNABLE)]

HERE = Path(__file__).parent
MEGABIT = 1e6 / 8
FRAMING = 1514 / 1448


def own_namespaces(pid: int | None = None) -> list[str]:
    return [name for name in netns.list_namespaces() if name.startswith(f"as{pid or os.getpid()}-")]


def wait_until_none_of(pid: int) -> list[str]:
    deadline = time.monotonic() + 5.0
    while (left := own_namespaces(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def least_seconds(pool: WorkerPool, pairs: list[list[int]], amount: int, tries: int = 3) -> float:
    """Seconds until the last pair is done, in the try that other load disturbed least."""
    return min(max(pool.run("worker_calls:send_in_pairs", pairs=pairs, amount=amount)) for _ in range(tries))


def line_of_three() -> ClusterSpec:
    """Nodes cabled one to the next, no switch: the middle one forwards."""
    return ClusterSpec.from_dict(
        {
            "format": "autosync-cluster/1",
            "name": "line",
            "nodes": [{"name": name} for name in ("left", "middle", "right")],
            "links": [
                {"a": "left", "b": "middle", "bandwidth": "300 Mbit/s", "reverse_bandwidth": "100 Mbit/s"},
                {"a": "middle", "b": "right", "bandwidth": "200 Mbit/s"},
            ],
        }
    )


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterSpec.star([400 * MEGABIT, 100 * MEGABIT, 20 * MEGABIT]),
        ClusterSpec.racks(2, 2, bandwidth=200 * MEGABIT, uplink=100 * MEGABIT),
        line_of_three(),
    ],
    ids=lambda cluster: cluster.name,
)
def test_every_link_has_its_rate(cluster):
    with EmulatedLaunch(cluster) as launch:
        checks = check_links(launch)
    settings = [rate for link in cluster.links for rate in (link.bandwidth, link.reverse_bandwidth)]
    assert [check.setting for check in checks] == settings
    assert {f"{check.source} {check.target}": check.deviation for check in checks} == {
        f"{check.source} {check.target}": pytest.approx(0, abs=0.1) for check in checks
    }


def test_ranks_share_the_link_between_racks():
    cluster = ClusterSpec.racks(2, 2, bandwidth=400 * MEGABIT, uplink=100 * MEGABIT)
    amount = 2_000_000
    with (
        EmulatedLaunch(cluster) as launch,
        WorkerPool(4, launch, extra_paths=[HERE], scheduling="batch") as pool,
    ):
        assert pool.run("worker_calls:sum_of_ranks") == [6.0] * 4
        inside = least_seconds(pool, [[0, 1], [2, 3]], amount)
        across = least_seconds(pool, [[0, 2], [1, 3]], amount)
    assert inside == pytest.approx(FRAMING * amount / (400 * MEGABIT), rel=0.25)
    assert across == pytest.approx(FRAMING * 2 * amount / (100 * MEGABIT), rel=0.15)


def test_nodes_forward_and_ranks_of_a_node_share_it():
    cluster = line_of_three()
    nodes = [node.model_copy(update={"devices": 2 if node.name == "right" else 1}) for node in cluster.nodes]
    cluster = cluster.model_copy(update={"nodes": tuple(nodes)})
    with EmulatedLaunch(cluster) as launch, WorkerPool(4, launch, extra_paths=[HERE]) as pool:
        assert pool.run("worker_calls:sum_of_ranks", elements=10_000) == [6.0] * 4
        places = pool.run("worker_calls:place")
    assert [(place["LOCAL_RANK"], place["GROUP_RANK"]) for place in places] == [
        ("0", "0"),
        ("0", "1"),
        ("0", "2"),
        ("1", "2"),
    ]
    assert len({place["namespace"] for place in places}) == 3
    assert {place["congestion_control"] for place in places} == {"reno"}


def test_the_kernel_routes_by_sender_where_the_topology_does(diamond):
    with EmulatedLaunch(diamond) as launch:
        network, middle = launch.network, launch.namespaces[3]
        taken = {}
        for node, link in ((0, "link0"), (1, "link1")):
            command = ["ip", "-n", middle, "route", "get", network.address(2)]
            command += ["from", network.address(node), "iif", link]
            taken[node] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "dev link2" in taken[0]
    assert "dev link4" in taken[1]


def test_two_at_once_do_not_meet():
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    slow = EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=50 * MEGABIT))
    with slow, EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=200 * MEGABIT)) as fast:
        assert not set(slow.namespaces) & set(fast.namespaces)
        assert [check.deviation for check in check_links(slow)] == [pytest.approx(0, abs=0.1)] * 4
        slow.close()
        assert [check.deviation for check in check_links(fast)] == [pytest.approx(0, abs=0.1)] * 4
        assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout == before
    assert not own_namespaces()


def test_the_size_of_the_pool_must_fit():
    with (
        EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=1e6)) as launch,
        pytest.raises(LaunchError, match="made for 2 ranks, not for 3"),
    ):
        WorkerPool(3, launch)


def test_latency_is_not_promised():
    with pytest.warns(UserWarning, match="latencies up to 20 ms are not emulated"):
        EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=1e6, latency=0.02)).close()


def test_nothing_is_left_when_a_worker_is_killed():
    cluster = ClusterSpec.uniform(2, bandwidth=100 * MEGABIT)
    with EmulatedLaunch(cluster) as launch, WorkerPool(2, launch, extra_paths=[HERE]) as pool:
        with pytest.raises(WorkerError, match=r"rank 1 died \(killed by SIGKILL\)"):
            pool.run("worker_calls:die_during_all_reduce", rank=1)
        assert own_namespaces()
    assert not own_namespaces()


def test_nothing_is_left_when_set_up_fails():
    with pytest.raises(LaunchError, match="tc"):
        EmulatedLaunch(ClusterSpec.uniform(3, bandwidth=1e25))
    assert not own_namespaces()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, None])
def test_nothing_is_left_when_the_process_ends(end):
    program = textwrap.dedent(
        """
        import sys
        from lightning_autosync.cluster.spec import ClusterSpec
        from lightning_autosync.workers import EmulatedLaunch

        launch = EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=1e6))
        print("up", flush=True)
        sys.stdin.read()
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert len(own_namespaces(process.pid)) == 3
        if end is not None:
            process.send_signal(end)
    assert not wait_until_none_of(process.pid)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_left_after_fifty_emulations_with_random_kills():
    """Five at a time, each ended at a random moment of set-up, start of the workers or work, in a random way."""
    draw = random.Random(0)
    program = textwrap.dedent(
        """
        import os
        from lightning_autosync.cluster.spec import ClusterSpec
        from lightning_autosync.workers import EmulatedLaunch, WorkerPool

        with EmulatedLaunch(ClusterSpec.star([4e6, 2e6, 1e6])) as launch:
            with WorkerPool(3, launch, extra_paths=[os.environ["HERE"]]) as pool:
                while True:
                    pool.run("worker_calls:sum_of_ranks", elements=100_000)
        """
    )
    environment = {**os.environ, "HERE": str(HERE), "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    for _ in range(10):
        processes = [
            subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL)
            for _ in range(5)
        ]
        victims = [process.pid for process in processes]
        for process in draw.sample(processes, 5):
            time.sleep(draw.uniform(0.2, 3.0))
            workers = children(process.pid)
            if workers and draw.random() < 0.4:
                os.kill(draw.choice(workers), signal.SIGKILL)
            else:
                process.send_signal(draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
        for process in processes:
            assert process.wait(60) != 0
        for pid in victims:
            assert not wait_until_none_of(pid)
    assert not orphans("lightning_autosync.workers")


def children(pid: int) -> list[int]:
    """Worker processes of a process."""
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", "workers.worker"], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def orphans(name: str) -> list[str]:
    """Processes of that name whose parent has ended."""
    deadline = time.monotonic() + 5.0
    while True:
        table = subprocess.run(["ps", "-eo", "ppid,pid,args"], capture_output=True, text=True, check=True).stdout
        found = [line for line in table.splitlines() if name in line and line.split()[0] == "1"]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def test_leftovers_of_dead_processes_are_removed_and_others_kept():
    with subprocess.Popen(["true"]) as process:
        pass
    stale = f"as{process.pid}-0-0"
    subprocess.run(["ip", "netns", "add", stale], check=True)
    with EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=1e6)) as launch:
        assert stale in netns.remove_stale()
        assert own_namespaces() == sorted(launch.namespaces)
    assert stale not in netns.list_namespaces()


def test_the_check_prints_a_table(capsys, tmp_path):
    path = tmp_path / "pair.yaml"
    ClusterSpec.star([100 * MEGABIT, 50 * MEGABIT], name="pair").save(path)
    assert check.main([f"cluster={path}"]) == 0
    text = capsys.readouterr().out
    assert "pair: emulated links" in text
    assert text.count("100.0") >= 2
    assert text.count("50.0") >= 2


def test_the_check_tells_what_is_wrong(capsys):
    assert check.main(["cluster=no_such_cluster"]) == 2
    assert "no_such_cluster" in capsys.readouterr().err

"""Emulated links: rates, latencies, routes, isolation, and that nothing is ever left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worker_calls
from sweeps import sweep

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.measure.emulation import check, netns
from lightning_autosync.measure.emulation.check import check_links
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.launches.launch import LocalLaunch
from lightning_autosync.measure.workers import LaunchError, WorkerError, WorkerPool

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


def wait_while(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What a look finds once it finds nothing; or what it still finds after so many seconds."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def own_links() -> str:
    """The network devices of the machine itself."""
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout


def processes_with(file: str, entry: str) -> list[str]:
    """The ids of the processes of which ``/proc/PID/FILE`` has an entry that begins so."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            entries = (place / file).read_bytes().split(b"\0")
            if any(other.startswith(entry.encode()) for other in entries):
                found.append(place.name)
    return found


def processes_marked(mark: str) -> list[str]:
    """Those that live with a mark in their environment, whatever their parents are: workers, janitors, `ip`."""
    return processes_with("environ", f"MARK={mark}")


def children(pid: int, pattern: str) -> list[int]:
    """The ids of a process's children whose command lines match."""
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", pattern], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


@contextmanager
def marked_programs(mark: str, program: str, count: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Python programs of which every descendant has the mark."""
    environment = {
        **os.environ,
        "MARK": mark,
        "HERE": str(HERE),
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            with process:
                process.kill()


def least_seconds(pool: WorkerPool, pairs: list[list[int]], amount: int, tries: int = 3) -> float:
    """Seconds until the last pair is done, in the try that other load disturbed least."""
    return min(max(pool.run(worker_calls.send_in_pairs, pairs=pairs, amount=amount)) for _ in range(tries))


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
        pytest.param(ClusterSpec.star([400 * MEGABIT, 100 * MEGABIT, 20 * MEGABIT]), marks=pytest.mark.slow),
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


@pytest.mark.slow
def test_ranks_share_the_link_between_racks():
    cluster = ClusterSpec.racks(2, 2, bandwidth=400 * MEGABIT, uplink=100 * MEGABIT)
    amount = 2_000_000
    with (
        EmulatedLaunch(cluster) as launch,
        WorkerPool(4, launch, extra_paths=[HERE], scheduling="batch") as pool,
    ):
        assert pool.run(worker_calls.sum_of_ranks) == [6.0] * 4
        inside = least_seconds(pool, [[0, 1], [2, 3]], amount)
        across = least_seconds(pool, [[0, 2], [1, 3]], amount)
    assert inside == pytest.approx(FRAMING * amount / (400 * MEGABIT), rel=0.25)
    assert across == pytest.approx(FRAMING * 2 * amount / (100 * MEGABIT), rel=0.15)


@pytest.mark.slow
def test_nodes_forward_and_ranks_of_a_node_share_it():
    cluster = line_of_three()
    nodes = [node.model_copy(update={"devices": 2 if node.name == "right" else 1}) for node in cluster.nodes]
    cluster = cluster.model_copy(update={"nodes": tuple(nodes)})
    with EmulatedLaunch(cluster) as launch, WorkerPool(4, launch, extra_paths=[HERE]) as pool:
        assert pool.run(worker_calls.sum_of_ranks, elements=10_000) == [6.0] * 4
        places = pool.run(worker_calls.place)
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


@pytest.mark.slow
def test_two_at_once_do_not_meet():
    before = own_links()
    slow = EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=50 * MEGABIT))
    with slow, EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=200 * MEGABIT)) as fast:
        assert not set(slow.namespaces) & set(fast.namespaces)
        assert [check.deviation for check in check_links(slow)] == [pytest.approx(0, abs=0.1)] * 4
        slow.close()
        assert [check.deviation for check in check_links(fast)] == [pytest.approx(0, abs=0.1)] * 4
        assert own_links() == before
    assert not own_namespaces()


def test_the_size_of_the_pool_must_fit():
    with (
        EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=1e6)) as launch,
        pytest.raises(LaunchError, match="for 2 ranks, but the pool has 3"),
    ):
        WorkerPool(3, launch)


@pytest.mark.slow
def test_a_latency_delays_each_way_and_leaves_the_rate():
    before = own_links()
    with EmulatedLaunch(ClusterSpec.star(["100 Mbit/s", "20 Mbit/s"], latency="20 ms")) as launch:
        checks = check_links(launch)
        with WorkerPool(2, launch, extra_paths=[HERE]) as pool:
            trip = pool.run(worker_calls.round_trip)[0]
    assert [one.latency for one in checks] == [0.02] * 4
    assert all(0.02 <= one.delay < 0.06 for one in checks)
    assert [one.deviation for one in checks] == [pytest.approx(0, abs=0.1)] * 4
    assert 4 * 0.02 <= trip < 40 * 0.02  # two links each way; gloo's receiver also says that it is ready
    assert not own_namespaces()
    assert own_links() == before


def test_a_latency_below_the_noise_is_left_out():
    with EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=50 * MEGABIT, latency="1 ms")) as launch:
        devices = subprocess.run(
            ["ip", "-n", launch.namespaces[0], "-d", "link", "show", "link0"], capture_output=True, text=True
        ).stdout
    assert "veth" in devices


def test_a_relay_that_dies_is_told(monkeypatch):
    monkeypatch.setattr(netns, "has_netem", lambda namespace: False)
    launch = EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=1e6, latency="20 ms"))
    (process,) = children(os.getpid(), "emulation/relay.py")
    assert launch.relays == [process]
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    with pytest.warns(UserWarning, match="the process that delays packets ended early"):
        launch.close()
    assert not own_namespaces()


@pytest.mark.slow
def test_nothing_is_left_when_a_worker_is_killed():
    cluster = ClusterSpec.uniform(2, bandwidth=100 * MEGABIT)
    with EmulatedLaunch(cluster) as launch, WorkerPool(2, launch, extra_paths=[HERE]) as pool:
        with pytest.raises(WorkerError, match=r"rank 1 died \(killed by SIGKILL\)"):
            pool.run(worker_calls.die_during_all_reduce, rank=1)
        assert own_namespaces()
    assert not own_namespaces()


def test_nothing_is_left_when_set_up_fails():
    with pytest.raises(LaunchError, match="tc"):
        EmulatedLaunch(ClusterSpec.uniform(3, bandwidth=1e-3))
    assert not own_namespaces()


@pytest.mark.parametrize("end", sweep([signal.SIGINT, signal.SIGTERM, None, signal.SIGKILL], [signal.SIGKILL]))
def test_nothing_is_left_when_the_process_ends(end):
    program = """
        import signal, sys
        from lightning_autosync.cluster.spec import ClusterSpec
        from lightning_autosync.measure.emulation import netns
        from lightning_autosync.measure.emulation.launch import EmulatedLaunch

        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have
        netns.has_netem = lambda namespace: False
        launch = EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=1e6, latency="20 ms"))
        print("up", flush=True)
        sys.stdin.read()
    """
    before, mark = own_links(), f"{os.getpid()} {end}."
    with marked_programs(mark, program) as (process,):
        assert process.stdout.readline() == b"up\n"
        assert len(own_namespaces(process.pid)) == 3
        assert len(children(process.pid, "emulation/relay.py")) == 1
        if end is None:
            process.stdin.close()
        else:
            process.send_signal(end)
        process.wait(60)
        assert not wait_while(lambda: own_namespaces(process.pid))
    assert not wait_while(lambda: processes_marked(mark))
    assert own_links() == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_left_after_fifty_emulations_with_random_kills():
    """Five at a time, each ended at a random moment of set-up, start of the workers or work, in a random way."""
    draw = random.Random(0)
    program = """
        import os, signal
        from lightning_autosync.cluster.spec import ClusterSpec
        from lightning_autosync.measure.workers import WorkerPool
        from lightning_autosync.measure.emulation.launch import EmulatedLaunch

        signal.signal(signal.SIGINT, signal.default_int_handler)
        with EmulatedLaunch(ClusterSpec.star([4e6, 2e6, 1e6], latency="2 ms")) as launch:
            with WorkerPool(3, launch, extra_paths=[os.environ["HERE"]]) as pool:
                while True:
                    pool.run(worker_calls.sum_of_ranks, elements=100_000)
    """
    before = own_links()
    for turn in range(10):
        mark = f"{os.getpid()} turn {turn}."
        with marked_programs(mark, program, count=5) as processes:
            for process in draw.sample(processes, 5):
                assert not wait_while(lambda pid=process.pid: not own_namespaces(pid), 300.0), "no emulation was begun"
                time.sleep(draw.uniform(0.0, 3.0))
                end_somehow(process, draw)
            for process in processes:
                assert process.wait(60) != 0
            for process in processes:
                assert not wait_while(lambda pid=process.pid: own_namespaces(pid))
        assert not wait_while(lambda mark=mark: processes_marked(mark))
    assert own_links() == before


def end_somehow(process: subprocess.Popen[bytes], draw: random.Random) -> None:
    """Kill one of its workers, or end the process itself."""
    workers = children(process.pid, "workers.worker")
    if workers and draw.random() < 0.4:
        os.kill(draw.choice(workers), signal.SIGKILL)
    else:
        process.send_signal(draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))


@pytest.fixture
def undeletable() -> Iterator[str]:
    """The name of a namespace of this process which is a folder, so that `ip` fails to delete it."""
    name = netns.namespace_name(999, 0)
    folder = netns.DIRECTORY / name
    folder.mkdir(parents=True)
    yield name
    for path in netns.DIRECTORY.glob(f"as{os.getpid()}-*"):
        if path.is_dir():
            path.rmdir()


def janitors() -> list[str]:
    """Of this process's emulations, and each `ip` that one runs: they have the names of its namespaces as arguments."""
    return processes_with("cmdline", f"as{os.getpid()}-")


@pytest.mark.slow
def test_a_namespace_that_cannot_be_deleted_is_told_and_tried_again(undeletable):
    subprocess.run(["ip", "netns", "add", netns.namespace_name(999, 1)], check=True)
    assert netns.delete([undeletable, netns.namespace_name(999, 1), "as0-0-0"]) == [undeletable]
    launch = EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=1e6))
    stubborn = launch.namespaces[1]
    netns.delete([stubborn])
    (netns.DIRECTORY / stubborn).mkdir()
    with pytest.warns(UserWarning, match=rf"{stubborn} cannot be deleted; a background process keeps trying"):
        launch.close()
    assert own_namespaces() == sorted([stubborn, undeletable])
    assert janitors()
    (netns.DIRECTORY / stubborn).rmdir()
    subprocess.run(["ip", "netns", "add", stubborn], check=True)
    assert not wait_while(lambda: stubborn in own_namespaces())
    assert not wait_while(janitors)


@pytest.mark.slow
def test_the_janitor_goes_on_as_long_as_it_finds_something(undeletable):
    janitor = netns.Janitor([undeletable])
    janitor.release()
    time.sleep(4.5)  # it looks once a second, and would end after three looks that find nothing
    assert janitors()
    (netns.DIRECTORY / undeletable).rmdir()
    subprocess.run(["ip", "netns", "add", undeletable], check=True)
    assert not wait_while(own_namespaces)
    assert not wait_while(janitors)


def test_leftovers_of_dead_processes_are_removed_and_others_kept():
    with subprocess.Popen(["true"]) as process:
        pass
    stale, alive = f"as{process.pid}-0-0", f"as{os.getppid()}-999-0"
    predecessors = f"as{os.getpid()}-999-0"  # of a process that had this one's number
    pair = ClusterSpec.uniform(2, bandwidth=1e6)
    with EmulatedLaunch(pair) as earlier:
        for name in (stale, alive, predecessors):
            subprocess.run(["ip", "netns", "add", name], check=True)
        with EmulatedLaunch(pair) as launch:
            assert not {stale, predecessors} & set(netns.list_namespaces())
            assert set(netns.list_namespaces()) >= {alive, *launch.namespaces, *earlier.namespaces}
    assert netns.delete([alive]) == []


@pytest.mark.slow
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


def test_the_check_takes_a_scaled_cluster(capsys, tmp_path):
    path = tmp_path / "pair.yaml"
    ClusterSpec.star([1000 * MEGABIT, 500 * MEGABIT], name="pair").save(path)
    assert check.main([f"cluster={path}", "cluster_scale=0.1"]) == 0
    assert capsys.readouterr().out.count("50.0") >= 2
    assert check.main([f"cluster={path}", "cluster_scale=fast"]) == 2
    assert "cluster_scale: 'fast': expected a factor above 0" in capsys.readouterr().err


def test_links_that_are_off_give_a_warning(monkeypatch, recwarn):
    with EmulatedLaunch(ClusterSpec.uniform(2, bandwidth=50 * MEGABIT, name="pair")) as launch:
        right = check.measured_links(launch)
        assert not recwarn
        assert [link.setting for link in right] == [50 * MEGABIT] * 4
        assert check.measured_links(LocalLaunch()) == []
        off = [replace(right[0], measured=0.5 * right[0].setting), *right[1:]]
        monkeypatch.setattr(check, "check_links", lambda launch: off)
        with pytest.warns(UserWarning, match=r"cluster 'pair': 1 emulated links deviate .*by -50%"):
            assert check.measured_links(launch) == off

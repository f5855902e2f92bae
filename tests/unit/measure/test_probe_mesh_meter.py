"""What a job's brief survey decides: one process stands for all, and ideal links for the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.errors import ExchangeError
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.probe import mesh_meter, quick
from lightning_autosync.measure.probe.mesh_meter import MeshMeter
from lightning_autosync.measure.probe.meter import Meter
from lightning_autosync.measure.probe.quick import compare_with_job, survey_job
from lightning_autosync.measure.probe.survey import FairCluster, take_survey
from lightning_autosync.strategy.tuning.proposals import find_links

LATENCY = 30e-6
ROUND = 0.1
"""Seconds of the collectives around slots."""

MakeMeter = Callable[..., "IdealMesh"]


class IdealMesh(MeshMeter):
    """Its flows are max-min fair, and its clock is what the slots take."""

    cluster: ClusterSpec
    slots: list[int]
    now = 0.0
    fault = ""

    def elapsed(self) -> float:
        return self.now

    def _connect(self, flows):
        if self.fault:
            raise ExchangeError(self.fault)
        return {}

    def _agree(self, fault, keys, own):
        self._elapsed = self.now
        if fault:
            raise LaunchError(f"rank 0: {fault}")
        return dict.fromkeys(keys, 2 * LATENCY)

    def _run_all(self, sets, factor):
        self.slots.append(len(sets))
        self.now += ROUND + sum(sum(self._times(flows, factor)) for flows in sets)
        self._elapsed = self.now
        fair = FairCluster(self.cluster)
        return [dict(zip(sorted(flows), fair.rates(sorted(flows)), strict=True)) for flows in sets]

    def pace(self, node):
        self.now += 0.2
        return self.cluster.links[node].bandwidth


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[MakeMeter]:
    """Makes meters of clusters in a process group of this process alone."""

    def make(cluster: ClusterSpec, limit: float = 10.0, fault: str = "") -> IdealMesh:
        def start(self, head, window, timeout):
            self._head, self._window, self._timeout = head, window, timeout
            self.rank, self.transfers, self.machines, self.slots = 0, 0, 1, []
            self.nodes = [list(cluster.ranks_of(node)) for node in range(len(cluster.nodes))]
            self.hosts = [node.name for node in cluster.nodes]
            self.addresses = [f"10.0.0.{node}" for node in range(len(cluster.nodes))]

        monkeypatch.setattr(Meter, "__init__", start)
        meter = IdealMesh(60.0, limit)
        meter.cluster, meter.fault = cluster, fault
        monkeypatch.setattr(quick, "MeshMeter", lambda *_: meter)
        return meter

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["two_nodes_of_four", "four_equal", "fat_node_star", "two_racks_2to1", "autosync_a_8"])
def test_links_are_found_in_a_second_a_node(mesh: MakeMeter, name: str) -> None:
    truth = resolve_cluster(name)
    meter = mesh(truth)
    found = survey_job(60.0)
    assert found.fault is None
    assert found.cluster.measured
    assert found.cluster.rank_nodes == truth.rank_nodes
    everybody = [(i, j) for i in range(len(truth.nodes)) for j in range(len(truth.nodes)) if i != j]
    assert FairCluster(found.cluster).rates(everybody) == pytest.approx(FairCluster(truth).rates(everybody), rel=1e-3)
    assert found.seconds == meter.now < len(truth.nodes)


def test_opposite_sets_share_a_slot_and_nothing_is_measured_twice(mesh: MakeMeter) -> None:
    meter = mesh(resolve_cluster("four_equal"))
    with meter.connected():
        take_survey(meter, 4, every_pair=None)
        assert meter.slots[:2] == [1, 4]
        slots = sum(meter.slots)
        take_survey(meter, 4, every_pair=None)
        assert sum(meter.slots) == slots


def test_latencies_are_halves_of_round_trips(mesh: MakeMeter) -> None:
    mesh(resolve_cluster("four_equal"))
    assert [link.latency for link in survey_job(60.0).cluster.links] == pytest.approx([LATENCY / 2] * 4, rel=1e-3)


def test_one_node_is_not_measured(mesh: MakeMeter) -> None:
    meter = mesh(resolve_cluster("one_node"))
    found = survey_job(60.0)
    assert (found.fault, found.cluster.links, meter.now) == (None, (), 0.0)
    assert [node.devices for node in found.cluster.nodes] == [2]


def test_too_many_nodes_are_told_before_anything_is_measured(mesh: MakeMeter) -> None:
    meter = mesh(ClusterSpec.uniform(64, bandwidth="1 Gbit/s"))
    found = survey_job(60.0)
    assert found.fault == "links of 64 nodes take 13.3 s or more to measure, the limit is 10 s"
    assert not found.cluster.measured
    assert found.cluster.world_size == 64
    assert meter.now == 0.0


def test_slow_links_are_told_as_soon_as_they_are_known(mesh: MakeMeter) -> None:
    meter = mesh(ClusterSpec.uniform(4, bandwidth="1 Mbit/s"))
    found = survey_job(60.0)
    assert "links of 4 nodes take" in found.fault
    assert not found.cluster.measured
    assert meter.now < 1.0


def test_a_fault_of_a_rank_leaves_the_hosts(mesh: MakeMeter) -> None:
    mesh(resolve_cluster("four_equal"), fault="rank 1 cannot be reached")
    found = survey_job(60.0)
    assert found.fault == "rank 0: rank 1 cannot be reached"
    assert [node.address for node in found.cluster.nodes] == [f"10.0.0.{node}" for node in range(4)]


def test_a_node_that_stops_for_a_moment_costs_the_rates_and_not_the_job(mesh: MakeMeter) -> None:
    meter = mesh(resolve_cluster("four_equal"))
    run, meter._widen = meter._run_all, lambda: None  # the first measurement was well
    meter._run_all = lambda sets, factor: [
        {flow: rate * (2 not in flow) for flow, rate in rates.items()} for rates in run(sets, factor)
    ]
    found = survey_job(60.0)
    assert found.fault.startswith("rates were measured that do not fit each other: ")
    assert not found.cluster.measured
    assert len(found.cluster.nodes) == 4


def test_an_error_of_rank_0_between_measurements_is_told_to_all(mesh: MakeMeter, monkeypatch) -> None:
    mesh(resolve_cluster("four_equal"))
    told: list = []
    monkeypatch.setattr(mesh_meter, "broadcast_json", lambda data: told.append(data) or data)
    monkeypatch.setattr(quick, "take_survey", lambda *_, **__: {}["missing"])
    assert survey_job(60.0).fault == "KeyError on rank 0: 'missing'"
    assert told == [{"fault": "KeyError on rank 0: 'missing'"}]


def test_what_only_confirms_is_left_out_where_time_is_short(mesh: MakeMeter) -> None:
    meter = mesh(resolve_cluster("two_racks_2to1"), limit=2.9)
    found = survey_job(60.0)
    assert found.fault is None
    assert meter.now < 2.9
    assert len(found.cluster.switches) == 2


def test_what_is_needed_for_racks_is_not_left_out(mesh: MakeMeter) -> None:
    meter = mesh(resolve_cluster("two_racks_2to1"), limit=2.5)
    found = survey_job(60.0)
    assert found.fault is not None
    assert meter.now < 2.5


@pytest.mark.parametrize("name", ["two_nodes_of_four", "four_equal", "fat_node_star", "two_racks_2to1", "autosync_a_8"])
def test_a_description_that_fits_takes_one_measurement_of_half_a_second(mesh: MakeMeter, name: str) -> None:
    meter = mesh(resolve_cluster(name))
    assert compare_with_job(resolve_cluster(name), 60.0) == []
    assert meter.slots == [1]
    assert meter.now < 0.6


def test_a_link_that_is_slower_than_described_is_named(mesh: MakeMeter) -> None:
    meter = mesh(ClusterSpec.star(["400 Mbit/s", "110 Mbit/s", "400 Mbit/s"]))
    assert compare_with_job(ClusterSpec.star(["400 Mbit/s"] * 3), 60.0) == [
        "link node1 > switch: described as 400 Mbit/s, measured 110 Mbit/s",
        "link switch > node1: described as 400 Mbit/s, measured 110 Mbit/s",
    ]
    assert meter.now < 2.0


def test_so_is_one_that_is_faster(mesh: MakeMeter) -> None:
    mesh(ClusterSpec.star(["400 Mbit/s"] * 3))
    found = compare_with_job(ClusterSpec.star(["400 Mbit/s", "400 Mbit/s", "100 Mbit/s"]), 60.0)
    assert "link node2 > switch: described as 100 Mbit/s, measured 400 Mbit/s" in found


def test_an_uplink_that_is_slower_than_described_is_named_and_not_its_nodes(mesh: MakeMeter) -> None:
    described, truth = (ClusterSpec.racks(2, 3, bandwidth="400 Mbit/s", uplink=rate) for rate in (50e6, 25e6))
    meter = mesh(truth)
    ends = [link for link in described.links if not {link.a, link.b} & {node.name for node in described.nodes}]
    ways = [way for link in ends for way in (f"{link.a} > {link.b}", f"{link.b} > {link.a}")]
    assert compare_with_job(described, 60.0) == [
        f"link {way}: described as 400 Mbit/s, measured 200 Mbit/s" for way in ways
    ]
    assert meter.now < 1.5


def test_a_slow_node_in_a_rack_is_named_and_not_its_uplink(mesh: MakeMeter) -> None:
    described = ClusterSpec.racks(2, 2, bandwidth="400 Mbit/s", uplink="480 Mbit/s")
    links = [
        link.model_copy(update={"bandwidth": 5e6, "reverse_bandwidth": 5e6}) if "node0" in (link.a, link.b) else link
        for link in described.links
    ]
    mesh(described.model_copy(update={"links": tuple(links)}))
    told = compare_with_job(described, 60.0)
    assert told
    assert all("link" in line and "node0" in line for line in told)


def test_two_nodes_are_named_together(mesh: MakeMeter) -> None:
    mesh(ClusterSpec.star(["1 Gbit/s", "200 Mbit/s"]))
    assert compare_with_job(ClusterSpec.star(["1 Gbit/s", "1 Gbit/s"]), 60.0) == [
        "node0 > node1: described as 1000 Mbit/s, measured 200 Mbit/s",
        "node1 > node0: described as 1000 Mbit/s, measured 200 Mbit/s",
    ]


def test_a_difference_of_a_quarter_is_not_told(mesh: MakeMeter) -> None:
    mesh(ClusterSpec.star(["400 Mbit/s", "300 Mbit/s", "500 Mbit/s"]))
    assert compare_with_job(ClusterSpec.star(["400 Mbit/s"] * 3), 60.0) == []


def test_links_faster_than_a_process_are_not_called_slow(mesh: MakeMeter) -> None:
    mesh(ClusterSpec.star(["12 Gbit/s"] * 3))
    assert compare_with_job(ClusterSpec.star(["100 Gbit/s"] * 3), 60.0) == []


def test_many_far_links_take_no_longer_than_the_limit(mesh: MakeMeter) -> None:
    meter = mesh(ClusterSpec.star(["100 Mbit/s"] * 16), limit=2.0)
    found = compare_with_job(ClusterSpec.star(["1 Gbit/s"] * 16), 60.0)
    assert "link node0 > switch: described as 1000 Mbit/s, measured 100 Mbit/s" in found
    assert meter.now < 2.0


def test_ranks_on_other_nodes_than_described_are_told_in_place_of_rates(mesh: MakeMeter) -> None:
    mesh(ClusterSpec.uniform(1, devices=2, name="seen"))
    assert compare_with_job(ClusterSpec.star(["100 Mbit/s"] * 2), 60.0) == [
        "Ranks 0, 1 run on host node0, but are described on node0 and node1"
    ]
    meter = mesh(ClusterSpec.star(["1 Gbit/s"] * 2))
    assert compare_with_job(ClusterSpec.uniform(1, devices=2), 60.0) == [
        "Ranks 0, 1 are described on node node0, but run on node0 and node1"
    ]
    meter.rank = 1
    assert compare_with_job(ClusterSpec.uniform(1, devices=2), 60.0) == []
    mesh(ClusterSpec.uniform(2, devices=2, name="seen"))
    (told,) = compare_with_job(ClusterSpec.star(["100 Mbit/s"] * 4), 60.0)
    assert told == "Ranks 0, 1 run on host node0, but are described on node0 and node1; other ranks likewise"
    assert compare_with_job(ClusterSpec.uniform(2, devices=2), 60.0) == []  # its rates are unknown
    assert meter.slots == []


def test_ranks_that_cannot_connect_are_not_compared(mesh: MakeMeter) -> None:
    mesh(ClusterSpec.star(["1 Gbit/s"] * 3), fault="rank 1 cannot be reached")
    assert compare_with_job(ClusterSpec.star(["100 Mbit/s"] * 3), 60.0) == []


def test_a_machine_without_an_id_is_refused_because_host_names_may_be_equal(
    mesh: MakeMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_autosync.measure.probe.meter.boot_id", lambda: None)
    with pytest.raises(LaunchError, match=r"^probe: rank 0 on .* cannot read /proc/sys/kernel/random/boot_id"):
        Meter(0.1, 0.1, 60.0)
    assert compare_with_job(resolve_cluster("four_equal"), 60.0) == []
    links = find_links(None, nodes=2, devices=1, probe=5.0, timeout=60.0)
    assert "boot_id" in links.describe()
    assert not links.cluster.measured

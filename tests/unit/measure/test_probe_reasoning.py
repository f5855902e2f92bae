"""The probe's reasoning on ideal links: rates shared max-min fairly, with and without TCP's unfairness."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples

from lightning_autosync.cluster import ClusterSpec, resolve_cluster, shipped_clusters
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.probe.constants import fit_constants
from lightning_autosync.measure.probe.settings import ProbeSettings
from lightning_autosync.measure.probe.shape import Hosts, make_cluster, node_names
from lightning_autosync.measure.probe.survey import FairCluster, fair_rates, find_trunks, take_survey
from lightning_autosync.measure.probe.table import settings_of
from lightning_autosync.replay import Constants

NETWORKS = [name for name in shipped_clusters() if len(resolve_cluster(name).nodes) > 1]


class FairMeter:
    """Measures what max-min fair flows would get; ``unfairness`` shifts rates among flows, their sum stays."""

    def __init__(self, cluster: ClusterSpec, unfairness: float = 0.0) -> None:
        self._cluster = cluster
        self._fair = FairCluster(cluster)
        self._unfairness = unfairness
        self._random = numpy.random.default_rng(0)
        self.transfers = 0

    def rates(self, flows, factor=1.0):
        self.transfers += 1
        rates = numpy.array(self._fair.rates(flows))
        shifted = rates * self._random.lognormal(0.0, self._unfairness, len(rates))
        return [float(rate) for rate in shifted * rates.sum() / shifted.sum()]

    def prepare(self, sets, factor=1.0):
        pass

    def pace(self, node):
        name = self._cluster.nodes[node].name
        return next(rate for link in self._cluster.links for end, rate in _ways(link) if end == name)


def _ways(link):
    return (link.a, link.bandwidth), (link.b, link.reverse_bandwidth)


def recover(cluster: ClusterSpec, unfairness: float = 0.0, every_pair: bool | None = False) -> ClusterSpec:
    nodes = range(len(cluster.nodes))
    survey = take_survey(FairMeter(cluster, unfairness), len(nodes), every_pair)
    hosts = Hosts([cluster.ranks_of(node) for node in nodes], [f"host{node}" for node in nodes])
    fair = FairCluster(cluster)
    latencies = {
        (i, j): sum(cluster.links[channel // 2].latency for channel in fair.route((i, j)))
        for i in nodes
        for j in nodes
        if i < j
    }
    return make_cluster("found", hosts, survey, latencies)


def check_recovered(found: ClusterSpec, truth: ClusterSpec) -> None:
    for link, expected in zip(found.links, settings_of(found, truth), strict=True):
        assert (link.bandwidth, link.reverse_bandwidth) == pytest.approx(expected, rel=1e-3), f"{link.a} {link.b}"
    one, other = FairCluster(found), FairCluster(truth)
    everybody = [(i, j) for i in range(len(truth.nodes)) for j in range(len(truth.nodes)) if i != j]
    assert one.rates(everybody) == pytest.approx(other.rates(everybody), rel=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_shipped_network_is_recovered(name):
    truth = resolve_cluster(name)
    found = recover(truth)
    check_recovered(found, truth)
    assert found.rank_nodes == truth.rank_nodes
    assert sum(link.latency for link in found.links) > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_a_brief_survey_recovers_every_shipped_network(name):
    truth = resolve_cluster(name)
    check_recovered(recover(truth, every_pair=None), truth)


def test_a_part_of_a_rack_makes_no_rack_if_the_rack_opposite_explains_its_rate():
    truth = resolve_cluster("two_racks_2to1")
    meter = FairMeter(truth)
    survey = take_survey(meter, 8, every_pair=False)
    survey.trunks = {}
    find_trunks(meter, survey, [(4, 5, 6), (0, 1, 2, 3)], brief=False)
    assert list(survey.trunks) == [(0, 1, 2, 3)]


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "ring_of_four"])
def test_unfair_shares_do_not_hide_the_switches(name):
    check_recovered(recover(resolve_cluster(name), unfairness=0.3), resolve_cluster(name))


class DisturbedMeter(FairMeter):
    """Every now and then something else takes a third of what flows would get; long measurements average over it."""

    def rates(self, flows, factor=1.0):
        share = 2 / 3 if self._random.random() < 0.15 and factor <= 1 else 1.0
        return [share * rate for rate in super().rates(flows, factor)]


@pytest.mark.parametrize("name", ["four_equal", "two_racks_2to1", "four_racks_of_four", "two_sites_wan"])
def test_disturbances_make_no_racks(name):
    truth = resolve_cluster(name)
    nodes = range(len(truth.nodes))
    survey = take_survey(DisturbedMeter(truth), len(nodes), every_pair=False)
    undisturbed = take_survey(FairMeter(truth), len(nodes), every_pair=False)
    assert survey.trunks.keys() == undisturbed.trunks.keys()
    assert survey.mesh == undisturbed.mesh


def test_latencies_of_links_follow_from_those_of_paths():
    truth = resolve_cluster("two_racks_2to1")
    found = recover(truth)
    # The two up-links are in a row with no node between them: one link of twice the latency.
    assert [link.latency for link in found.links] == pytest.approx([50e-6] * 8 + [100e-6], rel=1e-3)


def test_where_rates_are_unknown_hosts_are_on_one_switch():
    found = make_cluster("hosts", Hosts([[0, 2], [1]], ["a", "b"], ["10.0.0.1", "10.0.0.2"]), None, {})
    assert not found.measured
    assert found.rank_nodes == (0, 1, 0)
    assert [node.address for node in found.nodes] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(("hosts", "names"), [("a b", "a b"), ("a a", "node0 node1"), ("a rack0", "node0 node1")])
def test_nodes_are_named_as_hosts_where_names_stay_distinct(hosts, names):
    assert list(node_names(hosts.split())) == names.split()


def test_rank_order_is_kept():
    nodes = [{"name": name, "devices": 2} for name in ("a", "b")]
    links = [{"a": name, "b": "switch", "bandwidth": 1e7} for name in ("a", "b")]
    truth = ClusterSpec.from_dict(
        {
            "format": ClusterSpec.FORMAT,
            "name": "interleaved",
            "nodes": nodes,
            "switches": ["switch"],
            "links": links,
            "rank_order": ["a", "b", "a", "b"],
        }
    )
    assert recover(truth).rank_nodes == (0, 1, 0, 1)


def test_directions_are_told_apart():
    truth = ClusterSpec.from_dict(
        {
            "format": ClusterSpec.FORMAT,
            "name": "asymmetric",
            "nodes": [{"name": f"n{node}"} for node in range(4)],
            "switches": ["switch"],
            "links": [
                {"a": f"n{node}", "b": "switch", "bandwidth": 1e7 * (node + 1), "reverse_bandwidth": 4e7 - 8e6 * node}
                for node in range(4)
            ],
        }
    )
    check_recovered(recover(truth), truth)


@examples(25)
@given(
    sizes=st.lists(st.integers(2, 4), min_size=2, max_size=4),
    oversubscription=st.floats(1.5, 8),
)
def test_racks_of_any_sizes_are_recovered(sizes, oversubscription):
    names = [(rack, f"n{rack}_{node}") for rack, size in enumerate(sizes) for node in range(size)]
    links = [{"a": name, "b": f"s{rack}", "bandwidth": 1e8} for rack, name in names]
    uplink = 1e8 * min(sizes) / oversubscription
    links += [{"a": f"s{rack}", "b": "core", "bandwidth": uplink} for rack in range(len(sizes))]
    truth = ClusterSpec.from_dict(
        {
            "format": ClusterSpec.FORMAT,
            "name": "racks",
            "nodes": [{"name": name} for _, name in names],
            "switches": [*(f"s{rack}" for rack in range(len(sizes))), "core"],
            "links": links,
        }
    )
    check_recovered(recover(truth), truth)


@pytest.mark.parametrize("every_pair", [False, None])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_an_uplink_that_limits_all_to_all_traffic_as_much_as_links_of_nodes_is_found(nodes, every_pair):
    """Of two racks; each node sends n / (2 n - 1) of its rate to the other rack when all send to all."""
    truth = ClusterSpec.racks(2, nodes, bandwidth=1e8, uplink=nodes * 1e8 * nodes / (2 * nodes - 1))
    found = recover(truth, every_pair=every_pair)
    check_recovered(found, truth)
    assert len(found.switches) == 2


def test_the_number_of_transfers_grows_with_nodes_not_pairs():
    meter = FairMeter(ClusterSpec.racks(4, 8, bandwidth=1e8, uplink=2e8))
    take_survey(meter, 32, every_pair=False)
    assert meter.transfers < 4 * 32


def test_fair_rates():
    # Two flows share channel 0; one of them crosses the narrower channel 1 with a third.
    assert fair_rates([[0], [0, 1], [1]], [10.0, 4.0]) == pytest.approx([8.0, 2.0, 2.0])


PROBE = {
    "own_trip": 30e-6,
    "pairs": [{"round_trip": {"least": 70e-6}}],
    "sharing": {"everybody": 0.96, "crowding": 2.0, "opposite": 0.99, "fan": 1.0},
    "burst": 131072.0,
    "costs": {
        "copy_rate": 1e10,
        "scan_rate": 3e9,
        "merge_core": 70e-6,
        "reduce_rate": 8e9,
        "encode": {"fp16": 3e9},
        "decode": {"fp16": 4e9},
        "cores": 2.0,
        "collectives": 2,
        "restarts": False,
        "gradient_core": 12e-6,
        "launch_core": 30e-6,
        "pass_core": 0.5e-3,
        "finish_core": 20e-6,
        "step_core": 80e-6,
        "due_core": 9e-6,
        "unpack_core": 3e-6,
        "lone": 60e-6,
        "exchange_core": 70e-6,
        "frame_core": 15e-6,
        "byte_core": 4e-10,
        "small_collectives": {
            "batch": {
                "ring": {"seconds": 1.5e-3, "core": 0.27e-3},
                "all_to_all": {"seconds": 1e-3, "core": 0.15e-3},
            }
        },
    },
}


def test_constants_follow_from_their_measurements(tmp_path):
    constants = fit_constants(PROBE, "batch", machines=1, devices=[1, 1, 1, 1], accelerated=False)
    # 6 steps of two pieces, each sent and received, in what the launch leaves of the core-seconds.
    assert constants.message_cost == pytest.approx((0.27e-3 - 30e-6) / 24)
    # Four ranks on two cores: all but the launch, 20 us each way and the cores' time of each step, for each piece.
    step = (1.5e-3 - 2 * 30e-6) / 6 - 2 * 20e-6 - 2 * 4 * constants.message_cost
    assert constants.hop_delay(collective=True, ranks=4) * 2 == pytest.approx(step)
    assert constants.pair_cost == pytest.approx(20e-6)
    # A hop of a single frame takes what was measured, less the link's latency.
    assert constants.hop_delay(collective=False, ranks=2) == pytest.approx(60e-6 - 20e-6)
    assert (constants.gradient_cost, constants.collective_cost) == (12e-6, 30e-6)
    assert (constants.pass_cost, constants.finish_cost, constants.unpack_cost) == (0.5e-3, 20e-6, 3e-6)
    assert (constants.step_cost, constants.due_cost) == (80e-6, 9e-6)
    assert constants.sharing_loss == pytest.approx(1 / 0.96 - 1)
    assert (constants.cores, constants.frame_cost, constants.host_cost) == (2.0, 15e-6, 4e-10)
    assert not constants.restarts
    assert constants.exchange_cost == 70e-6
    assert (constants.scan_rate, constants.merge_cost) == (3e9, 70e-6)
    assert (constants.burst, constants.encode.fp16, constants.decode.fp16) == (131072.0, 3e9, 4e9)
    constants.save(tmp_path / "constants.yaml")
    assert Constants.load(tmp_path / "constants.yaml") == constants


def test_machines_of_their_own_have_their_own_cores():
    assert fit_constants(PROBE, "batch", machines=4, devices=[1, 1, 1, 1], accelerated=False).cores is None


def test_the_job_says_whether_it_is_accelerated():
    assert fit_constants(PROBE, "batch", machines=4, devices=[1, 1, 1, 1], accelerated=True).accelerated


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"launch": {"kind": "emulated"}}, "cluster: missing"),
        ({"cluster": resolve_cluster("four_equal").to_dict()}, "remove this setting"),
        ({"window": 0}, "window"),
    ],
)
def test_wrong_settings_are_named(data, message):
    with pytest.raises(DocumentError, match=message):
        ProbeSettings.parse(data)

"""Whether a described cluster fits a measured one."""

from __future__ import annotations

import pytest
from clusters import two_interfaces

from lightning_autosync.cluster import ClusterSpec, resolve_cluster, shipped_clusters
from lightning_autosync.measure.probe.description import check_places, check_rates, with_seen_rates


def check_cluster(described: ClusterSpec, seen: ClusterSpec) -> list[str]:
    return check_places(described, seen) or check_rates(described, seen, "by the description")


def star(*rates: str, devices: int = 1) -> ClusterSpec:
    return ClusterSpec.star(rates, devices=devices)


def in_order(cluster: ClusterSpec, *names: str) -> ClusterSpec:
    return cluster.with_rank_order(names)


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_cluster_fits_itself(name: str) -> None:
    assert check_cluster(resolve_cluster(name), resolve_cluster(name)) == []


def test_rates_that_are_near_fit() -> None:
    assert check_cluster(star("100 Mbit/s", "100 Mbit/s"), star("80 Mbit/s", "120 Mbit/s")) == []


def test_a_slow_node_is_named() -> None:
    found = check_cluster(star(*["100 Mbit/s"] * 3), star("100 Mbit/s", "40 Mbit/s", "100 Mbit/s"))
    assert found == [
        "Node node1 sends to all others at 40 Mbit/s, but 100 Mbit/s by the description.",
        "Node node1 receives from all others at 40 Mbit/s, but 100 Mbit/s by the description.",
    ]


def test_a_node_that_is_faster_than_described_is_named() -> None:
    found = check_cluster(star(*["100 Mbit/s"] * 3), star("100 Mbit/s", "100 Mbit/s", "190 Mbit/s"))
    assert [sentence.split(" at ")[0] for sentence in found] == [
        "Node node2 sends to all others",
        "Node node2 receives from all others",
    ]


def test_one_direction_is_named() -> None:
    described = star(*["100 Mbit/s"] * 3)
    links = [link.model_dump() for link in described.links]
    links[0]["reverse_bandwidth"] = "10 Mbit/s"
    seen = ClusterSpec.from_dict({**described.to_dict(), "links": links})
    assert check_cluster(described, seen) == [
        "Node node0 receives from all others at 10 Mbit/s, but 100 Mbit/s by the description."
    ]


def test_what_others_cannot_fill_does_not_count() -> None:
    described = star("400 Mbit/s", *["100 Mbit/s"] * 3)
    assert check_cluster(described, star("300 Mbit/s", *["100 Mbit/s"] * 3)) == []


def test_a_slow_line_between_racks_is_named_once() -> None:
    described, seen = (
        ClusterSpec.racks(2, 4, bandwidth="400 Mbit/s", uplink=uplink) for uplink in ("1600 Mbit/s", "800 Mbit/s")
    )
    assert check_cluster(described, seen) == [
        "Together, nodes node0, node1, node2, node3 send to all others at 800 Mbit/s, but 1600 Mbit/s by the "
        "description.",
        "Together, nodes node0, node1, node2, node3 receive from all others at 800 Mbit/s, but 1600 Mbit/s by the "
        "description.",
    ]


def test_a_rack_that_is_not_described_is_named() -> None:
    found = check_cluster(star(*["400 Mbit/s"] * 8), resolve_cluster("two_racks_2to1"))
    assert "Together, nodes node0, node1, node2, node3 send to all others at 200 Mbit/s" in " ".join(found)


def test_ranks_are_compared_and_not_the_order_of_nodes() -> None:
    fast_first = in_order(star("300 Mbit/s", "100 Mbit/s", "100 Mbit/s"), "node2", "node0", "node1")
    fast_second = star("100 Mbit/s", "300 Mbit/s", "100 Mbit/s")
    assert check_cluster(fast_first, fast_second) == []


def test_hosts_that_do_not_match_are_named_and_rates_are_not_compared() -> None:
    described = star("100 Mbit/s", "100 Mbit/s", devices=2)
    seen = in_order(star("10 Mbit/s", "10 Mbit/s", devices=2), "node0", "node1", "node0", "node1")
    assert check_cluster(described, seen) == [
        "Ranks 0, 1 are described on node node0, but run on node0 and node1.",
        "Ranks 2, 3 are described on node node1, but run on node0 and node1.",
        "Ranks 0, 2 run on host node0, but are described on node0 and node1.",
        "Ranks 1, 3 run on host node1, but are described on node0 and node1.",
    ]


def test_another_number_of_ranks_is_named() -> None:
    assert check_cluster(star("1 Mbit/s", "1 Mbit/s"), star(*["1 Mbit/s"] * 3)) == [
        "The description has 2 ranks, but the job has 3."
    ]


def test_without_rates_hosts_are_compared() -> None:
    unknown = ClusterSpec.uniform(2)
    assert check_cluster(star("1 Mbit/s", "1 Mbit/s"), unknown) == []
    assert check_cluster(unknown, star("1 Mbit/s", "1 Mbit/s")) == []
    one = ClusterSpec.uniform(1, devices=2)
    assert check_cluster(unknown, one) == ["Ranks 0, 1 run on host node0, but are described on node0 and node1."]


def test_two_devices_of_a_node_share_its_link() -> None:
    assert check_cluster(star("100 Mbit/s", "100 Mbit/s", devices=2), star("50 Mbit/s", "50 Mbit/s", devices=2))


def test_a_link_that_one_process_cannot_fill_is_not_called_slow() -> None:
    described = star(*["100 Gbit/s"] * 3)
    assert check_cluster(described, star(*["12 Gbit/s"] * 3)) == []
    assert len(check_cluster(described, star(*["2 Gbit/s"] * 3))) == 6


def rates_of(cluster: ClusterSpec) -> dict[str, tuple[float | None, float | None]]:
    return {f"{link.a} {link.b}": (link.bandwidth, link.reverse_bandwidth) for link in cluster.links}


def test_only_the_links_of_the_first_interface_are_corrected() -> None:
    """Node n2 sends at half the rate, and receives as before; the survey's nodes have other names and another order."""
    described = two_interfaces([1e7] * 4, [4e7] * 4, trunk=1e9)
    seen = ClusterSpec.star([1e7, 1e7, 1e7, 1e7]).to_dict()
    seen["links"][3] |= {"bandwidth": 5e6, "reverse_bandwidth": 1e7}
    seen["rank_order"] = ["node0", "node1", "node3", "node2"]
    found = with_seen_rates(described, ClusterSpec.from_dict(seen))
    assert rates_of(found) == {**rates_of(described), "n2 s0": (pytest.approx(5e6), pytest.approx(1e7))}
    assert found.nodes == described.nodes
    assert check_cluster(found, ClusterSpec.from_dict(seen)) == []


def racks(uplink: float) -> ClusterSpec:
    """Two racks of two nodes, each with a second interface to a switch of its own."""
    data = two_interfaces([1e7] * 4, [4e7] * 4).to_dict()
    data["switches"] = ["s0", "s1", "rack"]
    for node in data["nodes"][2:]:
        node["interfaces"][0]["links"] = ["rack"]
    for link in data["links"]:
        link["b"] = "rack" if link["a"] in ("n2", "n3") and link["b"] == "s0" else link["b"]
    data["links"].append({"a": "s0", "b": "rack", "bandwidth": uplink})
    return ClusterSpec.from_dict(data)


@pytest.mark.parametrize("uplink", [5e5, 1e6, 2.5e6])
def test_a_shared_link_that_became_slower_slows_the_nodes_behind_it(uplink: float) -> None:
    described, seen = racks(5e6), racks(uplink).with_interfaces(1)
    assert check_cluster(described, seen)
    found = with_seen_rates(described, seen)
    assert rates_of(found) == {**rates_of(described), "s0 rack": pytest.approx((uplink, uplink))}
    assert check_cluster(found, seen) == []


def test_links_that_recover_are_corrected_back() -> None:
    slow = two_interfaces([1e7, 1e7, 4e6, 1e7], [4e7] * 4)
    assert rates_of(with_seen_rates(slow, ClusterSpec.star([1e7] * 4)))["n2 s0"] == pytest.approx((1e7, 1e7))


def test_rates_between_nodes_without_a_switch_are_corrected_once() -> None:
    def pair(rate: float) -> ClusterSpec:
        links = [{"a": "a", "b": "b", "bandwidth": rate}]
        return ClusterSpec.from_dict(
            {"format": ClusterSpec.FORMAT, "name": "pair", "nodes": [{"name": "a"}, {"name": "b"}], "links": links}
        )

    assert rates_of(with_seen_rates(pair(1e7), pair(5e6)))["a b"] == pytest.approx((5e6, 5e6))

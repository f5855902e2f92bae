"""The survey of a live job: its hosts, and the rates of emulated links in little time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import forked
import pytest
import survey_calls

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.measure.conditions import usable_cores
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.hosts import measured_hosts
from lightning_autosync.measure.probe import description
from lightning_autosync.measure.probe.hosts import COSTS
from lightning_autosync.measure.probe.table import link_rows
from lightning_autosync.measure.workers import LaunchError, WorkerPool
from lightning_autosync.replay import Constants

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

emulated = [pytest.mark.root, pytest.mark.skipif(bool(UNABLE), reason=UNABLE)]
TOLERANCE = 0.25
"""Other load on this machine disturbs short measurements."""


def interleaved() -> ClusterSpec:
    """Two nodes of two devices whose ranks take turns."""
    cluster = ClusterSpec.uniform(2, devices=2, bandwidth="200 Mbit/s", name="interleaved")
    return cluster.with_rank_order(["node0", "node1", "node0", "node1"])


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[WorkerPool]:
    forked.fork_workers(enter_namespaces=True)
    with EmulatedLaunch(interleaved()) as launch, WorkerPool(4, launch) as pool:
        forked.fork_workers()
        yield pool


def the_answer(pool: WorkerPool, **arguments: Any) -> dict[str, Any]:
    """What all ranks found."""
    answers = pool.run(survey_calls.survey, **arguments)
    assert answers == [answers[0]] * pool.world_size
    return answers[0]


def check_rates(found: ClusterSpec, truth: ClusterSpec) -> None:
    rows = link_rows(found, truth)
    assert {f"{row['from']} > {row['to']}": row["deviation"] for row in rows} == {
        f"{row['from']} > {row['to']}": pytest.approx(0, abs=TOLERANCE) for row in rows
    }
    assert found.rank_nodes == truth.rank_nodes


def test_ranks_of_one_machine_are_one_node(pool: WorkerPool) -> None:
    found = the_answer(pool)
    assert (found["fault"], found["machines"]) == (None, 1)
    assert found["seconds"] < 5
    assert [node["devices"] for node in found["cluster"]["nodes"]] == [pool.world_size]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_hosts_and_rates_of_two_nodes_are_found(two_nodes: WorkerPool) -> None:
    found = the_answer(two_nodes)
    cluster = ClusterSpec.from_dict(found["cluster"])
    check_rates(cluster, interleaved())
    assert len({node.address for node in cluster.nodes}) == 2
    assert description.check_places(interleaved(), cluster) == []
    assert description.check_rates(interleaved(), cluster, "by the description") == []
    assert (found["fault"], found["machines"]) == (None, 1)


@pytest.mark.root
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
@pytest.mark.parametrize("given", [False, True], ids=["links are measured", "links are described"])
def test_costs_of_hosts_are_measured_beside_links(two_nodes: WorkerPool, given: bool) -> None:
    described = interleaved().to_dict() if given else None
    answers = two_nodes.run(survey_calls.links, described=described, probe=5.0)
    assert answers == [answers[0]] * two_nodes.world_size
    assert answers[0]["measured"]
    found = Constants.from_dict(answers[0]["constants"])
    assert found.cores == usable_cores()
    factors = {getattr(found, name) / cost for name, cost in COSTS.items()}
    assert max(factors) == pytest.approx(min(factors))
    assert found.copy_rate != Constants().copy_rate


@pytest.mark.root
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_a_rank_that_cannot_measure_gives_all_default_costs(two_nodes: WorkerPool) -> None:
    answers = two_nodes.run(survey_calls.links_without_sockets, described=interleaved().to_dict())
    assert answers == [answers[0]] * two_nodes.world_size
    assert Constants.from_dict(answers[0]["constants"]) == Constants(cores=usable_cores())


@pytest.mark.root
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_a_job_that_measures_nothing_has_default_costs(two_nodes: WorkerPool) -> None:
    found = two_nodes.run(survey_calls.links, described=interleaved().to_dict(), probe=0.0)[0]
    assert Constants.from_dict(found["constants"]) == Constants()


@pytest.mark.root
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_without_time_only_hosts_are_found(two_nodes: WorkerPool) -> None:
    found = the_answer(two_nodes, limit=0.5)
    cluster = ClusterSpec.from_dict(found["cluster"])
    assert "the limit is 0.5 s" in found["fault"]
    assert (cluster.rank_nodes, cluster.measured) == ((0, 1, 0, 1), False)


@pytest.mark.root
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_a_rank_without_a_connection_is_told_to_all(two_nodes: WorkerPool) -> None:
    answers = two_nodes.run(survey_calls.survey_without_connection)
    assert answers == [answers[0]] * 4
    assert answers[0]["fault"] == "rank 3: the network is down"
    assert not ClusterSpec.from_dict(answers[0]["cluster"]).measured
    assert the_answer(two_nodes)["fault"] is None


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[*emulated, pytest.mark.slow]) for name in ("fat_node_star", "two_racks_2to1")],
)
def test_switches_and_racks_are_found(name: str) -> None:
    truth = resolve_cluster(name).scaled(0.5)
    with EmulatedLaunch(truth) as launch, WorkerPool(truth.world_size, launch) as pool:
        found = the_answer(pool, limit=30.0)
    # The link of 400 Mbit/s leads to three of 100, so nothing can fill it.
    usable = {50e6 / 2: 37.5e6 / 2} if name == "fat_node_star" else {}
    links = tuple(
        link.model_copy(
            update={
                "bandwidth": usable.get(link.bandwidth, link.bandwidth),
                "reverse_bandwidth": usable.get(link.reverse_bandwidth, link.reverse_bandwidth),
            }
        )
        for link in truth.links
    )
    check_rates(ClusterSpec.from_dict(found["cluster"]), truth.model_copy(update={"links": links}))


TOLD = r"(.*): described as 200 Mbit/s, measured (.*) Mbit/s"
RATES = ("200 Mbit/s", "100 Mbit/s")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_a_link_with_half_of_its_described_rate_is_named_and_a_true_description_is_not() -> None:
    described = ClusterSpec.star(["200 Mbit/s"] * 4)
    truth = ClusterSpec.star(["200 Mbit/s", "200 Mbit/s", "100 Mbit/s", "200 Mbit/s"])
    with EmulatedLaunch(truth) as launch, WorkerPool(4, launch) as pool:
        far, *others = pool.run(survey_calls.compare, described=described.to_dict())
        honest = pool.run(survey_calls.compare, described=truth.to_dict())
    assert others == [[]] * 3
    assert honest == [[]] * 4
    told = {link: float(rate) for link, rate in (re.fullmatch(TOLD, text).groups() for text in far)}
    assert told == {way: pytest.approx(100, rel=TOLERANCE) for way in ("link node2 > switch", "link switch > node2")}


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_an_uplink_with_half_of_its_described_rate_is_named_and_a_true_description_is_not() -> None:
    described, truth = (ClusterSpec.racks(2, 3, bandwidth="200 Mbit/s", uplink=uplink) for uplink in RATES)
    with EmulatedLaunch(truth) as launch, WorkerPool(6, launch) as pool:
        far = pool.run(survey_calls.compare, described=described.to_dict())[0]
        honest = pool.run(survey_calls.compare, described=truth.to_dict())[0]
    assert honest == []
    told = {link: float(rate) for link, rate in (re.fullmatch(TOLD, text).groups() for text in far)}
    assert told == {
        way: pytest.approx(100, rel=TOLERANCE)
        for rack in ("rack0", "rack1")
        for way in (f"link {rack} > core", f"link core > {rack}")
    }


def test_live_workers_measure_their_hosts(pool: WorkerPool) -> None:
    found, told = measured_hosts(pool, "local", paced=False)
    assert found.cores == usable_cores()
    assert found.gradient_cost / found.frame_cost == pytest.approx(COSTS["gradient_cost"] / COSTS["frame_cost"])
    assert 1e-7 < found.gradient_cost < 0.1
    assert "measured on the workers" in told

"""The replay against the bound, against itself in more detail, and its own rules."""

from __future__ import annotations

from random import Random

import pytest
from clusters import asymmetric_cluster
from replay_cases import ELEMENTS, RATE, all_reduce, one_switch, price, schedule, tree, workload

from lightning_autosync.cluster import ClusterSpec, ring_time, synchronization_time
from lightning_autosync.errors import ClusterError, DocumentError, PlanError
from lightning_autosync.plan import Compressor, Message, Round, Schedule, Tree, TreeTransfer, builders, compile_plan
from lightning_autosync.plan.topologies.ring import path_from, path_towards
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.replay.frames import count_frames
from lightning_autosync.replay.replay import FRAMES_LIMIT
from lightning_autosync.workload import Variable, Workload

IDEAL = Constants.ideal()
BIG = Workload(name="big", variables=(Variable(name="p", shape=(16_000_000,)),))
MANY = Workload(
    name="many",
    variables=tuple(Variable(name=f"p{index}", shape=(300_000 + 40_000 * index,)) for index in range(20)),
    forward_time=0.05,
    backward_time=0.1,
)
CLUSTERS = {
    "equal": ClusterSpec.uniform(nodes=4, bandwidth=25e6),
    "fat": ClusterSpec.star([50e6, 12.5e6, 12.5e6, 12.5e6]),
    "uneven": ClusterSpec.star([40e6, 30e6, 20e6, 12.5e6]),
    "racks": ClusterSpec.racks(racks=2, nodes_per_rack=4, bandwidth=50e6, uplink=25e6),
}


def compiled(name: str, work: Workload, cluster: ClusterSpec, **arguments: object) -> Schedule:
    return compile_plan(builders.build(name, work, cluster, **arguments), work, cluster)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize(
    ("builder", "cluster"), [("byteps", "fat"), ("byteps", "equal"), ("packed_trees", "fat"), ("packed_trees", "racks")]
)
def test_optimal_plans_reach_the_bound(builder: str, cluster: str, detail: str) -> None:
    spec = CLUSTERS[cluster]
    seconds = Replay(BIG, spec, IDEAL).predict(compiled(builder, BIG, spec), detail).step_time
    assert 0.999 < seconds / synchronization_time(spec, BIG.bytes) < 1.04


@pytest.mark.parametrize(("detail", "most"), [("frames", 1.12), ("fluid", 1.06)])
@pytest.mark.parametrize("shape", ["ring", "mesh", "star", "racks"])
def test_pairs_of_trees_come_near_the_bound_of_asymmetric_links(shape: str, detail: str, most: float) -> None:
    spec = asymmetric_cluster(shape, 5, Random(1))
    seconds = Replay(BIG, spec, IDEAL).predict(compiled("packed_trees", BIG, spec), detail).step_time
    assert 0.999 < seconds / synchronization_time(spec, BIG.bytes) < most


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_native_all_reduce_takes_the_time_of_a_ring(cluster: str) -> None:
    spec = CLUSTERS[cluster]
    seconds = Replay(BIG, spec, IDEAL).predict(compiled("all_reduce", BIG, spec), "fluid").step_time
    assert seconds == pytest.approx(ring_time(spec, BIG.bytes), rel=1e-3)


@pytest.mark.parametrize("builder", ["all_reduce", "byteps", "hierarchical", "packed_trees", "partitioned_ps"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_fluids_agree_with_frames(builder: str, cluster: str) -> None:
    spec = CLUSTERS[cluster]
    made = compiled(builder, MANY, spec)
    pricing = Replay(MANY, spec, Constants(cores=2))
    frames, fluid = pricing.predict(made, "frames"), pricing.predict(made, "fluid")
    assert fluid.step_time == pytest.approx(frames.step_time, rel=0.05)


def test_times_measured_on_emulated_links() -> None:
    """Medians in seconds of messages of 8 and 12 MiB, on links shaped by token buckets, all ranks on two cores.

    The constants are those that a probe found, not ones that were fitted to these measurements.
    """
    megabit = 1e6 / 8
    fat = ClusterSpec.star([400 * megabit, 100 * megabit, 100 * megabit, 100 * megabit])
    measured = [
        (fat, 8, "all_reduce", 1.060),
        (fat, 8, "byteps", 0.745),
        (fat, 8, "packed_trees", 0.720),
        (CLUSTERS["equal"], 8, "all_reduce", 0.532),
        (CLUSTERS["equal"], 8, "byteps", 0.560),
        (CLUSTERS["racks"], 12, "all_reduce", 0.933),
        (CLUSTERS["racks"], 12, "byteps", 2.142),
        (CLUSTERS["racks"], 12, "hierarchical", 0.593),
        (CLUSTERS["racks"], 12, "packed_trees", 0.610),
    ]
    errors = []
    for spec, size, builder, seconds in measured:
        work = Workload(name="flat", variables=(Variable(name="p", shape=(size * 2**18,)),))
        predicted = Replay(work, spec, Constants(cores=2)).predict(compiled(builder, work, spec)).step_time
        errors.append(abs(predicted / seconds - 1))
    assert sorted(errors)[len(errors) // 2] < 0.05
    assert max(errors) < 0.15


@pytest.mark.parametrize(("messages", "least"), [(3, 2000), (12, 8000)])
def test_plans_of_some_thousand_frames_are_priced_in_frames(messages: int, least: int) -> None:
    """Messages that share only some connections wait for them there, which a fluid leaves out."""
    spec = ClusterSpec.star([70e6, *[10e6] * 7])
    variables = tuple(Variable(name=f"p{number}", shape=(500_000,)) for number in range(messages))
    work = Workload(name="some", variables=variables)
    made = compiled("all_reduce", work, spec, topology="tree", bucket_bytes=1)
    pricing = Replay(work, spec)
    assert least < count_frames(pricing._prepare(made).stages, 8) < FRAMES_LIMIT
    assert pricing.predict(made).step_time == pricing.predict(made, "frames").step_time


def test_a_fluid_of_nearly_too_many_frames_is_close_to_them() -> None:
    """By how much predictions may jump at the limit: on this star by 14%."""
    spec = ClusterSpec.star([70e6, *[10e6] * 7])
    work = Workload(name="some", variables=tuple(Variable(name=f"p{number}", shape=(500_000,)) for number in range(44)))
    made = compiled("all_reduce", work, spec, topology="tree", bucket_bytes=1)
    pricing = Replay(work, spec)
    assert 0.95 * FRAMES_LIMIT < count_frames(pricing._prepare(made).stages, 8) <= FRAMES_LIMIT
    fluid, frames = (pricing.predict(made, detail).step_time for detail in ("fluid", "frames"))
    assert abs(fluid / frames - 1) < 0.15


def test_plans_of_many_frames_are_priced_as_fluids() -> None:
    spec = CLUSTERS["racks"]
    work = Workload(name="large", variables=tuple(Variable(name=f"p{index}", shape=(10**7,)) for index in range(8)))
    made = compiled("packed_trees", work, spec, bucket_bytes=1)
    pricing = Replay(work, spec)
    assert count_frames(pricing._prepare(made).stages, 8) > FRAMES_LIMIT
    assert pricing.predict(made).step_time == pricing.predict(made, "fluid").step_time
    assert pricing.predict(made).step_time != pricing.predict(made, "frames").step_time


def test_every_route_of_a_large_cluster_is_found_once() -> None:
    spec = ClusterSpec.racks(racks=16, nodes_per_rack=16, bandwidth=50e6, uplink=250e6)
    made = compiled("byteps", MANY, spec, topology="native", bucket_bytes=2**40)
    pricing = Replay(MANY, spec)
    first = pricing.predict(made)
    routes = len(pricing._network.routes.latencies)
    assert routes == 256 * 255
    assert pricing.predict(made).step_time == first.step_time
    assert len(pricing._network.routes.latencies) == routes


def test_busy_shares_and_critical_path() -> None:
    work = workload(1, ready=[0.5], forward_time=1.0, backward_time=0.5, optimizer_time=0.5)
    prediction = price(one_switch(2), [tree([-1, 0])], "fluid", work)
    assert prediction.step_time == pytest.approx(3.1, rel=1e-3)
    assert prediction.synchronization_time == pytest.approx(1.1, rel=1e-3)
    assert prediction.timeline.links["node1 > switch"] == pytest.approx(1 / 3.1, rel=1e-3)
    assert [span.name.split(" on ")[0] for span in prediction.critical_path] == [
        "forward",
        "backward",
        "message 'message0'",
        "optimizer",
    ]
    for before, after in zip(prediction.critical_path, prediction.critical_path[1:], strict=False):
        assert before.end == pytest.approx(after.start)


def test_a_message_behind_another_has_it_on_its_critical_path() -> None:
    work = workload(2, ready=[0.0, 0.1], backward_time=0.1)
    path = price(one_switch(2), [tree([-1, 0]), tree([-1, 0])], "fluid", work).critical_path
    assert ["message0" in path[0].name, "message1" in path[1].name] == [True, True]


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_a_critical_path_names_the_link_that_binds(detail: str) -> None:
    slow = ClusterSpec.star([4 * RATE, RATE, 4 * RATE])
    (span,) = price(slow, [tree([-1, 0, 0])], detail).critical_path
    assert span.name in ("message 'message0' on node1 > switch", "message 'message0' on switch > node1")


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize(
    ("forward", "burst", "busy"),
    [
        (0.0, 0.25e6, 1.0),
        (0.25, 0.25e6, 1.0),  # what forward collects passes afterwards
        (1.25, 0.25e6, 0.5),  # of two seconds, one is lost to full buckets
        (0.25, 6e6, 1.0),  # no rest is long enough for so much: it is used up step by step
    ],
)
def test_no_link_is_busy_for_longer_than_the_step(forward: float, burst: float, busy: float, detail: str) -> None:
    """Around a ring of two goes a megabyte each way."""
    constants = IDEAL.model_copy(update={"burst": burst})
    links = price(one_switch(2), [all_reduce()], detail, workload(1, forward_time=forward), constants).timeline.links
    assert max(links.values()) <= 1.0
    assert links["node0 > switch"] == pytest.approx(busy, abs=0.02)


def test_schedules_for_other_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="for 3 ranks"):
        Replay(workload(), one_switch(2)).predict(schedule(3, [all_reduce()]))


def test_schedules_of_other_models_are_refused() -> None:
    with pytest.raises(PlanError, match="schedule: 'p' is not a parameter of workload 'many'"):
        Replay(MANY, CLUSTERS["equal"]).predict(compiled("all_reduce", BIG, CLUSTERS["equal"]))


def test_a_detail_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'frame' is not known; did you mean 'frames'. allowed: auto, frames, fluid"):
        Replay(workload(), one_switch(2)).predict(schedule(2, [all_reduce()]), detail="frame")  # type: ignore[arg-type]


def test_unknown_rates_are_refused() -> None:
    with pytest.raises(ClusterError, match="bandwidth: unknown"):
        Replay(workload(), ClusterSpec.uniform(nodes=2))


def test_constants_are_a_document(tmp_path) -> None:  # type: ignore[no-untyped-def]
    constants = Constants(cores=2, host_cost=1e-9)
    constants.save(tmp_path / "constants.yaml")
    assert Constants.load(tmp_path / "constants.yaml") == constants
    with pytest.raises(DocumentError, match="framing"):
        Constants.from_dict({"format": "autosync-constants/1", "framing": 0.5})


def test_rates_that_are_left_out_of_a_file_are_the_defaults() -> None:
    given = {"format": "autosync-constants/1", "encode": {"int8": 1e9}, "decode": {"int8": 2e9}}
    found, default = Constants.from_dict(given), Constants()
    assert (found.encode.int8, found.decode.int8) == (1e9, 2e9)
    assert found.encode == default.encode.model_copy(update={"int8": 1e9})
    assert found.decode == default.decode.model_copy(update={"int8": 2e9})
    assert found.decode.fp16 != found.encode.fp16
    assert Constants.from_dict(found.to_dict()) == found


def ring_of_links(onwards: float = RATE, backwards: float = RATE) -> ClusterSpec:
    """Four nodes, each with a link to the next; ranks are in the order of the ring."""
    rates = {"bandwidth": onwards, "reverse_bandwidth": backwards}
    return ClusterSpec.from_dict(
        {
            "format": "autosync-cluster/1",
            "name": "ring of links",
            "nodes": [{"name": f"n{i}"} for i in range(4)],
            "links": [{"a": f"n{i}", "b": f"n{(i + 1) % 4}", **rates} for i in range(4)],
        }
    )


def test_mesh_links_use_the_topologys_routes() -> None:
    assert price(ring_of_links(), [all_reduce()], "fluid").step_time == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_the_ring_of_a_native_all_reduce_goes_backwards(detail: str) -> None:
    slow_onwards, slow_backwards = ring_of_links(onwards=RATE / 4), ring_of_links(backwards=RATE / 4)
    fast, slow = (price(spec, [all_reduce()], detail).step_time for spec in (slow_onwards, slow_backwards))
    assert fast == pytest.approx(1.5, rel=0.01)
    assert slow == pytest.approx(6.0, rel=0.01)
    assert ring_time(slow_onwards, 1e6) == pytest.approx(1.5)
    assert ring_time(slow_backwards, 1e6) == pytest.approx(6.0)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_the_ring_that_gathers_rows_goes_onwards(detail: str) -> None:
    table = Variable(name="table", shape=(1_000, 250), kind="row_sparse", rows=1_000)
    message = Message(
        0, "table", ("table",), ELEMENTS, "float32", 0, 1_000, Compressor(), 0, (Round(ELEMENTS, (all_reduce(),)),)
    )
    work, gathered = Workload(name="rows", variables=(table,)), 3 * 1_000 * (8 + 4 * 250)
    for spec, rate in ((ring_of_links(backwards=RATE / 4), RATE), (ring_of_links(onwards=RATE / 4), RATE / 4)):
        seconds = Replay(work, spec, IDEAL).predict(Schedule(4, (message,)), detail).step_time
        assert seconds == pytest.approx(gathered / rate, rel=0.01)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_a_ring_of_trees_and_a_native_one_share_no_link(detail: str) -> None:
    """The first goes onwards, the second backwards, so that both at once take as long as either."""
    rings = []
    for root in range(4):
        up, down = (path(range(4), root) for path in (path_towards, path_from))
        trees = (Tree(tuple(parents[rank] for rank in range(4))) for parents in (up, down))
        rings.append(TreeTransfer(0, ELEMENTS, *trees, ELEMENTS // 50))
    alone = price(ring_of_links(), rings, detail).step_time
    assert alone == pytest.approx(6.0, rel=0.05)
    assert price(ring_of_links(), [*rings, all_reduce()], detail).step_time == pytest.approx(alone, rel=0.02)

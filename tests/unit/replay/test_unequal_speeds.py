"""What ranks send that are ready before the slowest one."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy
import pytest
from clusters import asymmetric_cluster
from replay_cases import IDEAL, RATE, one_switch, price, tree, workload

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import Compressor, Schedule, builders, compile_plan
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.replay.conditions import classify
from lightning_autosync.replay.paces import Paces
from lightning_autosync.workload import Variable, Workload

Kinds = list[tuple[str, dict[str, Any]]]
DETAILS = pytest.mark.parametrize("detail", ["frames", "fluid"])
KINDS: Kinds = [
    ("packed_trees", {}),
    ("byteps", {}),
    ("byteps", {"topology": "native"}),
    ("all_reduce", {"topology": "ring"}),
    ("all_reduce", {"topology": "tree"}),
    ("all_reduce", {"topology": "star"}),
    ("ps", {}),
]
IN_PAIRS: Kinds = [("all_reduce", {"topology": topology}) for topology in ("recursive_doubling", "halving_doubling")]


def with_speeds(cluster: ClusterSpec, speeds: list[float]) -> ClusterSpec:
    data = cluster.to_dict()
    for node, speed in zip(data["nodes"], speeds, strict=True):
        node["speed"] = speed
    return ClusterSpec.from_dict(data)


def slow_root(ready: float) -> ClusterSpec:
    """Three ranks, of which the first takes ``ready`` times as long to compute, and sends faster than it receives."""
    data = ClusterSpec.star([4 * RATE] * 3).to_dict()
    (link,) = (link for link in data["links"] if link["a"] == data["nodes"][0]["name"])
    link["reverse_bandwidth"] = RATE
    return with_speeds(ClusterSpec.from_dict(data), [1 / ready, 1.0, 1.0])


def random_plan(seed: int, kinds: Kinds = KINDS) -> tuple[Replay, Schedule]:
    """A random plan for a cluster with nodes of unequal speeds, and what predicts it."""
    random = Random(seed)
    size = random.randint(3, 6)
    speeds = [random.uniform(0.3, 1.0) for _ in range(size)]
    cluster = with_speeds(asymmetric_cluster(random.choice(["star", "ring", "mesh", "racks"]), size, random), speeds)
    variables = [Variable(name=f"v{i}", shape=(int(10 ** random.uniform(4.5, 5.8)),)) for i in range(4)]
    alone = sum(variable.bytes for variable in variables) / 5e7
    work = Workload(name="some", variables=tuple(variables), backward_time=random.uniform(0.2, 3) * alone)
    name, arguments = random.choice(kinds)
    if name != "ps":
        arguments = {**arguments, "bucket_bytes": random.choice([1, 2**20, 2**40])}
    constants = random.choice([Constants(), Constants.ideal(), Constants(cores=2)])
    made = compile_plan(builders.build(name, work, cluster, **arguments), work, cluster)
    return Replay(work, cluster, constants), made


def difference(seed: int, kinds: Kinds) -> float:
    """Relative difference of the times of a random plan as a fluid and in frames."""
    pricing, made = random_plan(seed, kinds)
    return pricing.predict(made, "fluid").step_time / pricing.predict(made, "frames").step_time - 1


@pytest.mark.parametrize(("kinds", "median"), [(KINDS, 0.006), (IN_PAIRS, 0.01)], ids=["others", "pairs"])
@pytest.mark.parametrize(("cases", "most"), [(15, 0.04), pytest.param(150, 0.04, marks=pytest.mark.slow)])
def test_fluids_agree_with_frames(cases: int, most: float, kinds: Kinds, median: float) -> None:
    errors = numpy.abs([difference(seed, kinds) for seed in range(cases)])
    assert numpy.median(errors) < median
    assert numpy.quantile(errors, 0.9) < most
    assert errors.max() < 0.15


def test_messages_of_several_kinds_keep_their_own_exchanges() -> None:
    """The second round of the first message sends nothing before the slowest rank is ready, unlike the others."""
    cluster = with_speeds(ClusterSpec.star([RATE] * 8), [1.0] * 4 + [0.4] * 4)
    variables = [Variable(name=f"v{i}", shape=(300, 400)) for i in range(3)]
    work = Workload(name="some", variables=tuple(variables), backward_time=2.0)
    plan = builders.build("ps", work, cluster)
    changes: list[dict[str, Any]] = [
        {"topology": "tree", "compressor": Compressor(kind="powersgd")},
        {"topology": "recursive_doubling", "architecture": "all_reduce", "placement": None},
        {"topology": "tree"},
    ]
    groups = tuple(group.model_copy(update=change) for group, change in zip(plan.groups, changes, strict=True))
    made = compile_plan(plan.model_copy(update={"groups": groups, "semantics": "compressed"}), work, cluster)
    pricing = Replay(work, cluster, Constants.ideal())
    fluid, frames = (pricing.predict(made, detail).step_time for detail in ("fluid", "frames"))
    assert fluid == pytest.approx(frames, rel=0.05)


@DETAILS
@pytest.mark.parametrize("ready", [1.0, 2.0, 3.0])
def test_sums_of_fast_ranks_travel_before_the_slow_rank_is_ready(ready: float, detail: str) -> None:
    """Two megabytes come to the root, one a second; two go back, four a second. The others are ready after a second.

    So there is all, half or nothing left to come when the root is ready. What is left comes while sums return.
    """
    found = price(slow_root(ready), [tree([-1, 0, 0], 100)], detail, workload(1, ready=[1.0], backward_time=1.0))
    assert found.step_time == pytest.approx(max(3.0, ready + 0.5), rel=0.02)
    assert found.timeline.messages[0].start == pytest.approx(1.0)


@DETAILS
def test_fast_ranks_with_shared_cores_pack_their_gradients_early(detail: str) -> None:
    constants = IDEAL.model_copy(update={"cores": 3.0, "gradient_cost": 1e-3})
    work = workload(1, ready=[1.0], backward_time=1.0)
    found = price(slow_root(3.0), [tree([-1, 0, 0], 100)], detail, work, constants)
    assert found.timeline.messages[0].start == pytest.approx(1.0, abs=0.1)
    assert found.step_time == pytest.approx(3.5, rel=0.02)


def test_speeds_that_just_count_as_unequal_make_no_jump() -> None:
    work = workload(1, ready=[1.0], backward_time=1.0)
    speeds = [[1 / ratio, 1.0, 1.0] for ratio in (1.0199, 1.0201)]
    assert [max(classify(each)) for each in speeds] == [0, 1]
    times = [price(with_speeds(one_switch(3), each), [tree([-1, 0, 0])], "fluid", work).step_time for each in speeds]
    assert times[1] == pytest.approx(times[0], rel=0.01)


def test_classes_are_cut_where_speeds_differ_most() -> None:
    assert classify([1.0, 1.0]).tolist() == [0, 0]
    assert classify([1.0, 0.5, 1.0]).tolist() == [1, 0, 1]
    assert classify([0.99, 0.1, 1.0, 0.2, 0.5, 0.52]).tolist() == [3, 0, 3, 1, 2, 2]


def test_speeds_that_differ_by_noise_are_one_class() -> None:
    noise = [1 + 0.01 * index / 15 for index in range(16)]
    assert classify(noise).tolist() == [0] * 16
    assert classify([*noise, *(1.5 * speed for speed in noise)]).tolist() == [0] * 16 + [1] * 16


def test_close_neighbours_that_span_a_wide_range_are_several_classes() -> None:
    assert len(set(classify([1.01**index for index in range(64)]).tolist())) == 4


def test_a_critical_path_names_the_connection_whose_pace_binds() -> None:
    pricing, made = random_plan(seed=31)
    path = pricing.predict(made, "fluid").critical_path
    step = pricing._prepare(made)
    paces = Paces.of(step.stages, step.loads, pricing._forest.trees, pricing._network)
    ends = [divmod(pair, made.world_size) for pair in paces.pairs.tolist()]
    named = {span.name.partition(" on ")[2] for span in path if "connection" in span.name}
    assert named
    assert named <= {f"paced connection from rank {source} to rank {target}" for source, target in ends}

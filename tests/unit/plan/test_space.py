"""The space of plans: every point compiles, moves stay inside, and it stays small."""

from __future__ import annotations

from random import Random

import pytest
from clusters import shared_nodes, uneven_cluster

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.plan.space import BUILDER, COMPOSED, PlanSpace, make_blocks
from lightning_autosync.workload import Variable, Workload, catalogue

MIXED = Workload(
    name="mixed",
    variables=(
        Variable(name="embedding", shape=(500, 8), kind="sparse"),
        Variable(name="short", shape=(2, 8), kind="row_sparse"),
        Variable(name="front", shape=(64, 9)),
        Variable(name="scalar", shape=()),
        Variable(name="half", shape=(31,), dtype="float16"),
        Variable(name="large", shape=(200, 300)),
        Variable(name="huge", shape=(400, 300)),
        Variable(name="back", shape=(64,)),
    ),
)
CLUSTERS = {
    "uneven": uneven_cluster(4),
    "shared": shared_nodes(5),
    "pair": ClusterSpec.star(bandwidths=[1e7, 1e7]),
    "racks": resolve_cluster("two_racks_2to1"),
    "one": resolve_cluster("one_node"),
}


@pytest.mark.parametrize("semantics", ["exact", "compressed"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_every_drawn_point_compiles_at_its_level(name: str, semantics: str) -> None:
    cluster = CLUSTERS[name]
    space = PlanSpace(MIXED, cluster, semantics)
    rng = Random(f"{name} {semantics}")
    for _ in range(60):
        plan = space.plan(space.draw(rng))
        compile_plan(plan, MIXED, cluster)
        assert plan.semantics in ("exact", semantics)


def test_points_that_mean_the_same_plan_are_made_equal_and_keep_their_plan() -> None:
    space = PlanSpace(MIXED, CLUSTERS["shared"], "compressed")
    rng = Random(1)
    for _ in range(100):
        raw = {name: rng.choice(domain) for name, domain in space.parameters.items()} | {BUILDER: COMPOSED}
        normal = space.normal(raw)
        assert space.normal(normal) == normal
        assert space.plan(normal) == space.plan(raw)


def test_moves_stay_inside_and_change_something() -> None:
    space = PlanSpace(MIXED, CLUSTERS["racks"], "compressed")
    rng = Random(2)
    one, other = space.draw(rng), space.draw(rng)
    for _ in range(100):
        mutant = space.mutate(one, rng)
        assert mutant != one
        space.plan(mutant)
        child = space.crossover(one, other, rng)
        space.plan(child)
        for block in space.blocks:
            assert space.choice(child, block) in (space.choice(one, block), space.choice(other, block))
        one, other = other, mutant


def test_neighbours_are_distinct_and_reachable_by_one_change() -> None:
    space = PlanSpace(MIXED, CLUSTERS["uneven"])
    base = space.draw(Random(3))
    found = [tuple(sorted(neighbour.items())) for neighbour in space.neighbours(base)]
    assert len(found) > len(space.blocks)
    assert tuple(sorted(base.items())) not in found


def test_baselines_are_the_builders_own_plans() -> None:
    cluster = CLUSTERS["uneven"]
    space = PlanSpace(MIXED, cluster)
    points = {point[BUILDER]: point for point in space.baselines()}
    assert {"all_reduce", "byteps", "packed_trees", "ps"} <= points.keys()
    assert space.plan(points["byteps"]) == builders.byteps(MIXED, cluster)


def test_a_large_variable_may_join_the_run_at_its_position() -> None:
    space = PlanSpace(MIXED, CLUSTERS["uneven"])
    block = next(block for block in space.blocks if block.name == "large")
    assert block.home is not None
    genome = space.normal(space.draw(Random(4)) | {"large/method": "join", f"{block.home}/method": "native"})
    groups = [group for group in space.plan(genome).groups if "large" in group.variables]
    assert len(groups) == 1
    assert groups[0].name.startswith(block.home)


def test_runs_join_those_before_them_down_to_one_message() -> None:
    workload = Workload(name="even", variables=tuple(Variable(name=f"v{i:02}", shape=(10,)) for i in range(40)))
    space = PlanSpace(workload, CLUSTERS["uneven"])
    apart = space.draw(Random(5)) | {f"run{number}/bucket": 0 for number in range(4)}
    apart = {name: "native" if name.endswith("/method") else value for name, value in apart.items()}
    assert [len(group.variables) for group in space.plan(apart).groups] == [10, 10, 10, 10]
    two = space.plan(apart | {"run1/method": "join", "run3/method": "join"})
    assert [len(group.variables) for group in two.groups] == [20, 20]
    one = space.plan(apart | {f"run{number}/method": "join" for number in (1, 2, 3)})
    assert [len(group.variables) for group in one.groups] == [40]


def test_coherent_points_hold_what_builders_of_one_rule_do() -> None:
    workload = Workload(name="even", variables=tuple(Variable(name=f"v{i:02}", shape=(10,)) for i in range(40)))
    cluster = CLUSTERS["uneven"]
    space = PlanSpace(workload, cluster)
    points = list(space.coherent())
    assert len({tuple(point.values()) for point in points}) == len(points)
    assert all(space.normal(point) == point for point in points)

    def messages(plan: SyncPlan) -> list[dict[str, object]]:
        return [group.model_dump(exclude={"name", "segment"}) for group in plan.groups]

    found = [messages(space.plan(point)) for point in points]
    for name in ("all_reduce", "byteps", "packed_trees"):
        assert messages(builders.build(name, workload, cluster)) in found


def test_one_node_may_share_its_memory() -> None:
    space = PlanSpace(MIXED, CLUSTERS["one"])
    methods = {name: domain for name, domain in space.parameters.items() if name.endswith("/method")}
    assert all(
        ("shared_memory" in domain) == (name.partition("/")[0] not in ("embedding", "short"))
        for name, domain in methods.items()
    )
    assert not any(
        "shared_memory" in map(str, domain) for domain in PlanSpace(MIXED, CLUSTERS["pair"]).parameters["run0/method"]
    )


@pytest.mark.parametrize("model", ["densenet121", "bert_base", "vgg16"])
def test_the_space_stays_small_for_models_of_hundreds_of_variables(model: str) -> None:
    workload = catalogue.build(model)
    space = PlanSpace(workload, CLUSTERS["racks"])
    assert len(space.parameters) <= 60
    named = [variable.name for block in space.blocks for variable in block.variables]
    assert sorted(named) == sorted(variable.name for variable in workload.variables)


def test_blocks_follow_backward_and_hold_about_equal_bytes() -> None:
    workload = Workload(name="even", variables=tuple(Variable(name=f"v{i:02}", shape=(10,)) for i in range(40)))
    blocks = make_blocks(workload, runs=4)
    assert [len(block.variables) for block in blocks] == [10, 10, 10, 10]
    assert blocks[0].variables[0].name == "v39"


def test_a_wrong_point_is_refused_by_name() -> None:
    space = PlanSpace(MIXED, CLUSTERS["pair"])
    point = space.draw(Random(5))
    with pytest.raises(PlanError, match=r"huge/method: 'teleport' is not known; allowed: "):
        space.plan(point | {"huge/method": "teleport"})
    point.pop("huge/method")
    with pytest.raises(PlanError, match="'huge/method' is missing"):
        space.plan(point)
    with pytest.raises(PlanError, match="semantics"):
        PlanSpace(MIXED, CLUSTERS["pair"], "relaxed")


def test_the_fingerprint_follows_the_parameters() -> None:
    one = PlanSpace(MIXED, CLUSTERS["pair"])
    assert one.fingerprint == PlanSpace(MIXED, CLUSTERS["pair"]).fingerprint
    assert one.fingerprint != PlanSpace(MIXED, CLUSTERS["racks"]).fingerprint


def test_a_record_keeps_domains_as_they_were() -> None:
    """Of a study that began when a topology was missing, and another was there that is not any more."""
    today, name = PlanSpace(MIXED, CLUSTERS["pair"]), "run0/method"
    earlier = (*(value for value in today.parameters[name] if value != "shared_memory"), "pigeons")
    recorded = {**today.parameters, name: earlier}
    space = PlanSpace(MIXED, CLUSTERS["pair"], recorded=recorded)
    assert space.parameters == recorded
    assert "pigeons" not in space.usable[name]
    drawn = [space.draw(Random(seed))[name] for seed in range(40)]
    moved = [space.mutate(space.draw(Random(seed)), Random(seed), 0.9)[name] for seed in range(40)]
    assert not {"pigeons", "shared_memory"} & {*drawn, *moved, *(point[name] for point in space.coherent())}
    point = dict(space.draw(Random(1))) | {name: "pigeons"}
    with pytest.raises(PlanError, match=r"method: 'pigeons' is not known; allowed: .*star"):
        space.plan(point)


def test_a_record_of_other_blocks_is_refused() -> None:
    recorded = {**PlanSpace(MIXED, CLUSTERS["pair"]).parameters, "run77/method": ("native", "star")}
    with pytest.raises(PlanError, match="recorded parameter 'run77/method' does not belong to this workload"):
        PlanSpace(MIXED, CLUSTERS["pair"], recorded=recorded)


def test_parameters_that_are_named_as_runs_are_blocks_of_their_own() -> None:
    shapes = {"run1": (400, 300), "run0": (300, 300), "a": (9,), "b": (9,), "c": (9,)}
    variables = [Variable(name=name, shape=shape) for name, shape in shapes.items()]
    variables.append(Variable(name="half", shape=(9,), dtype="float16"))
    variables.append(Variable(name="run2", shape=(50, 8), kind="sparse"))
    workload = Workload(name="runs", variables=tuple(variables))
    blocks = make_blocks(workload)
    names = [block.name for block in blocks]
    assert len(set(names)) == len(names)
    assert sorted(variable.name for block in blocks for variable in block.variables) == sorted(
        variable.name for variable in variables
    )
    space, rng = PlanSpace(workload, CLUSTERS["pair"]), Random(0)
    for _ in range(20):
        compile_plan(space.plan(space.draw(rng)), workload, CLUSTERS["pair"])


def test_a_space_of_one_plan_has_no_other() -> None:
    workload = Workload(name="one", variables=(Variable(name="fc", shape=(10, 10)),))
    space = PlanSpace(workload, ClusterSpec.uniform(1))
    point = space.draw(Random(0))
    assert space.mutate(point, Random(0)) == point

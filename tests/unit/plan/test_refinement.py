"""Moves between plans, message by message: they lose no variable, and what compiles is a sound plan."""

from __future__ import annotations

from random import Random

import pytest
from sweeps import crossed, sweep
from test_space import CLUSTERS, MIXED

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Group, SyncPlan, builders, compile_plan
from lightning_autosync.plan.space import PlanSpace, Refinement
from lightning_autosync.plan.spec import SEMANTICS, Partition
from lightning_autosync.workload import Variable, Workload, catalogue

FOUR = Workload(name="four", variables=tuple(Variable(name=name, shape=(8,)) for name in "dcba"))
PAIR = ClusterSpec.star(bandwidths=[1e7, 1e7])


def plan_of(*groups: Group) -> SyncPlan:
    return SyncPlan(workload=FOUR.variables_fingerprint, world_size=2, groups=groups)


def held(plans: list[SyncPlan]) -> list[list[str]]:
    return [["".join(group.variables) for group in plan.groups] for plan in plans]


@pytest.mark.parametrize(("name", "semantics"), crossed(list(CLUSTERS), ["exact", "compressed"]))
def test_moves_lead_to_sound_plans(name: str, semantics: str) -> None:
    """From one to the next, ten moves each; every plan that compiles is read from its document as what it is."""
    cluster = CLUSTERS[name]
    space, refinement = PlanSpace(MIXED, cluster, semantics), Refinement(MIXED, cluster)
    rng = Random(f"{name} {semantics}")
    compiled = drawn = 0
    for _ in range(12):
        plan = space.plan(space.draw(rng))
        level = SEMANTICS.index(plan.semantics)
        for _ in range(10):
            moved = refinement.draw(plan, rng)
            assert moved is not None
            assert moved != plan
            assert sorted(name for group in moved.groups for name in group.variables) == sorted(
                variable.name for variable in MIXED.variables
            )
            drawn += 1
            try:
                compile_plan(moved, MIXED, cluster)
            except PlanError:
                continue
            compiled += 1
            assert SEMANTICS.index(moved.semantics) <= level
            assert SyncPlan.from_dict(moved.to_dict()) == moved
            plan = moved
    assert compiled > 0.8 * drawn


BUILDERS = ["all_reduce", "ps_load_balancing", "hierarchical", "packed_trees", "parallax"]


@pytest.mark.parametrize("builder", sweep(BUILDERS, ["all_reduce", "packed_trees"]))
def test_what_is_drawn_is_a_neighbour(builder: str) -> None:
    workload, cluster = catalogue.build("resnet50"), CLUSTERS["racks"]
    plan = builders.build(builder, workload, cluster)
    refinement, rng = Refinement(workload, cluster), Random(0)
    neighbours = {moved.fingerprint for moved in refinement.neighbours(plan)}
    assert plan.fingerprint not in neighbours
    drawn = [refinement.draw(plan, rng) for _ in range(20)]
    assert {moved.fingerprint for moved in drawn if moved is not None} <= neighbours


def test_messages_are_cut_joined_and_shifted_in_the_order_of_backward() -> None:
    """Backward makes a, b, c, d; a, b and c travel together."""
    refinement = Refinement(FOUR, PAIR)
    plan = plan_of(Group(name="one", variables=("c", "b", "a")), Group(name="two", variables=("d",)))
    assert held(list(refinement.neighbours(plan))) == [["a", "bc", "d"], ["ab", "c", "d"], ["abcd"], ["ab", "cd"]]


def test_messages_take_over_ways_and_servers() -> None:
    refinement = Refinement(FOUR, PAIR)
    served = {"architecture": "parameter_server", "topology": "star"}
    plan = plan_of(
        Group(name="one", variables=("a", "b", "c"), **served, placement=(0,)), Group(name="two", variables=("d",))
    )
    found = list(refinement.neighbours(plan))
    placed = [made.groups[0].placement for made in found if held([made]) == [["abc", "d"]]]
    assert placed.count((1,)) == 1
    assert placed.count((0, 1)) == 2  # halves, and by the links, which are alike
    architectures = [[group.architecture for group in made.groups] for made in found if len(made.groups) == 2]
    assert ["all_reduce", "all_reduce"] in architectures
    assert ["parameter_server", "parameter_server"] in architectures
    joined = [made.groups[0].architecture for made in found if len(made.groups) == 1]
    assert sorted(joined) == ["all_reduce", "parameter_server"]


def test_an_axis_does_not_follow_into_messages_that_lack_it() -> None:
    partition = Partition(axis=0, shards=2)
    plan = plan_of(
        Group(name="a", variables=("a",), partition=partition), Group(name="rest", variables=("b", "c", "d"))
    )
    for moved in Refinement(FOUR, PAIR).neighbours(plan):
        assert SyncPlan.from_dict(moved.to_dict()) == moved
        compile_plan(moved, FOUR, PAIR)


def test_messages_of_other_kinds_are_left_apart() -> None:
    workload = Workload(
        name="kinds",
        variables=(
            Variable(name="rows", shape=(9, 2), kind="sparse"),
            Variable(name="half", shape=(3,), dtype="float16"),
            Variable(name="whole", shape=(3,)),
        ),
    )
    plan = builders.build("all_reduce", workload, PAIR)
    assert len(plan.groups) == 3
    assert {len(moved.groups) for moved in Refinement(workload, PAIR).neighbours(plan)} <= {3}

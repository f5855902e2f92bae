"""Builders of relaxed plans."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.workload import Variable, Workload

WORKLOAD = Workload(name="two", variables=(Variable(name="a", shape=(40, 3)), Variable(name="b", shape=(7,))))


@pytest.mark.parametrize("name", builders.relaxed_names())
def test_relaxed_plans_have_no_schedule_and_survive_their_file(name: str, tmp_path) -> None:
    cluster = ClusterSpec.uniform(nodes=4)
    plan = builders.build(name, WORKLOAD, cluster)
    assert plan.semantics == "relaxed"
    assert not plan.has_schedule
    plan.save(tmp_path / "plan.yaml")
    assert type(plan).load(tmp_path / "plan.yaml") == plan
    with pytest.raises(PlanError, match=r"consistency\.mode: .* has no schedule"):
        compile_plan(plan, WORKLOAD, cluster)


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (3, 2), (4, 2), (6, 3), (8, 4), (9, 3)])
def test_groups_divide_the_ranks_where_they_can(ranks: int, size: int) -> None:
    plan = builders.partial_reduce(WORKLOAD, ClusterSpec.uniform(nodes=ranks))
    assert plan.consistency.group_size == size


def test_one_rank_has_nobody_to_reduce_with() -> None:
    with pytest.raises(PlanError, match="partial_reduce"):
        builders.partial_reduce(WORKLOAD, ClusterSpec.uniform(nodes=1))


def test_unknown_builders_are_refused_with_all_names() -> None:
    with pytest.raises(PlanError, match=r"'teleport' is neither a file .* nor a builder.*partial_reduce"):
        builders.find("teleport")

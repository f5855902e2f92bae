"""Servers that keep and update the parameters: equal to DDP in step, within bounds out of step."""

from __future__ import annotations

from typing import Any

import pytest
import server_calls
from clusters import shared_nodes, uneven_cluster
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from plans import plans
from recommender import ROWS, WIDTH, Recommender, workload_of
from sweeps import examples, sweep
from training import Net

from lightning_autosync.plan import Group, Partition, SyncPlan, builders
from lightning_autosync.plan.servers import server_layout
from lightning_autosync.workload import describe

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
]


def spread(servers: list[int], world_size: int, only: int = 0, **fields: Any) -> SyncPlan:
    """All of the small network in one message, in equal parts on these servers."""
    names = tuple(variable.name for variable in describe(Net()).variables)
    group = Group(
        name="all",
        variables=names,
        architecture="parameter_server",
        topology="star",
        partition=Partition(shards=len(servers)) if len(servers) > 1 else None,
        placement=tuple(servers),
        local_aggregation=fields.pop("local_aggregation", False),
    )
    return SyncPlan(world_size=world_size, servers=only, groups=(group,), **fields)


OTHERS = [pytest.param(*case, marks=pytest.mark.slow) for case in OPTIMIZERS[2:]]
"""What optimizers do to slices is compared in tests/unit/relaxed/test_shard_store.py, too."""


@pytest.mark.parametrize(("kind", "options"), [*OPTIMIZERS[:2], *OTHERS])
def test_in_step_they_equal_ddp(pool, kind: str, options: dict[str, Any]) -> None:
    workload, cluster = describe(Net()), uneven_cluster(3)
    made = [
        *(build(workload, cluster) for build in (builders.ps, builders.partitioned_ps, builders.byteps)),
        spread([0, 3, 4], 3, only=2),
        spread([4], 3, only=2),
    ]
    plain = [plan.to_dict() for plan in made]
    answers = pool.run(server_calls.synchronous_runs, plans=plain, kind=kind, options=options)
    for found in zip(*answers[:3], strict=True):
        assert max(one["distance"] for one in found) < 1e-12
        assert len({one["digest"] for one in found}) == 1
        assert all(one["progress"] == 4 for one in found)


@examples(6, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan_equals_ddp(pool, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    workload = describe(Net())
    aggregate = data.draw(st.booleans())
    made = []
    for plan in data.draw(st.lists(plans(workload, size), min_size=1, max_size=4)):
        topology = {"topology": "star", "trees": None, "local_aggregation": aggregate}
        groups = tuple(group.model_copy(update=topology) for group in plan.groups)
        made.append(plan.model_copy(update={"groups": groups}))
    answers = pool.run(
        server_calls.synchronous_runs,
        plans=[plan.to_dict() for plan in made],
        kind="SGD",
        options={"momentum": 0.9},
        cluster=shared_nodes(size).to_dict(),
    )
    for found in answers[:size]:
        assert max(one["distance"] for one in found) < 1e-12


def test_runs_are_reproducible_to_the_bit(pool) -> None:
    made = [spread([0, 1, 4], 4, only=1).to_dict()] * 2
    answers = pool.run(server_calls.synchronous_runs, plans=made, kind="Adam", options={})
    assert len({one["digest"] for found in answers[:4] for one in found}) == 1


def test_state_and_traffic_fall_with_the_number_of_servers(pool) -> None:
    steps, size = 4, 4
    made = [spread(list(range(count)), size) for count in (1, 2, 4)]
    answers = pool.run(
        server_calls.synchronous_runs, plans=[p.to_dict() for p in made], kind="Adam", options={}, steps=steps
    )
    numel = sum(variable.numel for variable in describe(Net()).variables)
    for number, plan in enumerate(made):
        layout = server_layout(plan, describe(Net().double()))
        for rank in range(size):
            found = answers[rank][number]
            remote = sum(shard.bytes for shard in layout.shards if shard.owner != rank)
            assert found["pushed"] == found["pulled"] == steps * remote
            # Two moments in float64 an element, and a float32 count of steps a piece.
            own = layout.of(rank)
            kept = sum(shard.numel for shard in own)
            assert found["state"] == 2 * 8 * kept + 4 * sum(len(shard.pieces) for shard in own)
            assert kept <= numel // len(layout.owners) + 1
        assert sum(shard.bytes for shard in layout.shards) == numel * 8


def test_a_node_pushes_once(pool) -> None:
    steps, cluster = 4, shared_nodes(4)
    plan = spread([4], 4, only=1, local_aggregation=True)
    answers = pool.run(
        server_calls.synchronous_runs,
        plans=[plan.to_dict()],
        kind="SGD",
        options={},
        cluster=cluster.to_dict(),
        steps=steps,
    )
    assert max(found[0]["distance"] for found in answers[:4]) < 1e-12
    assert len({found[0]["digest"] for found in answers[:4]}) == 1
    arguments = {"cluster": cluster.to_dict(), "steps": steps}
    pushes = pool.run(server_calls.pushes_by_sender, plan=plan.to_dict(), **arguments)[4]
    assert pushes == {"0": steps, "2": steps}
    alone = spread([4], 4, only=1)
    pushes = pool.run(server_calls.pushes_by_sender, plan=alone.to_dict(), **arguments)[4]
    assert pushes == {str(rank): steps for rank in range(4)}


BY_ROWS = [("SGD", True, {}), ("SGD", False, {"momentum": 0.9, "weight_decay": 0.1}), ("Adam", False, {})]


@pytest.mark.parametrize(("kind", "sparse", "options"), BY_ROWS)
def test_rows_equal_dense_ddp(pool, kind: str, sparse: bool, options: dict[str, Any]) -> None:
    cluster = uneven_cluster(3)
    workload = workload_of(Recommender(sparse=False), "sparse" if sparse else "row_sparse")
    made = [
        builders.ps(workload, cluster),
        builders.partitioned_ps(workload, cluster),
        builders.byteps(workload, cluster),
    ]
    answers = pool.run(
        server_calls.row_runs,
        plans=[plan.to_dict() for plan in made],
        kind=kind,
        sparse=sparse,
        options=options,
    )
    for found in answers[:3]:
        assert max(one[0] for one in found) < 1e-12


@pytest.mark.parametrize("sparse", [True, False])
def test_few_rows_travel(pool, sparse: bool) -> None:
    cluster = uneven_cluster(3)
    workload = workload_of(Recommender(sparse=False), "sparse" if sparse else "row_sparse")
    plan = builders.ps(workload, cluster).to_dict()
    arguments = {"plans": [plan], "kind": "SGD", "sparse": sparse, "options": {}}
    steps, row, head = 5, 8 + 8 * WIDTH, 8 * (2 * WIDTH + 2)
    changed = pool.run(server_calls.row_runs, **arguments)
    for rank in (1, 2):
        # A batch has six rows at most, three workers change eighteen.
        assert changed[rank][0][1] <= steps * (6 * row + head)
        assert changed[rank][0][2] <= steps * (18 * row + head) < steps * (8 * ROWS * WIDTH + head)


CHECKPOINTS = {"NAdam": {}, "ASGD": {"t0": 1.0}, "Rprop": {}, **dict(OPTIMIZERS)}


@pytest.mark.parametrize("kind", sweep(CHECKPOINTS, ["AdamW"]))
def test_a_checkpoint_goes_on_with_other_servers(pool, kind: str) -> None:
    workload, cluster = describe(Net()), uneven_cluster(3)
    first = spread([0, 1, 2], 3).to_dict()
    second = builders.partitioned_ps(workload, cluster).model_copy(update={"servers": 1})
    groups = [group.model_copy(update={"placement": (3,) * group.shards}) for group in second.groups[:2]]
    second = second.model_copy(update={"groups": (*groups, *second.groups[2:])})
    optimizer = {"kind": kind, "options": CHECKPOINTS[kind]}
    answers = pool.run(server_calls.continued, first=first, second=second.to_dict(), **optimizer)
    assert max(answers[:3]) < 1e-12


MODES: list[dict[str, Any]] = [
    {"mode": "synchronous"},
    {"mode": "bounded_staleness", "staleness": 0},
    {"mode": "bounded_staleness", "staleness": 2},
    {"mode": "asynchronous"},
]


@pytest.mark.parametrize("consistency", sweep(MODES, MODES[2:]))
def test_staleness_is_bounded_and_all_end_alike(pool, consistency: dict[str, Any]) -> None:
    plan = spread([0, 3], 3, only=1, consistency=consistency)
    steps, pauses = [12, 5, 9], [0.0, 0.05, 0.01]
    found = pool.run(server_calls.stale_runs, plan=plan.to_dict(), steps=steps, pauses=pauses)[:3]
    if consistency["mode"] != "asynchronous":
        # A worker in step c has pushed c, so the others have pushed c - s and begun step c - s at the earliest; that
        # they tell so only when their answer is here makes one more.
        assert max(one["ahead"] for one in found) <= consistency.get("staleness", 0) + 1
    else:
        assert max(one["ahead"] for one in found) > 3
    assert len({one["drained"] for one in found}) == 1
    assert len({one["ended"] for one in found}) == 1
    assert all(one["finite"] for one in found)
    # Rank 0's at the start, and in step for ever; else in the end the mean of what each had since the last barrier.
    assert all(one["began"] == [[0.0, 0.0], 0] for one in found)
    in_step = consistency["mode"] == "synchronous"
    mean = 0.0 if in_step else sum(rank * count for rank, count in enumerate(steps)) / sum(steps)
    assert all(one["mean"] == pytest.approx([mean, mean]) for one in found)


@pytest.mark.parametrize("consistency", sweep(MODES, [MODES[0], MODES[3]]))
def test_no_push_is_lost_or_applied_twice(pool, consistency: dict[str, Any]) -> None:
    workload = describe(Net())
    variables = tuple(
        variable.model_copy(update={"name": name, "shape": shape})
        for variable, name, shape in zip(workload.variables, ("weight", "bias"), ((2, 3), (2,)), strict=False)
    )
    small = workload.model_copy(update={"variables": variables})
    plan = builders.partitioned_ps(small, uneven_cluster(4)).model_copy(update={"workload": None})
    plan = SyncPlan.from_dict({**plan.to_dict(), "consistency": consistency})
    assert max(pool.run(server_calls.sums_of_pushes, plan=plan.to_dict(), steps=20)[:4]) < 1e-12


def test_other_optimizers_are_refused(pool) -> None:
    for found in pool.run(server_calls.refusals, plan=spread([0], 2).to_dict())[:2]:
        assert found.startswith("PlanError: optimizer: torch.optim.lbfgs.LBFGS cannot update slices of parameters")

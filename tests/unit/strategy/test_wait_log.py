"""The log of a job that overlaps says why some of its steps wait."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import Group, SyncPlan, compile_plan
from lightning_autosync.strategy import overlap
from lightning_autosync.workload import Variable, Workload


def test_each_reason_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(overlap, "rank_zero_info", told.append)
    log = overlap.WaitLog()
    log.tell(False, False, False, False)
    log.tell(False, False, False, True)
    for _ in range(2):
        log.tell(False, False, True, False)
        log.tell(True, False, True, False)
    assert [line.partition("backward pass ")[2].split()[0:3] for line in told] == [
        ["while", "batch_shares='auto'", "measures"],
        ["in", "each", "step"],
        ["for", "a", "while,"],
    ]


@pytest.mark.parametrize(
    ("topology", "waits", "told"),
    [("native", False, ""), ("shared_memory", False, "in shared memory"), ("native", True, "waits: true")],
)
def test_what_lets_no_step_overlap_is_told(topology: str, waits: bool, told: str) -> None:
    cluster = ClusterSpec.uniform(nodes=1, devices=2)
    workload = Workload(name="one", variables=(Variable(name="p", shape=(8,)),))
    group = Group(name="g", variables=("p",), topology=topology)
    plan = SyncPlan(world_size=2, groups=(group,), waits=waits)
    reason = overlap.why_no_overlap(plan, compile_plan(plan, workload, cluster))
    assert told in reason
    assert bool(reason) == bool(told)

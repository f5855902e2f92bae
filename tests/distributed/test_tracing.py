"""What the engine records of steps, on live workers with paced compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sweeps import sweep

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.timelines import measure_timeline
from lightning_autosync.plan import builders
from lightning_autosync.report.timeline import TIMELINES, compare_timelines, load_timelines
from lightning_autosync.workload import Variable, Workload

CLUSTER = ClusterSpec.uniform(nodes=5, bandwidth=1e9)
WORKLOAD = Workload(
    name="paced",
    variables=(
        Variable(name="first", shape=(400, 100), ready=0.2),
        Variable(name="second", shape=(400, 100), ready=0.1),
        Variable(name="table", shape=(1000, 8), kind="row_sparse", rows=10, ready=0.2),
    ),
    forward_time=0.05,
    backward_time=0.2,
    optimizer_time=0.02,
)


@pytest.mark.parametrize("topology", sweep(["native", "star", "parameter_server"], ["star"]))
def test_a_step_is_recorded_as_it_was_paced(pool, tmp_path: Path, topology: str) -> None:
    if topology == "parameter_server":
        plan = builders.ps_load_balancing(WORKLOAD, CLUSTER, topology="native")
    else:
        plan = builders.all_reduce(WORKLOAD, CLUSTER, topology=topology, bucket_bytes=1, first_bucket_bytes=1)
    measured = measure_timeline(plan, WORKLOAD, CLUSTER, pool.live(), warm_up=1, steps=3)
    assert len(measured.compute) == 5
    assert measured.step_time >= 0.27
    for forward, backward, optimizer in measured.compute:
        assert forward.end >= 0.05
        assert backward.end - backward.start >= 0.2
        assert optimizer.end - optimizer.start >= 0.02
    spans = {span.name: span for span in measured.messages}
    compare_timelines(measured, plan, WORKLOAD, CLUSTER, tmp_path)
    found = load_timelines(tmp_path / TIMELINES)
    assert found["measured"] == measured
    assert list(spans) == [span.name for span in found["predicted"].messages]
    second = spans[plan.groups[0].name]
    assert plan.groups[0].variables == ("second",)
    # Ready a tenth of a second into backward, while backward still runs.
    assert 0.14 < second.ready < measured.compute[0][1].end
    assert second.start <= second.end <= measured.step_time
    titles = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert titles == {"measured", "predicted"}
    assert (tmp_path / "timeline.svg").stat().st_size > 1000

"""Steps traced on emulated links beside the same steps predicted, and a tuning run with its report (root)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_autosync.cli.bench import bench
from lightning_autosync.cli.tune import tune
from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.hosts import least_step
from lightning_autosync.measure.workers import LaunchError
from lightning_autosync.report.timeline import load_timelines

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

emulated = pytest.mark.skipif(bool(UNABLE), reason=UNABLE)

CLUSTER = ClusterSpec.star(bandwidths=["200 Mbit/s", "100 Mbit/s", "100 Mbit/s"], name="three")
MODEL = {
    "kind": "paced",
    "catalogue": "vgg16",
    "scale": 0.002,
    "arguments": {"batch_size": 8},
    "compute": "40 ms",
}
JOB: dict[str, Any] = {
    "model": MODEL,
    "launch": {"kind": "emulated"},
    "cluster": CLUSTER.to_dict(),
    "warm_up": 1,
    "rounds": 2,
    "steps": 1,
}
BURST = 128 * 1024
PICTURES = {"timeline.svg", "timeline.png", "trace.json", "timelines.json"}


@pytest.mark.slow
@pytest.mark.root
@emulated
def test_a_bench_draws_its_fastest_plan_measured_beside_predicted(tmp_path: Path) -> None:
    bench({**JOB, "timeline": True, "contenders": {"star": {"builder": "byteps"}}}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "result.png", *PICTURES}
    found = load_timelines(tmp_path / "timelines.json")
    assert list(found) == ["measured", "predicted"]
    measured, predicted = found["measured"], found["predicted"]
    assert [message.name for message in measured.messages] == [message.name for message in predicted.messages]
    for message in measured.messages:
        # Ready is the last rank's, start is the first rank's.
        assert 0.0 < message.ready < message.end
        assert 0.0 < message.start < message.end <= measured.step_time
    for spans in measured.compute:
        assert [span.name for span in spans] == ["forward", "backward", "optimizer"]
        assert spans[1].end >= 0.039  # paced passes last as told
    # What passes a link follows from the plan: as many bytes as predicted, and what rested links pass at once.
    assert measured.links.keys() == predicted.links.keys()
    rates = {f"{one.source} > {one.target}": one.bandwidth for one in LinkGraph(CLUSTER).channels}
    for name, share in predicted.links.items():
        sent, expected = (
            one * rates[name] * step.step_time for one, step in ((measured.links[name], measured), (share, predicted))
        )
        assert 0.95 * expected <= sent <= 1.05 * (expected + BURST)
    workload = BenchSettings.parse({**JOB, "contenders": {}}).model.workload("rows")
    assert measured.step_time >= least_step(workload, CLUSTER).seconds
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in trace if event["name"] == "process_name"} == {"measured", "predicted"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"kind": "layers", "tensors": 4, "width": 8, "batch": 2}}, "needs a model with paced computation"),
        ({"cluster": ClusterSpec.uniform(nodes=3).to_dict(), "launch": {"kind": "local"}}, "bandwidth: unknown"),
        ({"contenders": {"fp16": {"ddp": {"hook": "fp16"}}}}, "needs a contender with an exact plan"),
        (
            {"contenders": {"bf16": {"builder": "all_reduce", "compressor": "bf16"}}},
            "needs a contender with an exact plan",
        ),
    ],
)
def test_what_cannot_be_drawn_shows_before_anything_is_measured(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DocumentError, match=rf"timeline: .*{message}|{message}"):
        bench({**JOB, "timeline": True, "contenders": {"star": {"builder": "byteps"}}, **change}, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.root
@pytest.mark.slow
@emulated
def test_a_tuning_run_ends_with_its_report(tmp_path: Path) -> None:
    search = {"sampler": "random", "budget": 14}
    trial = {"warm_up": 1, "min_steps": 2, "max_steps": 2, "turn": 0.1}
    tune({**JOB, "search": search, "trial": trial, "finalists": 1}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"result.json", "plan.yaml", "report.html", *PICTURES}
    page = (tmp_path / "report.html").read_text()
    measured = load_timelines(tmp_path / "timelines.json")["measured"]
    assert f"The measured step took {1e3 * measured.step_time:.1f} ms" in page
    assert "All 14 trials as a table" in page
    assert "In interleaved rounds it was" in page

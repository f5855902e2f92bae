"""What live workers and emulated links recorded becomes one timeline."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.measure.emulation.network import Network
from lightning_autosync.measure.timelines import busy_shares, bytes_on_links
from lightning_autosync.measure.traced_step import timeline_of
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.replay import MessageSpan, Span
from lightning_autosync.workload import Variable, Workload


class Emulated:
    """In place of an emulation of two nodes on a switch."""

    def __init__(self) -> None:
        self.network = Network(ClusterSpec.star([100.0, 50.0]))
        self.namespaces = ["zero", "one", "switch"]


COUNTED = {
    "zero": [("link0", 10)],
    "one": [("link1", 20)],
    "switch": [("link0", 30), ("link1", 40)],
}


def test_bytes_on_links_are_those_that_left_each_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ports = [{"kind": "tbf", "dev": dev, "bytes": sent} for dev, sent in COUNTED[command[2]]]
        return SimpleNamespace(returncode=0, stdout=json.dumps([{"kind": "noqueue", "dev": "lo"}, *ports]))

    monkeypatch.setattr(subprocess, "run", run)
    sent = bytes_on_links(Emulated())  # type: ignore[arg-type]
    assert sent == {"node0 > switch": 10, "switch > node0": 30, "node1 > switch": 20, "switch > node1": 40}
    assert busy_shares(Emulated(), sent, 0.5) == {  # type: ignore[arg-type]
        "node0 > switch": 0.2,
        "switch > node0": 0.6,
        "node1 > switch": 0.8,
        "switch > node1": 1.0,
    }


def test_what_the_ranks_recorded_becomes_one_timeline() -> None:
    cluster = ClusterSpec.uniform(nodes=2, bandwidth=1e6)
    workload = Workload(name="one", variables=(Variable(name="fc", shape=(8,)), Variable(name="idle", shape=(8,))))
    schedule = compile_plan(builders.all_reduce(workload, cluster, chunk_size=1), workload, cluster)
    traces = [
        StepTrace(1.0, 2.0, 3.0, 3.5, ready=(None, 1.5), started=(None, 1.6), completed=(None, 2.8)),
        StepTrace(1.1, 2.1, 3.1, 3.6, ready=(None, 1.4), started=(None, 1.5), completed=(None, 2.9)),
    ]
    timeline = timeline_of(schedule, traces, {"a > b": 0.5})
    assert timeline.messages == (MessageSpan(schedule.messages[1].name, start=1.5, end=2.9, ready=1.5),)
    assert timeline.step_time == 3.6
    assert timeline.compute[1] == (Span("forward", 0.0, 1.1), Span("backward", 1.1, 2.1), Span("optimizer", 3.1, 3.6))

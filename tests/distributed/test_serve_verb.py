"""`autosync serve`: a server-only process that workers of another command use."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
import yaml
from strangers import SECRET
from torch import nn

from lightning_autosync.cli import serve as command
from lightning_autosync.cli.serve import serve
from lightning_autosync.engine.connections import own_address
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.servers import server_layout
from lightning_autosync.relaxed.server import ParameterServer
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.workload import describe, variable_names

COMMAND = [sys.executable, "-c", "from lightning_autosync.cli import main; main()", "serve"]


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSYNC_SECRET", SECRET.decode())


def start(directory: Path, **settings: Any) -> subprocess.Popen[str]:
    arguments = [f"{key}={value}" for key, value in settings.items()] + [f"hydra.run.dir={directory}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return forked.Popen([*COMMAND, *arguments], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_worker_trains_on_a_server_process(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = start(tmp_path, host="127.0.0.1", port=store.port, rank=1, size=2, timeout=60)
    try:
        module = nn.Linear(2, 1)
        expected = module.weight.detach() - 0.5
        plan = SyncPlan.from_dict(
            {
                "format": SyncPlan.FORMAT,
                "world_size": 1,
                "servers": 1,
                "groups": [
                    {
                        "name": "all",
                        "variables": ["weight", "bias"],
                        "architecture": "parameter_server",
                        "topology": "star",
                        "placement": [1],
                    }
                ],
            }
        )
        mesh = Mesh.open(store, 0, 2, secret=SECRET, address="127.0.0.1", timeout=60.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        layout = server_layout(plan, describe(module))
        running = ParameterServer(mesh, variable_names(module), layout, optimizer, plan.consistency, timeout=30.0)
        running.start()
        module.weight.grad = torch.ones_like(module.weight)
        running.step(optimizer, 1)
        assert torch.equal(module.weight.detach(), expected)
        running.close()
        mesh.close()
        _, told = process.communicate(timeout=30)
        assert process.returncode == 0, told
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 1, "rank": 2, "size": 2}, "^rank: 2 is out of range; size is 2"),
        ({"port": 70000, "rank": 0, "size": 2}, "^port: "),
        ({"port": 1, "rank": 0, "size": 2}, "no store at 127.0.0.1:1: "),
        ({"port": 1, "rank": 0, "size": 2, "heartbeat": {"interval": -1}}, "^heartbeat.interval: "),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    whole = {"host": "127.0.0.1", "address": None, "timeout": 1, "heartbeat": {}, **settings}
    with pytest.raises(AutoSyncError, match=message):
        serve(whole, tmp_path)


def test_the_shipped_time_outs_are_those_of_the_workers() -> None:
    shipped = yaml.safe_load((Path(__file__).parents[2] / "conf" / "serve.yaml").read_text())["heartbeat"]
    assert shipped == asdict(HeartbeatSettings())


def test_time_outs_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(command, "serve_until_the_end", lambda *_, **settings: given.update(settings))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    whole = {"host": "127.0.0.1", "port": store.port, "rank": 0, "size": 1, "address": None, "timeout": 9}
    serve({**whole, "heartbeat": {"longest": 44.0}}, tmp_path)
    assert given == {"secret": SECRET, "address": None, "timeout": 9.0, "heartbeat": HeartbeatSettings(longest=44.0)}


def test_the_address_that_others_are_told_faces_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    told: list[str] = []
    monkeypatch.setattr(command, "serve_until_the_end", lambda *_, **settings: told.append(own_address()))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    whole = {"host": "127.0.0.1", "port": store.port, "rank": 0, "size": 1, "address": None, "timeout": 9}
    serve({**whole, "heartbeat": {}}, tmp_path)
    assert told == ["127.0.0.1"]

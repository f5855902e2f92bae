"""What a job does about its port: who may come there, and what else may be there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from strangers import SECRET, listening_as

from lightning_autosync.cli.serve import serve
from lightning_autosync.engine import rendezvous as stores
from lightning_autosync.engine.rendezvous import open_store
from lightning_autosync.engine.secret import seal
from lightning_autosync.engine.waiting import monitored_by
from lightning_autosync.errors import ExchangeError
from lightning_autosync.strategy import job
from lightning_autosync.strategy.job import STORE_PORT, check_rejoin_secret, find_job
from lightning_autosync.strategy.process_group import GroupMembers, LossMonitor
from lightning_autosync.strategy.settings import StrategySettings

HOST = "127.0.0.1"
HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ANSWER_TIMEOUT", 1.0)
    monkeypatch.setenv("AUTOSYNC_SECRET", SECRET.decode())


def test_a_job_that_others_may_come_to_needs_a_secret_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSYNC_SECRET")
    check_rejoin_secret()
    monkeypatch.setenv(STORE_PORT, "29501")
    for call in (check_rejoin_secret, lambda: find_job(HOST, 20.0)):
        with pytest.raises(
            ExchangeError, match=r"AUTOSYNC_PORT is set, .*: set AUTOSYNC_SECRET, or AUTOSYNC_SECRET_FILE"
        ):
            call()


def test_a_job_that_has_the_secret_is_found_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(HOST, 0, 20.0)
    monkeypatch.setenv(STORE_PORT, str(store.port))
    assert find_job(HOST, 20.0) is None
    store.set("job/underway", seal(SECRET, "job/underway", json.dumps({"plan": "this"})))
    found = find_job(HOST, 20.0)
    assert found is not None
    assert found.identity == {"plan": "this"}
    for written in (seal(b"another secret", "job/underway", "{}"), json.dumps({"plan": "this"})):
        store.set("job/underway", written)
        with pytest.raises(ExchangeError, match="'job/underway' was written with a secret that differs"):
            find_job(HOST, 20.0)


@pytest.mark.parametrize("says", [b"", HTTP], ids=["silence", "HTTP"])
def test_something_else_at_the_port_is_an_error_within_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: bytes
) -> None:
    with listening_as(lambda caller: caller.sendall(says)) as (_, port):
        monkeypatch.setenv(STORE_PORT, str(port))
        with pytest.raises(
            ExchangeError, match=f"AUTOSYNC_PORT={port}: no store at {HOST}:{port}: another program listens"
        ):
            find_job(HOST, 600.0)
        settings = {"host": HOST, "port": port, "rank": 2, "size": 3, "address": None, "timeout": 600.0}
        with pytest.raises(ExchangeError, match=f"no store at {HOST}:{port}: another program listens"):
            serve({**settings, "heartbeat": {}}, tmp_path)


def test_a_first_rank_that_died_before_its_store_was_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has told the others where its store is, and what is there now is nothing of this job."""
    with listening_as(lambda connection: connection.sendall(HTTP)) as (_, port):
        monkeypatch.setattr(job, "gather_json", lambda value: [[HOST, port, ""]])
        monkeypatch.setattr(job.dist, "get_world_size", lambda: 2)
        found = SimpleNamespace(plan=SimpleNamespace(world_size=2))
        others = GroupMembers(1, lambda: {0: "its process has ended"}, lambda _: None, 1.0)
        with monitored_by(LossMonitor("a step", others)), pytest.raises(ExchangeError, match="rank 0 is lost"):
            job._meet_at_store(found, StrategySettings(timeout=20.0), 1)

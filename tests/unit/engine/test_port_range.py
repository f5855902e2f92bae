"""Sockets listen on the ports of a range, if the process has one."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

import pytest
from ports import free_port

from lightning_autosync import ClusterSpec
from lightning_autosync.engine.connections import listen
from lightning_autosync.engine.rendezvous import open_store
from lightning_autosync.errors import DocumentError, ExchangeError
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.launches.launch import SshLaunch
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.ports import VARIABLE, listening_within, port_range, with_free_port

HOST = "127.0.0.1"


def free_ports(count: int) -> tuple[int, int]:
    """The first and the last of ports in a row on which nothing listens."""
    while True:
        first = free_port()
        try:
            with ExitStack() as opened:
                for port in range(first, first + count):
                    opened.enter_context(socket.create_server((HOST, port)))
                return first, first + count - 1
        except OSError:
            continue


def test_listeners_and_stores_take_the_ports_of_the_range_one_after_the_other() -> None:
    first, last = free_ports(3)
    with listening_within((first, last)), listen(HOST) as one, listen(HOST) as two:
        store = open_store(HOST, 0, 20.0)
        assert [one.getsockname()[1], two.getsockname()[1], store.port] == [first, first + 1, last]
        with pytest.raises(ExchangeError, match=f"^no port is free from {first} to {last}; give a larger range"):
            listen(HOST)
        with pytest.raises(ExchangeError, match="no port is free"):
            open_store(HOST, 0, 20.0)
        # A port that is asked for by its number need not be of the range.
        with listen(HOST, free_port()):
            pass
    assert port_range() is None


def test_a_wrong_range_of_the_environment_is_told_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "9-3")
    told = f"^{VARIABLE}: got '9-3'; allowed: the first and the last port, from 1 to 65535, for example 20000-20100$"
    with pytest.raises(ExchangeError, match=told), LaunchSettings().open(None):
        pass


def test_a_wrong_range_of_a_launch_is_told_with_what_is_allowed() -> None:
    told = r"launch\.port_range: .*got \(5, 3\); allowed: the first and the last port, from 1 to 65535"
    with pytest.raises(DocumentError, match=told):
        BenchSettings.parse({"model": {"kind": "flat", "mib": 1}, "launch": {"kind": "local", "port_range": [5, 3]}})


def test_datagrams_keep_to_the_range() -> None:
    first, last = free_ports(2)
    with listening_within((first, last)), ExitStack() as opened:
        for port in (first, last):
            own = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            with_free_port(lambda number, own=own: own.bind((HOST, number)))
            assert own.getsockname()[1] == port


def test_another_fault_than_a_taken_port_is_told_at_once() -> None:
    with listening_within((20000, 60000)), pytest.raises(ExchangeError, match=r"192\.0\.2\.1: .*must belong to that"):
        listen("192.0.2.1")


@pytest.mark.parametrize("text", ["20000", "20100-20000", "0-5", "20000-70000", "a-b"])
def test_a_wrong_variable_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(
        ExchangeError, match=rf"^AUTOSYNC_PORT_RANGE: got '{text}'; allowed: .*, for example 20000-20100"
    ):
        listen(HOST)


def test_a_launch_hands_the_range_to_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    cluster = ClusterSpec.from_dict(
        {
            "format": "autosync-cluster/1",
            "name": "two",
            "nodes": [{"name": "one", "address": "10.0.0.1"}, {"name": "two", "address": "10.0.0.2"}],
            "switches": ["switch"],
            "links": [{"a": name, "b": "switch", "bandwidth": "1 Gbit/s"} for name in ("one", "two")],
        }
    )
    settings = LaunchSettings(kind="ssh", command=("true",), port_range=[20000, 20100])
    with settings.open(cluster) as launch:
        assert isinstance(launch, SshLaunch)
        assert launch.environment(1)[VARIABLE] == "20000-20100"
        assert os.environ[VARIABLE] == "20000-20100"  # for workers on this machine
    assert VARIABLE not in os.environ
    with LaunchSettings(kind="ssh", command=("true",)).open(cluster) as launch:
        assert VARIABLE not in launch.environment(1)


def test_a_launch_refuses_other_values() -> None:
    with pytest.raises((DocumentError, ValueError), match="port_range"):
        LaunchSettings(kind="local", port_range=[20100, 20000])

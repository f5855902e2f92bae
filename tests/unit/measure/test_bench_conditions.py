"""Kernel counters, the order of turns, and the command line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_autosync.cli import main
from lightning_autosync.measure import conditions
from lightning_autosync.measure.conditions import LoadMeter, machine_ticks, process_ticks
from lightning_autosync.measure.interleaving import alternating_rounds
from lightning_autosync.measure.tcp_info import bytes_sent


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's counters")
def test_bytes_sent_are_those_of_own_connections():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            before = bytes_sent()
            sender.sendall(bytes(5000))
            receiver.sendall(bytes(300))
            after = bytes_sent()
            assert before is not None
            assert after is not None
            assert after - before == 5300
            assert len(receiver.recv(5000, socket.MSG_WAITALL)) == 5000  # the sockets are as they were


def test_processor_time_is_read_past_names_with_blanks():
    assert machine_ticks("cpu  10 20 30 400 5 6 7 8 9 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n") == 68
    assert process_ticks("42 (a) b) R 1 2 3 4 5 6 7 8 9 10 111 222 0 0 20 0 1 0 5 6 7") == 333


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_work_of_workers_is_not_foreign():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        knowing, unknowing = LoadMeter([child.pid]), LoadMeter([])
        stat = Path(f"/proc/{child.pid}/stat")
        while process_ticks(stat.read_text()) < 30:
            time.sleep(0.05)
        foreign, both = knowing.foreign_cores(), unknowing.foreign_cores()
    finally:
        child.kill()
        child.wait()
    assert foreign is not None
    assert both is not None
    assert both > foreign + 0.02


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_is_this_process_is_counted_once():
    both, one = LoadMeter([os.getpid()]), LoadMeter([])
    begin = time.process_time()
    while time.process_time() < begin + 0.5:
        pass
    found, expected = both._read(), one._read()
    assert found is not None
    assert expected is not None
    assert found[1] == pytest.approx(expected[1], abs=0.1)


def test_every_other_round_runs_backwards():
    rounds = iter([["a", "b", "c"], ["a", "b", "c"], ["a", "c"], []])
    assert list(alternating_rounds(lambda: next(rounds))) == [["a", "b", "c"], ["c", "b", "a"], ["a", "c"]]


@pytest.mark.parametrize(("line", "status"), [(["--help"], 0), ([], 2)])
def test_usage_lists_the_verbs(monkeypatch, capsys, line, status):
    monkeypatch.setattr(sys, "argv", ["autosync", *line])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == status
    assert "bench" in capsys.readouterr().out


def test_an_unknown_verb_is_told_with_the_known_ones(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["autosync", "dance"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "'dance' is not a subcommand" in told
    assert "bench" in told


def test_a_wrong_setting_ends_with_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autosync", "bench", "rounds=0"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == "autosync bench: rounds: Input should be greater than 0 (got 0)"


@pytest.mark.parametrize(
    ("restarts", "algorithm", "expected"),
    [("1", "cubic", True), ("0", "cubic", False), ("1", "bbr", False), ("1", "bbr2", False), (None, None, True)],
)
def test_windows_restart_as_the_kernel_says(
    restarts: str | None, algorithm: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "_TCP", tmp_path)
    for name, value in (("tcp_slow_start_after_idle", restarts), ("tcp_congestion_control", algorithm)):
        if value is not None:
            (tmp_path / name).write_text(f"{value}\n")
    assert conditions.windows_restart() is expected

"""How processes take turns at a journal: none waits for a dead one, and none takes a living one's turn."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import optuna
import pytest
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from lightning_autosync.search.journal import Journal, JournalLock

_HOLDER = """
import sys
from lightning_autosync.search.journal import JournalLock
JournalLock(sys.argv[1]).acquire()
print("held", flush=True)
input()
"""
_WRITER = """
import sys
from lightning_autosync.search.journal import Journal
journal = Journal(sys.argv[1])
for number in range(200):
    journal.append_logs([{"writer": sys.argv[2], "number": number}])
"""


@pytest.fixture
def path(tmp_path) -> Path:
    file = tmp_path / "study.journal"
    file.touch()
    return file


def test_values_that_are_not_finite_are_read_again(path):
    study = optuna.create_study(storage=optuna.storages.JournalStorage(Journal(str(path))))
    trial = study.ask()
    trial.report(math.nan, 0)
    study.tell(trial, math.inf)
    (found,) = optuna.storages.JournalStorage(Journal(str(path))).get_all_trials(0)
    assert found.value == math.inf
    assert math.isnan(found.intermediate_values[0])


def killed_at_its_turn(path: Path) -> None:
    line = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert os.path.lexists(f"{path}.lock")
        other.kill()


def test_the_turn_of_a_killed_process_is_free_at_once(path):
    killed_at_its_turn(path)
    begin = time.monotonic()
    Journal(str(path)).append_logs([{"op": 1}])
    assert time.monotonic() - begin < 1
    assert path.read_text() == '{"op":1}\n'
    assert [one.name for one in path.parent.iterdir()] == ["study.journal"]


def test_a_study_goes_on_at_once_after_a_kill(path):
    study = optuna.create_study(storage=optuna.storages.JournalStorage(Journal(str(path))))
    killed_at_its_turn(path)
    begin = time.monotonic()
    study.tell(study.ask(), 1.0)
    assert time.monotonic() - begin < 1
    assert len(optuna.storages.JournalStorage(JournalFileBackend(str(path))).get_all_trials(0)) == 1


def test_who_waits_for_a_stopped_process_is_told(path, monkeypatch):
    monkeypatch.setattr("lightning_autosync.search.journal.LOCK_TIMEOUT", 0.1)
    stopped = JournalLock(str(path))
    stopped.acquire()
    with pytest.raises(TimeoutError, match="another process has locked it for "):
        Journal(str(path)).append_logs([{"op": 1}])
    stopped.release()
    Journal(str(path)).append_logs([{"op": 1}])


def test_processes_of_optuna_alone_take_turns_with_ours(path):
    theirs, ours = JournalFileSymlinkLock(str(path)), JournalLock(str(path))
    order: list[str] = []

    def wait() -> None:
        ours.acquire()
        order.append("ours")
        ours.release()

    theirs.acquire()
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    order.append("theirs")
    theirs.release()
    waiting.join()
    assert order == ["theirs", "ours"]

    ours.acquire()
    with pytest.raises(FileExistsError):
        os.symlink(path, f"{path}.lock")  # what theirs would do
    ours.release()
    theirs.acquire()
    theirs.release()


def test_other_programs_find_the_journal_by_the_link_of_a_relative_path(path, monkeypatch):
    monkeypatch.chdir(path.parent.parent)
    lock = JournalLock(str(path.relative_to(path.parent.parent)))
    lock.acquire()
    assert os.path.samefile(f"{path}.lock", path)
    lock.release()


def test_a_stale_link_that_leads_nowhere_is_removed(path):
    os.symlink("nowhere", f"{path}.lock")
    lock = JournalLock(str(path))
    lock.grace_period = 0
    turn = threading.Thread(target=lock.acquire, daemon=True)
    turn.start()
    turn.join(60)
    assert os.path.samefile(f"{path}.lock", path)
    lock.release()


def test_turns_are_taken_where_the_kernel_keeps_no_locks(path, monkeypatch):
    def refused(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refused)
    first, second, order = JournalLock(str(path)), JournalLock(str(path)), []

    def wait() -> None:
        second.acquire()
        order.append("second")
        second.release()

    first.acquire()
    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.2)
    order.append("first")
    first.release()
    waiting.join()
    assert order == ["first", "second"]


def test_no_line_is_lost_among_several_processes(path):
    lines = [[sys.executable, "-c", _WRITER, str(path), name] for name in "abc"]
    writers = [forked.Popen(line) for line in lines]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = list(Journal(str(path)).read_logs(0))
    for name in "abc":
        assert [one["number"] for one in found if one["writer"] == name] == list(range(200))

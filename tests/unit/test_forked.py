"""Forked processes see, print and end as new interpreters do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from lightning.fabric.strategies.launchers import subprocess_script as fabric_launcher
from lightning.pytorch.strategies.launchers import subprocess_script as trainer_launcher

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.workers import LaunchError

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

PROGRAMS = {
    "a status": "raise SystemExit(3)",
    "a message": "raise SystemExit('no luck')",
    "a signal": "import os, signal; print('last', flush=True); os.kill(os.getpid(), signal.SIGTERM)",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "input": "print(input())",
    "words": "import sys; print(sys.argv, __name__, file=sys.stderr)",
    "surroundings": "import os; print(os.getcwd(), dict(os.environ), os.getsid(0) == os.getpid(), os.getppid())",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program(program: str, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("a line\n")
    command = [sys.executable, "-c", program, "one", "two"]
    environment = {"COLOUR": "blue", "LC_CTYPE": "C.UTF-8", "PYTHONPATH": os.pathsep.join(sys.path)}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    with open(tmp_path / "input") as first, open(tmp_path / "input") as second:
        expected = subprocess.run(command, stdin=first, capture_output=True, text=True, **options)
        found = forked.run(command, stdin=second, capture_output=True, **options)
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_scripts_and_modules(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys, mine; print(sys.argv[1:], __name__, mine.__name__, sys.path[0])")
    for words in (["mine.py", "one"], ["-m", "mine", "two"]):
        command = [sys.executable, *words]
        expected = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
        assert forked.run(command, cwd=tmp_path, capture_output=True).stdout == expected


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.2)


def test_an_error_has_a_status_and_a_traceback() -> None:
    found = forked.run([sys.executable, "-c", "1 / 0"], capture_output=True)
    assert found.returncode == 1
    assert found.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_ranks_of_trainers_and_fabrics_are_forked_unless_new_interpreters_are_asked_for() -> None:
    launchers = [fabric_launcher, trainer_launcher]
    try:
        forked.fork_workers()
        assert [launcher.subprocess.Popen for launcher in launchers] == [forked.Popen] * 2
        forked.start_workers()
        assert [launcher.subprocess.Popen for launcher in launchers] == [subprocess.Popen] * 2
    finally:
        forked.fork_workers()


def test_collections_of_garbage_leave_out_what_the_server_has_imported() -> None:
    program = "import gc, sys; print(gc.get_freeze_count(), 'torch' in sys.modules, gc.isenabled())"
    frozen, *found = forked.run([sys.executable, "-c", program], capture_output=True).stdout.split()
    assert found == ["True", "True"]
    assert int(frozen) > 100_000


def test_other_commands_are_run_as_ever() -> None:
    assert forked.run(["echo", "a"], capture_output=True).stdout == "a\n"


@pytest.mark.root
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_a_fork_enters_the_network_namespace_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked.Popen, "enters_namespaces", True)
    program = "import os, sys; print(os.readlink('/proc/self/ns/net'), 'lightning' in sys.modules)"
    with EmulatedLaunch(ClusterSpec.uniform(2, bandwidth="1 Gbit/s")) as launch:
        command, environment = launch.command(1, [sys.executable, "-c", program], {})
        found = forked.run(command, env=environment, capture_output=True)
        where = launch.command(1, ["readlink", "/proc/self/ns/net"], {})[0]
        there = subprocess.run(where, capture_output=True, text=True).stdout.strip()
    assert found.stdout == f"{there} True\n"
    assert there != os.readlink("/proc/self/ns/net")

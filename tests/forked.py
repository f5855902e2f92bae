"""Python processes that a server forks which has imported torch and Lightning once.

A new interpreter imports these for seconds of a core, which tests of many processes do not have. Processes that are to
show what a new interpreter does start with ``subprocess``.
"""

from __future__ import annotations

import atexit
import inspect
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import forkserver, popen_forkserver, reduction
from multiprocessing.context import ForkServerContext
from types import SimpleNamespace
from typing import Any

from lightning_autosync.cli.application import VERBS
from lightning_autosync.measure.emulation import netns

PRELOADED = [
    "torch.distributed",
    "torch._dynamo",
    "lightning.pytorch",
    "lightning_autosync.relaxed.factory",
    "lightning_autosync.cli.tune",
    "hydra._internal.hydra",
    "sklearn.datasets",
]
"""What the server imports; who adds to it does so before the first process."""
FURTHER = [
    *(f"lightning_autosync.cli.{verb}" for verb in VERBS),
    "matplotlib.backends.backend_svg",
    "torch._dynamo.backends.debugging",
    "torch.export._trace",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "tests.warm_replay",
]
"""What it imports, too, if all tests are to use it."""
FIRST, LAST = "tests.unsettled", "tests.settled"
"""What it imports at the begin, and at the end, when all other modules are there."""
_LAUNCHERS = [
    "lightning_autosync.measure.workers.process",
    "lightning.fabric.strategies.launchers.subprocess_script",
    "lightning.pytorch.strategies.launchers.subprocess_script",
    "lightning_autosync.strategy.tuning.predictor",
]
"""Modules that start commands of this interpreter."""
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen``, except that commands of this interpreter are forked; they see all that tests import.

    Attributes:
        enters_namespaces: whether to fork also for ``ip netns exec NAME``; otherwise ``ip`` starts new interpreters.
    """

    enters_namespaces = False
    _fork: popen_forkserver.Popen | None = None

    def _execute_child(self, *values: Any) -> None:
        given = _EXECUTE.bind(self, *values).arguments
        namespace, command = _split(given["args"]) if self.enters_namespaces else ("", given["args"])
        if command[0] != sys.executable or given["preexec_fn"] is not None:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [_Stream(own if pipe == -1 else pipe) for own, pipe in enumerate(pipes)]
        environment = dict(os.environ if given["env"] is None else given["env"])
        words = command[2:] if command[1] == "-I" else command[1:]  # forks see the paths of tests all the same
        order = (words, given["cwd"], environment, given["start_new_session"], streams, namespace, os.getpid())
        self._fork = popen_forkserver.Popen(context().Process(target=_main, args=order))
        self.pid = self._fork.pid
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]

    def _internal_poll(self, *values: Any, **named: Any) -> int | None:
        if self._fork is None:
            return super()._internal_poll(*values, **named)  # type: ignore[misc, no-any-return]
        self.returncode = self._fork.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._fork is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        self.returncode = self._fork.wait(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def context() -> ForkServerContext:
    """``multiprocessing`` with processes that the server forks."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([FIRST, *PRELOADED, LAST])
    return found


def start_server() -> None:
    """Start the server now, for all tests. Forks of this process use it, too.

    What processes print that have no streams of their own, such as torch's warnings of lost peers, is dropped.
    """
    context().set_forkserver_preload([FIRST, *PRELOADED, *FURTHER, LAST])
    nowhere, kept = os.open(os.devnull, os.O_WRONLY), [os.dup(stream) for stream in (1, 2)]
    try:
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        forkserver.ensure_running()
    finally:
        for stream, own in zip((1, 2), kept, strict=True):
            os.dup2(own, stream)
        for one in (nowhere, *kept):
            os.close(one)
    os.register_at_fork(after_in_child=_keep_server)


def run(command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with ``text``, for a command of this interpreter."""
    timeout = options.pop("timeout", None)
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen([os.fspath(word) for word in command], text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def fork_workers(enter_namespaces: bool = False) -> None:
    """From now on, this process and those that it forks start workers of pools and ranks of Trainers as forks.

    Args:
        enter_namespaces: whether workers behind emulated links are forks, too.
    """
    Popen.enters_namespaces = enter_namespaces
    names = {"Popen": Popen, "PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    for name in _LAUNCHERS:
        vars(import_module(name))["subprocess"] = SimpleNamespace(**names)


def start_workers() -> None:
    """From now on, workers of pools are new interpreters again."""
    for name in _LAUNCHERS:
        vars(import_module(name))["subprocess"] = subprocess


class _Stream:
    """An open file that a forked process gets."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._descriptor),)


def _received(sent: Any) -> int:
    descriptor: int = sent.detach()
    return descriptor


def _main(
    words: Sequence[str],
    directory: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    new_session: bool,
    streams: Sequence[int],
    namespace: str,
    parent: int,
) -> None:
    """Do in this process what a new interpreter does with ``words``."""
    if new_session:
        os.setsid()
    if namespace:
        netns._run_in(namespace, lambda: None)  # this thread stays there, and those that it starts
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    _open_streams()
    if directory is not None:
        os.chdir(directory)
    _keep_server()
    _follow(parent)
    fork_workers()
    try:
        _run(words)
    finally:
        atexit._run_exitfuncs()


def _keep_server() -> None:
    """The server is no child of this process, which therefore cannot ask whether it runs."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def _follow(parent: int) -> None:
    """Name as the parent of this process the one that ordered it, as long as that lives, and not the server."""
    own, known = os.getpid(), os.getppid
    os.getppid = lambda: parent if os.getpid() == own and os.path.exists(f"/proc/{parent}") else known()


def _split(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The network namespace in which ``ip`` would run a command, and that command."""
    return (command[3], command[4:]) if [*command[:3]] == ["ip", "netns", "exec"] else ("", command)


def _open_streams() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = _output(1, "strict", unbuffered)
    sys.stderr = _output(2, "backslashreplace", unbuffered)
    sys.stderr.reconfigure(line_buffering=True)


def _output(descriptor: int, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    stream = os.fdopen(descriptor, "wb", 0 if unbuffered else -1, closefd=False)
    return io.TextIOWrapper(stream, errors=errors, write_through=unbuffered)


def _run(words: Sequence[str]) -> None:
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = words[0]
    if not os.environ.get("PYTHONSAFEPATH"):
        own = {"-c": "", "-m": os.getcwd()}
        paths.insert(0, own[first] if first in own else os.path.dirname(os.path.abspath(first)))
    sys.path[:0] = paths
    if first == "-m":
        sys.argv = [words[1], *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = [*words]
        runpy.run_path(first, run_name="__main__")

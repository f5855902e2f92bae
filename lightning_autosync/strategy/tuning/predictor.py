"""`Predictor`: searches and predicts plans in a process of its own, so that training does not wait for it."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import MissingPackageError, PredictorError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.replay import Constants
from lightning_autosync.workload import Workload

SEARCH_PATIENCE = 600.0
"""Seconds, beside those of the search itself, in which it must be over.

It takes long where the simulator's code has to be compiled.
"""
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lightning_autosync.search.prediction_server import main; main(int(sys.argv[2]))"
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_CHUNK = 1 << 20
_PARTING = 10.0
"""Seconds to wait for a process that was killed."""


class Predictor:
    """Searches and predicts plans in a process that starts with `start` or an order, and again if it has ended.

    The process ends with this one, however that ends, and after some minutes without an order. It has none of this
    process's sockets. Methods may be called from any thread, one order at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def start(self) -> None:
        """Start the process, so that it has loaded its code when the first order comes."""
        if self._lock.acquire(blocking=False):  # else another thread has an order, for which it has started
            try:
                with suppress(OSError):  # an order tells what is wrong
                    self._started()
            finally:
                self._lock.release()

    def search(
        self,
        workload: Workload,
        cluster: ClusterSpec,
        constants: Constants,
        known: Sequence[tuple[str, SyncPlan]] = (),
        **options: Any,
    ) -> list[dict[str, Any]]:
        """The fields of each `PredictedPlan` as plain data; arguments as for `rank_plans`.

        Raises:
            MissingPackageError: the package for simulations is not installed.
            PredictorError: the search or its process failed.
        """
        order = {**_common(workload, cluster, constants), "beside": False, "options": options}
        order["known"] = [(name, plan.to_dict()) for name, plan in known]
        found: list[dict[str, Any]] = self._ask(order, SEARCH_PATIENCE + options.get("seconds", 0.0))["plans"]
        return found

    def predict(
        self,
        workload: Workload,
        cluster: ClusterSpec,
        constants: Constants,
        plans: Sequence[SyncPlan],
        limit: float,
        patience: float,
        overlaps: bool = False,
    ) -> list[float]:
        """Predicted seconds of a step by plan, computed at the lowest priority; empty if that took too long.

        Args:
            workload, cluster, constants: as for `Replay`.
            limit: maximum seconds of CPU time.
            patience: seconds in which the reply must come.
            overlaps: whether steps overlap with the next forward pass.

        Raises:
            MissingPackageError: the package for simulations is not installed.
            PredictorError: the prediction or its process failed.
        """
        order = {**_common(workload, cluster, constants), "beside": True, "seconds": limit, "overlaps": overlaps}
        found: list[float] = self._ask({**order, "plans": [plan.to_dict() for plan in plans]}, patience)["seconds"]
        return found

    def end(self) -> None:
        """End the process, also while another thread waits for its reply, which is then a `PredictorError`."""
        if (process := self._process) is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may wait for a file system
                process.wait(_PARTING)

    def forget(self) -> None:
        """In a fork of this process: leave the process that predicts to the parent."""
        atexit.unregister(self.end)
        if self._process is not None:
            self._process.returncode = 0  # else Python warns that this fork leaves a process
        self._lock, self._process, self._errors = threading.Lock(), None, None

    def _ask(self, order: Mapping[str, Any], patience: float) -> dict[str, Any]:
        line = json.dumps(order).encode() + b"\n"
        with self._lock:
            try:
                reply = _exchange(self._started(), line, time.monotonic() + patience)
            except OSError as error:
                self.end()  # else it might reply to the next order with what this one asked for
                raise PredictorError(f"the process that predicts plans failed: {error}{self._last_words()}") from None
        if "missing" in reply:
            raise MissingPackageError(reply["missing"])
        if "error" in reply:
            raise PredictorError(reply["error"])
        return reply

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._close_streams()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), str(os.getpid())],
                bufsize=0,
                env={**os.environ, **_ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            atexit.register(self.end)
        return self._process

    def _close_streams(self) -> None:
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout, self._errors):
                assert stream is not None
                stream.close()

    def _last_words(self) -> str:
        """The last line that the process printed, for a message."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""


def _common(workload: Workload, cluster: ClusterSpec, constants: Constants) -> dict[str, Any]:
    return {"workload": workload.to_dict(), "cluster": cluster.to_dict(), "constants": constants.to_dict()}


def _exchange(process: subprocess.Popen[bytes], line: bytes, deadline: float) -> dict[str, Any]:
    """Send an order and return its reply.

    Raises:
        OSError: the process has ended, or does not reply before ``deadline``.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    rest = memoryview(line)
    with suppress(BrokenPipeError):  # it has ended: reading tells how
        while rest:
            _wait(process.stdin, select.POLLOUT, deadline)
            rest = rest[process.stdin.write(rest) or 0 :]
    reply = b""
    while not reply.endswith(b"\n"):
        _wait(process.stdout, select.POLLIN, deadline)
        chunk = os.read(process.stdout.fileno(), _CHUNK)
        if not chunk:
            raise ConnectionError(f"it ended with status {process.wait(_PARTING)}")
        reply += chunk
    found: dict[str, Any] = json.loads(reply)
    return found


def _wait(stream: IO[bytes], event: int, deadline: float) -> None:
    waiting = select.poll()
    waiting.register(stream, event)
    if not waiting.poll(1e3 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError("it did not reply in time")


PREDICTOR = Predictor()
"""The predictor of this process: jobs that follow each other need only one."""
os.register_at_fork(after_in_child=PREDICTOR.forget)

"""One worker process from its caller's side: start it, write orders, read replies, end it."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from lightning_autosync.measure.progress import Report, silent

TAIL_BYTES = 16 * 1024
READ_BYTES = 64 * 1024
_PARTING = 10.0
"""Seconds to wait for a process that was killed."""


class OutputTail:
    """The last few kilobytes that a process wrote to stdout and stderr.

    Args:
        echo: whether to copy everything to this process's stderr.
    """

    def __init__(self, stream: IO[bytes], echo: bool = False) -> None:
        self._stream = stream
        self._echo = echo
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="worker-output", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with suppress(OSError, ValueError):  # the stream was closed
            while chunk := os.read(self._stream.fileno(), READ_BYTES):
                self._append(chunk)
                if self._echo:
                    os.write(2, chunk)

    def _append(self, chunk: bytes) -> None:
        with self._lock:
            self._chunks.append(chunk[-TAIL_BYTES:])
            self._size += len(self._chunks[-1])
            while self._size - len(self._chunks[0]) >= TAIL_BYTES:
                self._size -= len(self._chunks.popleft())

    def finish(self, timeout: float) -> None:
        """Wait until the output of an ended process is read, for at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def drain(self, timeout: float) -> None:
        """Wait until everything written so far is read, for at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with suppress(OSError, ValueError):  # the stream was closed
            while select.select([self._stream], [], [], 0.0)[0] and self._thread.is_alive():
                if time.monotonic() > deadline:
                    return
                time.sleep(0.005)

    def text(self) -> str:
        """The kept output, at most ``TAIL_BYTES``."""
        with self._lock:
            return b"".join(self._chunks)[-TAIL_BYTES:].decode(errors="replace").strip()


class WorkerProcess:
    """A child process that reads orders from its stdin and answers on its stdout, both as JSON lines.

    Commands that start other commands, such as ssh, pass these two streams on, even to another machine. Whatever the
    worker prints goes to its stderr and so does not mix with answers.

    Args:
        environment: whole environment of the command.
        echo: whether to copy what the worker prints to this process's stderr.
        parting: as in `Launch`.
    """

    def __init__(
        self, rank: int, command: list[str], environment: Mapping[str, str], echo: bool = False, parting: float = 0.0
    ) -> None:
        self.rank = rank
        self._parting = parting
        self._buffer = b""
        self._process = subprocess.Popen(
            command,
            env=environment,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a new process group, so that `end` can kill the worker with its own children
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._orders = self._process.stdin.fileno()
        self._replies = self._process.stdout.fileno()
        os.set_blocking(self._orders, False)
        self.output = OutputTail(self._process.stderr, echo)
        self._ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor that becomes readable when a reply arrives or the worker ends."""
        return self._replies

    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, line: bytes, deadline: float) -> None:
        """Write one order, an encoded JSON line, before ``deadline`` (of ``time.monotonic()``, may be ``math.inf``).

        Raises:
            EOFError: the worker has ended.
            TimeoutError: it did not read the order before ``deadline``.
        """
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._orders, rest) :]
            except BlockingIOError:
                # `select` does not accept an infinite timeout; None means no limit.
                patience = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
                if not select.select([], [self._orders], [], patience)[1]:
                    raise TimeoutError from None
            except BrokenPipeError:
                raise EOFError from None

    def receive(self, report: Report = silent) -> dict[str, Any] | None:
        """The next reply, or None if the readable data does not complete one; ``report`` gets reports before it.

        Raises:
            EOFError: the worker closed its stdout, so it has ended or is about to.
        """
        chunk = os.read(self._replies, READ_BYTES)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            if line.startswith(b"{"):  # skips what a remote shell prints when it starts
                data = json.loads(line)
                if "progress" not in data:
                    return data
                report(*data["progress"])
        return None

    def dump_stacks(self) -> None:
        """Ask the worker to write the stacks of all its threads to its output."""
        if self.alive():
            os.kill(self.pid, signal.SIGUSR1)

    def fate(self) -> str:
        """A description of how the process ended."""
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe without ending"
        self.output.finish(timeout=1.0)
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    def prepare_end(self) -> None:
        """Send SIGTERM, if the command needs it to end a worker elsewhere; `end` then waits for that."""
        if self._parting and not self._ended:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGTERM)

    def end(self) -> None:
        """Kill the process and its children, reap it, and close the pipes; may be called again."""
        if self._ended:
            return
        self._ended = True
        if self._parting:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._parting)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        # A process of another user (sudo) cannot be killed, but it ends when its stdin is closed.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PARTING)

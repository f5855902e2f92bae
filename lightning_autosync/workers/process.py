"""One worker process as its caller sees it: start it, write orders, read replies, end it."""

from __future__ import annotations

import json
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

TAIL_BYTES = 16 * 1024
READ_BYTES = 64 * 1024


class OutputTail:
    """The last few kilobytes that a process wrote to stdout and stderr."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="worker-output", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with suppress(OSError, ValueError):  # the stream was closed
            while chunk := os.read(self._stream.fileno(), READ_BYTES):
                self._append(chunk)

    def _append(self, chunk: bytes) -> None:
        with self._lock:
            self._chunks.append(chunk[-TAIL_BYTES:])
            self._size += len(self._chunks[-1])
            while self._size - len(self._chunks[0]) >= TAIL_BYTES:
                self._size -= len(self._chunks.popleft())

    def finish(self, timeout: float) -> None:
        """Wait until the process's last words are read, for at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def text(self) -> str:
        """What is kept, at most ``TAIL_BYTES`` of it."""
        with self._lock:
            return b"".join(self._chunks)[-TAIL_BYTES:].decode(errors="replace").strip()


class WorkerProcess:
    """A child process with a pipe for orders and one for replies, both of JSON lines.

    The pipes are descriptors of their own, so that whatever the worker prints stays apart.

    Args:
        rank: its rank.
        command: the command to run; ``--orders FD --replies FD`` is appended.
        environment: its whole environment.
    """

    def __init__(self, rank: int, command: list[str], environment: Mapping[str, str]) -> None:
        self.rank = rank
        orders_read, self._orders = os.pipe()
        self._replies, replies_write = os.pipe()
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                [*command, "--orders", str(orders_read), "--replies", str(replies_write)],
                env=environment,
                pass_fds=(orders_read, replies_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it can be ended together with its own children
            )
        except BaseException:
            os.close(self._orders)
            os.close(self._replies)
            raise
        finally:
            os.close(orders_read)
            os.close(replies_write)
        os.set_blocking(self._orders, False)
        assert self._process.stdout is not None
        self.output = OutputTail(self._process.stdout)
        self._ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor that becomes readable with a reply, or with the worker's end."""
        return self._replies

    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, line: bytes, deadline: float) -> None:
        """Write one order, given as an encoded JSON line.

        Raises:
            EOFError: the worker is gone.
            TimeoutError: it did not take the order before ``deadline`` (``time.monotonic()``).
        """
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._orders, rest) :]
            except BlockingIOError:
                if not select.select([], [self._orders], [], max(0.0, deadline - time.monotonic()))[1]:
                    raise TimeoutError from None
            except BrokenPipeError:
                raise EOFError from None

    def receive(self) -> dict[str, Any] | None:
        """The next reply, or None if what is readable does not complete one.

        Raises:
            EOFError: the worker closed its end: it is gone or about to be.
        """
        chunk = os.read(self._replies, READ_BYTES)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        return json.loads(line)

    def dump_stacks(self) -> None:
        """Ask the worker to write where each of its threads is to its output."""
        if self.alive():
            os.kill(self.pid, signal.SIGUSR1)

    def fate(self) -> str:
        """How the process ended, in words."""
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe without ending"
        self.output.finish(timeout=1.0)
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    def end(self) -> None:
        """Kill the process and its children, collect it, and close the pipes; may be called again."""
        if self._ended:
            return
        self._ended = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._orders)
        os.close(self._replies)

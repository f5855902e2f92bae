"""The worker process: ``python -m lightning_autosync.measure.workers.worker``, started by a pool.

It reads orders, JSON lines on its stdin, and answers each with one line on its stdout; what orders print goes to
its stderr:

- ``{"action": "serve"}`` (rank 0 only): open the rendezvous store; answers its port.
- ``{"action": "join", "port": p, "group": g, "device": d}``: join the process group number ``g`` of workers that train
  on ``cpu`` or ``cuda``, leaving any earlier one.
- ``{"action": "announce", "port": p}``: let ``env://`` lead to that store; whoever is called makes the group itself.
- ``{"action": "call", "function": "package.module:name", "arguments": {...}, "reports": false}``: answers what it
  returns. If it ``reports``, it gets an argument ``report``, and rank 0 writes ``{"progress": [done, total, text]}``
  whenever the function calls it.

An answer is ``{"result": ...}`` or ``{"error": ...}``, as :mod:`~lightning_autosync.measure.workers.calls` has it.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
from datetime import timedelta
from typing import IO, Any, NoReturn

from lightning_autosync.engine.cpu_scheduling import set_batch_scheduling
from lightning_autosync.measure.progress import silent
from lightning_autosync.measure.workers.calls import describe, find_function
from lightning_autosync.measure.workers.devices import BACKENDS, Device, use_device

PR_SET_PDEATHSIG = 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, required=True, help="longest wait in a collective, seconds")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads for one operator")
    parser.add_argument("--batch", action="store_true", help="run under SCHED_BATCH")
    parser.add_argument("--end-with-parent", action="store_true", help="be killed when the parent ends")
    return parser.parse_args()


def end_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_now() -> NoReturn:
    """End this process and its children, even while another thread is inside a collective."""
    if os.getpgrp() == os.getpid():  # else the process group includes processes that are not ours
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def take_standard_streams() -> tuple[IO[bytes], int]:
    """The stream of orders and the descriptor for answers; children inherit neither. Redirects printing to stderr."""
    orders, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return os.fdopen(orders, "rb"), replies


def follow_orders(stream: IO[bytes], orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Move orders from the pipe to the queue; at the end of the pipe, end this process, since its caller is gone."""
    for line in stream:
        orders.put(json.loads(line))
    end_now()


class Member:
    """This process as a rank: its rendezvous store, its process group, and a method for each order."""

    def __init__(self, timeout: float, replies: int) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._timeout = timedelta(seconds=timeout)
        self._replies = replies
        self._rank = int(os.environ["RANK"])
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._store: dist.TCPStore | None = None

    def serve(self) -> int:
        """Open the store on a port that the system chooses, and return the port."""
        return self._connect(0).port

    def join(self, port: int, group: int, device: Device) -> None:
        """Join process group number ``group``; collective."""
        os.environ["MASTER_PORT"] = str(port)
        use_device(device)
        if self._dist.is_initialized():
            self._dist.destroy_process_group()
        store = self._dist.PrefixStore(f"group-{group}", self._store or self._connect(port))
        self._dist.init_process_group(
            BACKENDS[device], store=store, rank=self._rank, world_size=self._world_size, timeout=self._timeout
        )

    def announce(self, port: int) -> None:
        """Set the variables of torchrun, so that the next ``init_process_group`` of each rank meets at the store."""
        os.environ |= {
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "autosync",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 must not open a store, since it is open already
        }

    def call(self, function: str, arguments: dict[str, Any], reports: bool) -> Any:
        if reports:
            arguments["report"] = self._report if self._rank == 0 else silent
        return find_function(function)(**arguments)

    def _report(self, done: int, total: int, text: str) -> None:
        write_all(self._replies, json.dumps({"progress": [done, total, text]}).encode() + b"\n")

    def _connect(self, port: int) -> Any:
        from lightning_autosync.engine.rendezvous import find_store, open_store

        connect = open_store if self._rank == 0 else find_store
        self._store = connect(os.environ["MASTER_ADDR"], port, self._timeout.total_seconds())
        return self._store


def answer(member: Member, order: dict[str, Any]) -> bytes:
    """Execute one order; returns the JSON line to send back."""
    action = order.pop("action")
    try:
        reply = json.dumps({"result": getattr(member, action)(**order)})
    except BaseException as error:  # SystemExit too: an order must not end the worker
        reply = json.dumps({"error": describe(error)})
    return reply.encode() + b"\n"


def main() -> None:
    arguments = parse_arguments()
    if arguments.end_with_parent:
        end_with_parent()
    if arguments.batch and not set_batch_scheduling():
        print("SCHED_BATCH is not available here", file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A Ctrl-C is for the caller, which ends its workers. Batch systems may send it to all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stream, replies_to = take_standard_streams()
    # A thread reads orders, so that the end of the pipe ends this process even while it is inside a collective.
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=follow_orders, args=(stream, orders), name="orders", daemon=True).start()

    import torch

    torch.set_num_threads(arguments.threads)
    member = Member(arguments.timeout, replies_to)
    while True:
        write_all(replies_to, answer(member, orders.get()))


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``; a single ``write`` may accept only a part of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    main()

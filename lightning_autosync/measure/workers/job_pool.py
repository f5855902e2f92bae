"""A pool of the ranks of a torchrun job: rank 0 calls functions on all of them, through the job's store."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.engine.cpu_scheduling import set_batch_scheduling
from lightning_autosync.measure.errors import LaunchError, WorkerError
from lightning_autosync.measure.launches.launch import require_torchrun
from lightning_autosync.measure.workers.calls import describe, find_function, function_name, wrong_input

_IDLE = timedelta(seconds=5)
"""Timeout of a single wait for a call, which a rank repeats."""
_END, _RENEW = "end", "renew"
_NOTHING = {"action": "call", "function": f"{__name__}:do_nothing", "arguments": {}}


class JobRank:
    """This process as a rank of the job.

    Args:
        timeout: maximum seconds of a call or a collective.
        batch: whether to run under SCHED_BATCH.
    """

    def __init__(self, timeout: float, batch: bool) -> None:
        require_torchrun("tune")
        torch.set_num_threads(1)
        if batch:
            set_batch_scheduling()
        self.timeout = timedelta(seconds=timeout)
        store, self.rank, self.world_size = next(dist.rendezvous("env://", timeout=self.timeout))
        self.store = dist.PrefixStore("autosync-tune", store)
        self._generation = 0
        self._join()

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute one call; returns its result or the error that it raised."""
        try:
            if order["action"] == _RENEW:
                return {"result": self._renew()}
            return {"result": json.loads(json.dumps(find_function(order["function"])(**order["arguments"])))}
        except Exception as error:
            return {"error": describe(error)}

    def follow(self) -> None:
        """Execute rank 0's calls until it ends the job."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles a Ctrl-C and ends the job in order
        number = 0
        while True:
            key = f"order/{number}"
            with suppress(dist.DistStoreError):
                self.store.wait([key], _IDLE)
                order = json.loads(self.store.get(key))
                if order["action"] == _END:
                    return
                if self.rank not in order.get("for", (self.rank,)):
                    order = _NOTHING
                self.store.set(f"reply/{number}/{self.rank}", json.dumps(self.answer(order)))
                number += 1

    def _join(self) -> None:
        store = dist.PrefixStore(f"group-{self._generation}", self.store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=self.timeout)

    def _renew(self) -> list[str | int]:
        """Close all contenders of the old process group, then make a new group."""
        from lightning_autosync.measure.replica_calls import forget

        forget()
        dist.destroy_process_group()
        self._generation += 1
        self._join()
        return [socket.gethostname(), os.getpid()]


class JobPool:
    """A pool of ranks that run already, so that only their process group can be renewed.

    Raises:
        LaunchError: this process is not rank 0 of a job.
    """

    def __init__(self, rank: JobRank) -> None:
        if rank.rank != 0:
            raise LaunchError("launch=torchrun: only rank 0 may call functions on the others")
        self._rank = rank
        self._number = 0
        self.world_size = rank.world_size
        self.pids: list[int] = []

    def renew(self) -> None:
        """Renew the process group, at the start and after a failure.

        Raises:
            LaunchError: a rank no longer answers.
        """
        try:
            where = self._exchange({"action": _RENEW}, list(range(self.world_size)))
        except WorkerError as error:
            raise LaunchError(f"launch=torchrun: {error}; start the job again to continue its study") from None
        self.pids = [pid for host, pid in where if host == socket.gethostname()]

    def run(
        self, function: Callable[..., Any], /, *, ranks: Iterable[int] | None = None, **arguments: Any
    ) -> list[Any]:
        """Like `WorkerPool.run`, but without reports on the way.

        Raises:
            WorkerError: a rank raised or did not answer in time.
            InputError: all failed ranks report wrong input.
        """
        addressed = list(range(self.world_size) if ranks is None else ranks)
        return self._exchange(
            {"action": "call", "function": function_name(function), "arguments": arguments}, addressed
        )

    def close(self) -> None:
        """Does nothing: the ranks continue, and `renew` closes remaining contenders."""

    def end(self) -> None:
        """End the other ranks' loops."""
        self._rank.store.set(f"order/{self._number}", json.dumps({"action": _END}))
        with suppress(Exception):
            dist.destroy_process_group()

    def _exchange(self, order: dict[str, Any], addressed: list[int]) -> list[Any]:
        number, store = self._number, self._rank.store
        self._number += 1
        others = range(1, self.world_size)
        # Publish the order before executing it here: it may be collective, so that rank 0 waits for the others.
        store.set(f"order/{number}", json.dumps({**order, "for": addressed}))
        replies = {0: self._rank.answer(order if 0 in addressed else _NOTHING)}
        keys = {rank: f"reply/{number}/{rank}" for rank in others}
        try:
            store.wait(list(keys.values()), self._rank.timeout)
        except dist.DistStoreError:
            raise WorkerError(f"no answer from every rank within {self._rank.timeout.total_seconds():g} s", 0) from None
        replies |= {rank: json.loads(store.get(key)) for rank, key in keys.items()}
        for key in (f"order/{number}", *keys.values()):
            store.delete_key(key)
        if errors := {rank: reply["error"] for rank, reply in sorted(replies.items()) if "error" in reply}:
            raise wrong_input(errors, addressed) or _raised(*next(iter(errors.items())))
        return [replies[rank]["result"] for rank in addressed]


def _raised(rank: int, error: dict[str, Any]) -> WorkerError:
    message = f"rank {rank} raised {error['type']}: {error['message']}"
    return WorkerError(message, rank, error["traceback"], error["type"], error["message"])


def do_nothing() -> None:
    """The call for ranks that are not addressed, since every rank answers every order."""


def serve(timeout: float, batch: bool) -> None:
    """Execute rank 0's calls until the run is over, then exit this process."""
    JobRank(timeout, batch).follow()
    dist.destroy_process_group()
    sys.exit(0)

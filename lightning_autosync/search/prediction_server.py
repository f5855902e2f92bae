"""The process that searches and predicts plans for a job that trains (see `strategy.tuning.predictor`).

Orders and replies are JSON objects, one a line, on its standard streams. It imports neither torch nor Lightning, and
opens no socket. It ends when its parent ends, also by SIGKILL, and after `IDLE` seconds without an order.

Jobs start it while they measure their links. So what takes long to import is imported late: `_load` does it, at a lower
priority than the measurement.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning_autosync.errors import MissingPackageError

if TYPE_CHECKING:
    from lightning_autosync.cluster import ClusterSpec
    from lightning_autosync.plan import SyncPlan
    from lightning_autosync.replay import Constants
    from lightning_autosync.workload import Workload

IDLE = 300.0
LOADING_PRIORITY, LOWEST_PRIORITY = 10, 19
_LOOK = 1.0
"""Seconds between two looks whether the parent lives. Its end does not close the pipe if forks of it are left."""
_CHUNK = 1 << 20
_SOURCE = "the order of a job"


def main(parent: int) -> None:
    """Answer orders until the process ``parent`` ends."""
    # A Ctrl-C at the terminal is for the job. With a session of its own, which has the same effect, it would have a
    # share of the cores of its own on Linux (`man 7 sched`, autogroups), whatever its priority.
    os.setpgid(0, 0)
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no reply
    loading = threading.Thread(target=_load, daemon=True)
    loading.start()
    begun, last, work = b"", time.monotonic(), threading.Thread()
    while os.getppid() == parent and time.monotonic() - last < IDLE:
        if work.is_alive():
            last = time.monotonic()
        if select.select([0], [], [], _LOOK)[0]:
            chunk = os.read(0, _CHUNK)
            if not chunk:
                break
            last = time.monotonic()
            *lines, begun = (begun + chunk).split(b"\n")
            for line in lines:
                # A thread of its own for each order, because a lowered priority cannot be raised again.
                work = threading.Thread(target=_reply, args=(line, replies, loading), daemon=True)
                work.start()
    os._exit(0)  # also while a thread computes


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to an order: ``plans`` as from `rank_plans`, or, if it has plans, their predicted ``seconds``.

    Args:
        order: ``workload``, ``cluster`` and ``constants`` as plain data, and ``beside``: whether other processes go
            first. With ``plans`` these are predicted, in at most ``seconds`` of CPU time; with ``overlaps``, the steps
            of plans that do not wait overlap with the next forward pass. ``seconds`` of the reply is empty if that did
            not suffice. Otherwise it has the options of `rank_plans`.
    """
    from lightning_autosync.cluster import ClusterSpec
    from lightning_autosync.plan import SyncPlan
    from lightning_autosync.replay import Constants
    from lightning_autosync.workload import Workload

    if order["beside"]:
        _give_way(LOWEST_PRIORITY)
    workload = Workload.from_dict(order["workload"], source=_SOURCE)
    cluster = ClusterSpec.from_dict(order["cluster"], source=_SOURCE)
    constants = Constants.from_dict(order["constants"], source=_SOURCE)
    if "plans" in order:
        plans = [SyncPlan.from_dict(plan, source=_SOURCE) for plan in order["plans"]]
        return {"seconds": _predict(workload, cluster, constants, plans, order["seconds"], order["overlaps"])}
    # It needs numba, and a reply says if that is missing.
    from lightning_autosync.search.selection import rank_plans

    known = [(name, SyncPlan.from_dict(plan, source=_SOURCE)) for name, plan in order["known"]]
    ranked = rank_plans(workload, cluster, constants=constants, known=known, **order["options"])
    return {"plans": [{**vars(each), "plan": each.plan.to_dict()} for each in ranked]}


def _predict(
    workload: Workload,
    cluster: ClusterSpec,
    constants: Constants,
    plans: Sequence[SyncPlan],
    limit: float,
    overlaps: bool,
) -> list[float]:
    """Predicted seconds of a step by plan; empty if it takes more CPU time than ``limit``."""
    from lightning_autosync.plan import compile_plan
    from lightning_autosync.replay import Replay, overlapped_step_time

    replay, begin, found = Replay(workload, cluster, constants), time.thread_time(), list[float]()
    for plan in plans:
        if time.thread_time() - begin > limit:
            return []
        schedule = compile_plan(plan, workload, cluster)
        if overlaps:
            found.append(overlapped_step_time(schedule, workload, replay))
        else:
            found.append(replay.predict(schedule).step_time)
    return found


def _load() -> None:
    """Load the code of searches, so that the first order need not wait for it."""
    if sys.platform == "linux":
        _give_way(LOADING_PRIORITY)
    with suppress(Exception):  # the reply to an order says what is missing
        from lightning_autosync.search.selection import warm_up

        warm_up()


def _give_way(priority: int) -> None:
    """Let other processes use the cores first. On Linux, priorities belong to threads; elsewhere to the process."""
    own = os.PRIO_PROCESS, threading.get_native_id() if sys.platform == "linux" else 0
    os.setpriority(*own, max(priority, os.getpriority(*own)))


def _reply(line: bytes, descriptor: int, loading: threading.Thread) -> None:
    """Answer an order, with an ``error`` or the name of what is ``missing`` if that fails."""
    loading.join()
    try:
        found = answer(json.loads(line))
    except MissingPackageError as error:
        found = {"missing": str(error)}
    except Exception as error:  # the job goes on with the plan that it has, and says why
        found = {"error": f"{type(error).__name__}: {error}"}
    rest = memoryview(json.dumps(found).encode() + b"\n")
    with suppress(BrokenPipeError):
        while rest:
            rest = rest[os.write(descriptor, rest) :]

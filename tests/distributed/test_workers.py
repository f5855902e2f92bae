"""The pool of worker processes: orders, errors, deaths, clean-up."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import worker_calls

from lightning_autosync.measure.launches.launch import LocalLaunch
from lightning_autosync.measure.workers import InputError, LaunchError, WorkerError, WorkerPool

HERE = Path(__file__).parent


def running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout
    return not state.startswith("Z") and bool(state.strip())


def wait_until_gone(pids: Iterable[int], seconds: float = 5.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_orders_reach_every_rank_and_results_come_back(pool):
    results = pool.run(worker_calls.echo, text='two\nlines "quoted"', numbers=[1, 2.5, None])
    assert results == [{"rank": rank, "text": 'two\nlines "quoted"', "numbers": [1, 2.5, None]} for rank in range(5)]


def test_orders_larger_than_a_pipe(pool):
    text = "x" * 300_000
    assert all(result["text"] == text for result in pool.run(worker_calls.echo, text=text))


def test_some_ranks_only_in_the_order_asked(pool):
    assert [result["rank"] for result in pool.run(worker_calls.echo, ranks=[3, 1])] == [3, 1]


def test_a_function_tells_how_far_it_is(pool):
    told = []
    results = pool.run(worker_calls.tell, report=lambda *words: told.append(words))
    assert results == ["fine"] * 5
    assert told == [(done, 3, "rank 0") for done in range(3)]
    with pytest.raises(WorkerError, match="no luck"):
        pool.run(worker_calls.tell, report=lambda *words: told.append(words), fails=True)
    assert len(told) == 6
    assert pool.run(worker_calls.echo) == [{"rank": rank} for rank in range(5)]


@pytest.mark.parametrize("ranks", [[0, 5], [1, 1], [-1]])
def test_ranks_that_do_not_exist_are_refused(pool, ranks):
    with pytest.raises(ValueError, match="expected different ranks from 0 to 4"):
        pool.run(worker_calls.echo, ranks=ranks)


def test_the_process_group_works(pool):
    assert pool.run(worker_calls.sum_of_ranks, elements=1000) == [10.0] * 5


def test_an_error_in_one_rank_leaves_the_pool_alive(pool):
    before = pool.live().pids
    with pytest.raises(WorkerError, match="rank 3 raised ValueError: no luck on 3") as caught:
        pool.run(worker_calls.fail_on, rank=3)
    assert caught.value.rank == 3
    assert "in fail_on" in caught.value.traceback
    assert "about to fail" in str(caught.value)
    assert pool.run(worker_calls.sum_of_ranks) == [10.0] * 5
    assert pool.live().pids == before


def test_wrong_input_is_told_once_and_without_a_traceback(pool):
    with pytest.raises(InputError, match=r"^model\.data: missing$") as caught:
        pool.run(worker_calls.refuse, by_rank=False)
    assert (caught.value.kind, caught.value.reason) == ("DocumentError", "model.data: missing")
    with pytest.raises(InputError, match=r"^model\.data: missing on rank 1; model\.data: missing on rank 3$"):
        pool.run(worker_calls.refuse, ranks=[1, 3], by_rank=True)
    assert pool.run(worker_calls.sum_of_ranks) == [10.0] * 5


def test_exit_in_an_order_is_an_error_not_an_end(pool):
    with pytest.raises(WorkerError, match="rank 2 raised SystemExit"):
        pool.run(worker_calls.exit_on, rank=2)
    assert pool.run(worker_calls.sum_of_ranks) == [10.0] * 5


def test_a_ctrl_c_is_left_to_the_caller(pool):
    assert pool.run(worker_calls.interrupt_yourself) == ["fine"] * 5


def test_functions_that_workers_cannot_import_are_refused_before_they_are_sent(pool):
    def local() -> None: ...

    for function in (local, lambda: None, partial(worker_calls.echo, text="a"), "worker_calls:echo"):
        with pytest.raises(TypeError, match="defined at the top level of a module"):
            pool.run(function)


def test_a_result_that_is_not_json_is_an_error_of_the_rank(pool):
    with pytest.raises(WorkerError, match="not JSON serializable"):
        pool.run(worker_calls.unspeakable)


def test_arguments_that_are_not_json_harm_nothing(pool):
    with pytest.raises(TypeError, match="not JSON serializable"):
        pool.run(worker_calls.echo, thing=object())
    assert pool.run(worker_calls.sum_of_ranks) == [10.0] * 5


def test_only_the_tail_of_the_output_is_kept(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(worker_calls.shout, ranks=[1], lines=20_000)
    assert "line 19999" in str(caught.value)
    assert len(str(caught.value)) < 20_000


def test_the_death_of_a_rank_is_told_at_once_and_closes_the_pool():
    with WorkerPool(2, extra_paths=[HERE]) as pool:
        pids = pool.pids
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 died \(killed by SIGKILL\)") as caught:
            pool.run(worker_calls.die_during_all_reduce, rank=1)
        assert time.monotonic() - start < 5.0
        assert caught.value.rank == 1
        assert pool.closed
        assert not wait_until_gone(pids)
        with pytest.raises(WorkerError, match="the pool is closed"):
            pool.run(worker_calls.echo)


@pytest.mark.slow
@pytest.mark.usefixtures("new_interpreters")
def test_a_rank_that_died_between_orders():
    with WorkerPool(2, extra_paths=[HERE]) as pool:
        os.kill(pool.pids[1], signal.SIGKILL)
        wait_until_gone([pool.pids[1]])
        with pytest.raises(WorkerError, match="rank 1 died"):
            pool.run(worker_calls.echo)
        assert pool.closed


def test_ranks_left_waiting_by_an_error_are_named(monkeypatch):
    monkeypatch.setattr("lightning_autosync.measure.workers.pool.GRACE", 1.0)
    with WorkerPool(2, extra_paths=[HERE]) as pool:
        with pytest.raises(WorkerError, match="no answer from rank 1 within 1 s after that error") as caught:
            pool.run(worker_calls.fail_before_all_reduce, rank=0)
        assert caught.value.rank == 0
        assert "no luck on 0" in caught.value.traceback
        assert pool.closed


@pytest.mark.usefixtures("new_interpreters")
def test_workers_that_do_not_start_are_told_with_the_limit_of_the_start():
    """A new interpreter takes longer than this to import the package."""
    with pytest.raises(WorkerError, match=r"no answer from rank 0 within 0\.1 s"):
        WorkerPool(1, timeout=0.1, order_timeout=math.inf)


@pytest.mark.slow
def test_a_silent_rank_is_named_with_the_place_where_it_hangs():
    with WorkerPool(2, extra_paths=[HERE], timeout=60.0) as pool:
        pool.timeout = 1.0
        pids = pool.pids
        with pytest.raises(WorkerError, match="no answer from rank 1 within 1 s") as caught:
            pool.run(worker_calls.sleep_on, rank=1, seconds=600.0)
        assert "in sleep_on" in str(caught.value)
        assert pool.closed
        assert not wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.usefixtures("new_interpreters")
def test_settings_reach_the_workers_and_children_end_with_them():
    with WorkerPool(1, extra_paths=[HERE], threads=2, environment={"COLOUR": "blue"}, scheduling="batch") as pool:
        (settings,) = pool.run(worker_calls.settings)
        (child,) = pool.run(worker_calls.start_child)
        pids = [*pool.pids, child]
        assert running(child)
    assert settings["threads"] == 2
    assert settings["colour"] == "blue"
    if hasattr(os, "SCHED_BATCH"):
        assert set(settings["policies"]) == {os.SCHED_BATCH}
    assert not wait_until_gone(pids)


def test_workers_that_cannot_start_say_why():
    class ClosedPlace(LocalLaunch):
        def command(self, rank, command, variables):
            return super().command(rank, ["sh", "-c", "echo no room here >&2; exit 7"], variables)

    with pytest.raises(WorkerError, match=r"rank 0 died \(exit status 7\)[^$]*no room here"):
        WorkerPool(2, launch=ClosedPlace())


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(LaunchError, match="allowed: 'batch' or None"):
        WorkerPool(1, scheduling="round robin")  # type: ignore[arg-type]


@pytest.mark.slow
def test_no_worker_survives_a_caller_that_is_killed():
    program = textwrap.dedent(
        """
        import os, sys, threading, time
        from lightning_autosync.measure.workers import WorkerPool

        pools = []
        thread = threading.Thread(target=lambda: pools.append(WorkerPool(1)))
        thread.start()
        thread.join()
        pools.append(WorkerPool(1))
        assert pools[0].run(os.getpid) == pools[0].pids  # outlives the thread that made it
        print(*[pid for pool in pools for pid in pool.pids], flush=True)
        time.sleep(600)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    caller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert caller.stdout is not None
    pids = [int(pid) for pid in caller.stdout.readline().split()]
    assert len(pids) == 2
    assert all(running(pid) for pid in pids)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert not wait_until_gone(pids)

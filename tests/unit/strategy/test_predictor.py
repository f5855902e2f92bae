"""Plans are searched and predicted in a process of its own, which is light, gives way and ends with the rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import MissingPackageError, PredictorError
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.search import prediction_server, selection
from lightning_autosync.search.prediction_server import LOWEST_PRIORITY
from lightning_autosync.search.selection import rank_plans
from lightning_autosync.strategy.tuning import predictor as module
from lightning_autosync.strategy.tuning.predictor import PREDICTOR, Predictor
from lightning_autosync.workload import Variable, Workload

PAIR = ClusterSpec.uniform(2, bandwidth="100 Mbit/s", name="pair")
WORKLOAD = Workload(
    name="three",
    variables=tuple(Variable(name=name, shape=(size,)) for name, size in [("a", 1000), ("b", 2000), ("c", 3000)]),
)
OPTIONS = {"seconds": 60.0, "keep": 3, "bucket_bytes": None}
PLANS = [builders.all_reduce(WORKLOAD, PAIR), builders.build("ps", WORKLOAD, PAIR)]


@pytest.fixture(scope="module")
def shared() -> Iterator[Predictor]:
    """A predictor for tests that leave it as it was."""
    made = Predictor()
    made.search(WORKLOAD, PAIR, Constants(), **OPTIONS)
    yield made
    made.end()


@pytest.fixture
def own() -> Iterator[Predictor]:
    made = Predictor()
    yield made
    made.end()


def predicted(predictor: Predictor, plans: list[SyncPlan] = PLANS, limit: float = 60.0) -> list[float]:
    return predictor.predict(WORKLOAD, PAIR, Constants(), plans, limit, patience=600.0)


def process_of(predictor: Predictor) -> Path:
    assert predictor._process is not None
    return Path("/proc", str(predictor._process.pid))


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 120.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def priorities(process: Path) -> list[int]:
    """The nice values of all threads of a process."""
    found = []
    for task in (process / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found.append(int((task / "stat").read_text().rpartition(")")[2].split()[16]))
    return found


def test_it_finds_and_predicts_what_this_process_would(shared: Predictor) -> None:
    found = shared.search(WORKLOAD, PAIR, Constants(), **OPTIONS)
    assert [(each["origin"], each["seconds"]) for each in found] == [
        (each.origin, each.seconds) for each in rank_plans(WORKLOAD, PAIR, constants=Constants(), **OPTIONS)
    ]
    replay = Replay(WORKLOAD, PAIR, Constants())
    assert predicted(shared) == [replay.predict(compile_plan(plan, WORKLOAD, PAIR)).step_time for plan in PLANS]


@pytest.mark.usefixtures("new_interpreters")
def test_one_process_without_torch_and_sockets_serves_all_orders(own: Predictor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        own.search(WORKLOAD, PAIR, Constants(), **OPTIONS)
        process = process_of(own)
        predicted(own)
        assert process_of(own) == process
        assert "torch" not in (process / "maps").read_text()
        assert not [name for one in (process / "fd").iterdir() if "socket" in (name := os.readlink(one))]


@pytest.mark.usefixtures("new_interpreters")
def test_its_priority_counts_beside_the_job_and_a_key_press_at_the_terminal_does_not_end_it(own: Predictor) -> None:
    predicted(own)
    number = int(process_of(own).name)
    assert os.getsid(number) == os.getsid(0)  # Linux shares the cores between sessions first
    assert os.getpgid(number) == number  # Ctrl-C goes to a process group


@pytest.mark.usefixtures("new_interpreters")
def test_it_loads_its_code_without_an_order(own: Predictor) -> None:
    own.start()
    process = process_of(own)
    assert until(lambda: "numba" in (process / "maps").read_text())
    own.search(WORKLOAD, PAIR, Constants(), **OPTIONS)
    own.start()
    assert process_of(own) == process


def test_its_code_is_loaded_beside_a_measurement_of_links_at_a_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def warm_up() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    monkeypatch.setattr(selection, "warm_up", warm_up)
    thread = threading.Thread(target=prediction_server._load)
    thread.start()
    thread.join()
    assert found == [max(prediction_server.LOADING_PRIORITY, os.nice(0))]
    early = "import sys, lightning_autosync.search.prediction_server; print('numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", early], text=True) == "False\n"


def test_predictions_beside_training_give_way_and_searches_do_not(own: Predictor) -> None:
    own.search(WORKLOAD, PAIR, Constants(), **OPTIONS)
    process = process_of(own)
    assert set(priorities(process)) == {os.nice(0)}
    waiting = threading.Thread(target=lambda: predicted(own, PLANS * 500))
    waiting.start()
    assert until(lambda: LOWEST_PRIORITY in priorities(process))
    waiting.join()
    assert until(lambda: set(priorities(process)) == {os.nice(0)})  # for the next search, which the ranks wait for


def test_predictions_that_take_too_long_are_none(shared: Predictor) -> None:
    assert predicted(shared, PLANS * 100, limit=0.0) == []


def test_the_error_of_a_prediction_is_told(shared: Predictor) -> None:
    with pytest.raises(PredictorError, match=r"^ClusterError: "):
        shared.predict(WORKLOAD, ClusterSpec.uniform(2), Constants(), PLANS, 60.0, 600.0)


def test_a_process_that_was_killed_is_told_and_started_again(own: Predictor) -> None:
    predicted(own, PLANS[:1])
    process = process_of(own)

    def kill_when_it_computes() -> None:
        if until(lambda: LOWEST_PRIORITY in priorities(process)):
            os.kill(int(process.name), signal.SIGKILL)

    threading.Thread(target=kill_when_it_computes).start()
    with pytest.raises(PredictorError, match=r"^the process that predicts plans failed: it ended with status -9"):
        predicted(own, PLANS * 500)
    assert predicted(own, PLANS[:1])


def test_a_process_that_cannot_start_tells_its_last_line(own: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRAM", "raise SystemExit('no such cluster')")
    with pytest.raises(PredictorError, match=r"failed: .*: no such cluster$"):
        predicted(own)


def test_a_late_reply_is_not_taken_for_that_of_the_next_order(own: Predictor) -> None:
    predicted(own)
    with pytest.raises(PredictorError, match="did not reply in time"):
        own.predict(WORKLOAD, PAIR, Constants(), PLANS * 200, 60.0, patience=0.01)
    assert len(predicted(own)) == len(PLANS)


@pytest.mark.usefixtures("new_interpreters")
def test_without_numba_it_says_what_is_missing(own: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRAM", f"import sys; sys.modules['numba'] = None; {module._PROGRAM}")
    with pytest.raises(MissingPackageError, match="numba"):
        own.search(WORKLOAD, PAIR, Constants(), **OPTIONS)


def test_it_ends_when_it_has_had_no_order_for_long(own: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = "from lightning_autosync.search import prediction_server as one; one.IDLE = 3.0; main(int(sys.argv[2]))"
    monkeypatch.setattr(module, "_PROGRAM", module._PROGRAM.replace("main(int(sys.argv[2]))", idle))
    predicted(own)
    assert own._process is not None
    assert own._process.wait(120.0) == 0
    assert predicted(own)  # by another process


def test_a_fork_of_this_process_leaves_it_alone() -> None:
    predicted(PREDICTOR)
    process = process_of(PREDICTOR)
    child = os.fork()
    if not child:
        PREDICTOR.end()
        os._exit(PREDICTOR._process is not None)
    assert os.waitpid(child, 0)[1] == 0
    predicted(PREDICTOR)
    assert process_of(PREDICTOR) == process


def test_it_ends_with_a_rank_that_was_killed_also_if_a_fork_of_it_lives() -> None:
    rank = textwrap.dedent(
        """
        import os, signal, sys, threading, time
        from lightning_autosync.cluster import ClusterSpec
        from lightning_autosync.replay import Constants
        from lightning_autosync.strategy.tuning.predictor import PREDICTOR
        from lightning_autosync.workload import Variable, Workload
        from lightning_autosync.plan import builders

        pair = ClusterSpec.uniform(2, bandwidth="100 Mbit/s")
        workload = Workload(name="one", variables=(Variable(name="a", shape=(1000,)),))
        plans = [builders.all_reduce(workload, pair)]
        order = workload, pair, Constants()
        PREDICTOR.predict(*order, plans, 60.0, 600.0)
        # It computes when the rank is killed.
        threading.Thread(target=lambda: PREDICTOR.predict(*order, plans * 50_000, 600.0, 600.0), daemon=True).start()
        time.sleep(0.3)
        process, reading = PREDICTOR._process.pid, PREDICTOR._process.stdin.fileno()
        kept = os.dup(reading)  # what a fork in C would keep
        if (fork := os.fork()) == 0:
            os.close(1)
            time.sleep(600)
        print(process, fork, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", rank], stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    process, fork = map(int, done.stdout.split())
    try:
        assert until(lambda: not _lives(process))
        assert _lives(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

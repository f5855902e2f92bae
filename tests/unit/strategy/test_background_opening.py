"""Plans are opened and closed beside the steps, in order, and errors reach the training."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_autosync.engine.waiting import SLICE
from lightning_autosync.errors import ExchangeError, OpeningError, PeerLost
from lightning_autosync.strategy.tuning.opening import LONGEST_REST, SHARE, BackgroundOpening, Rests, short_turns


class Resources:
    """Resources that note when they are closed."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def close(self) -> None:
        self._log.append(f"closed {self.name}")

    def release(self) -> Resources:
        self._log.append(f"released {self.name}")
        return self


def opening_of(reserve: Callable[[int], Any]) -> BackgroundOpening:
    return BackgroundOpening(lambda plan, rest: reserve(plan))


def settled(opening: BackgroundOpening) -> BackgroundOpening:
    assert opening._resources is not None
    wait([opening._resources], 10.0)
    return opening


def test_the_caller_goes_on_while_a_plan_is_opened() -> None:
    go = threading.Event()

    def reserve(plan: int) -> str:
        assert go.wait(10.0)
        return f"plan {plan} on {threading.current_thread().name}"

    opening = opening_of(reserve)
    opening.start(3)
    assert opening.is_under_way()
    assert opening.plan == 3
    go.set()
    assert not settled(opening).is_under_way()
    assert str(opening.take()).startswith("plan 3 on autosync-opening")
    assert opening.plan is None
    opening.close()


def test_what_was_closed_is_forgotten() -> None:
    opening = opening_of(lambda plan: Resources(str(plan), []))
    for number in range(20):
        opening.discard([Resources(str(number), [])])  # type: ignore[list-item]
        opening.start(number)
        settled(opening)
        opening.take()
    assert len(opening._closings) == 1
    opening.close()


def test_what_is_not_needed_is_closed_before_the_next_plan_is_opened() -> None:
    log: list[str] = []

    def reserve(plan: int) -> Resources:
        log.append(f"opened {plan}")
        return Resources(str(plan), log)

    opening, engine = opening_of(reserve), Resources("loser", log)
    opening.discard([engine])  # type: ignore[list-item]
    opening.start(1)
    settled(opening)
    assert log == ["released loser", "closed loser", "opened 1"]
    opening.close()
    assert log[3:] == ["closed 1"]


def test_a_plan_that_no_rank_can_open_is_told_when_it_is_taken() -> None:
    def reserve(_: int) -> Any:
        raise OpeningError("rank 1: no memory")

    opening = opening_of(reserve)
    opening.start(1)
    assert not settled(opening).is_under_way()
    with pytest.raises(OpeningError, match="no memory"):
        opening.take()
    opening.close()


def test_another_error_is_told_at_once_because_other_ranks_may_wait() -> None:
    def reserve(_: int) -> Any:
        raise ExchangeError("rank 1 is lost")

    opening = opening_of(reserve)
    opening.start(1)
    with pytest.raises(ExchangeError, match="lost"):
        settled(opening).is_under_way()
    opening.close()


@pytest.mark.parametrize("kind", [OpeningError, ExchangeError])
def test_buffers_of_a_plan_that_could_not_be_opened_are_freed_at_once(kind: type[Exception]) -> None:
    kept: list[weakref.ref[Any]] = []

    def reserve(_: int) -> Any:
        buffer = torch.zeros(10)
        kept.append(weakref.ref(buffer))
        raise kind("no memory")

    gc.disable()
    try:
        opening = opening_of(reserve)
        opening.start(1)
        settled(opening)
        with pytest.raises(kind) as caught:
            opening.take() if kind is OpeningError else opening.is_under_way()
        opening.close()
        del caught, opening
        assert kept[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("a test says so"), True),
        (ExchangeError("a test says so"), True),
        (OpeningError("rank 1: no memory"), False),
        (PeerLost(1, "it died"), False),
    ],
)
def test_a_plan_that_was_not_taken_tells_an_unexpected_error(error: Exception, told: bool) -> None:
    def reserve(_: int) -> Any:
        raise error

    opening = opening_of(reserve)
    opening.start(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opening.close()
    text = (
        f"further plan (number 2) was not ready when trials ended, because setting it up failed: {type(error).__name__}"
    )
    assert [text in str(each.message) for each in caught] == [True] * told


def test_an_error_that_training_was_told_is_not_told_again() -> None:
    def reserve(_: int) -> Any:
        raise MemoryError

    opening = opening_of(reserve)
    opening.start(2)
    with pytest.raises(MemoryError):
        settled(opening).is_under_way()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opening.close()


def test_an_error_of_closing_is_told_at_the_end() -> None:
    class Broken(Resources):
        def close(self) -> None:
            raise OSError("a test says so")

    opening = opening_of(lambda plan: None)
    opening.discard([Broken("one", [])])  # type: ignore[list-item]
    with pytest.raises(OSError, match="a test says so"):
        opening.close()


def test_a_thread_that_opens_a_plan_rests_for_most_of_the_time() -> None:
    found = list[float]()

    def work(plan: int, rest: Callable[[], None]) -> Any:
        for _ in range(5):
            begin, used = time.monotonic(), time.thread_time()
            while time.thread_time() - used < 0.004:
                pass
            worked = time.thread_time() - used
            rest()
            found.append(worked / (time.monotonic() - begin))

    opening = BackgroundOpening(work)
    opening.start(1)
    settled(opening)
    assert len(found) == 5
    assert all(share < 1.1 * SHARE for share in found)
    opening._resources = None
    opening.close()


def test_no_rest_is_so_long_that_other_ranks_ask_who_is_lost() -> None:
    ended = mock.Mock()
    rest, used = Rests(SHARE, ended), time.thread_time()
    while time.thread_time() - used < 0.05:
        pass
    rest()
    assert ended.wait.call_args == mock.call(LONGEST_REST)
    assert LONGEST_REST < SLICE


def test_it_does_not_rest_when_the_job_ends() -> None:
    worked, rested = threading.Event(), threading.Event()

    def work(plan: int, rest: Callable[[], None]) -> Any:
        used = time.thread_time()
        while time.thread_time() - used < 0.1:
            pass
        worked.set()
        rest()
        rested.set()
        raise OpeningError("a test says so")

    opening = BackgroundOpening(work)
    opening.start(1)
    assert worked.wait(10.0)
    opening.close()
    assert rested.is_set()
    assert opening._ended.is_set()


def test_threads_take_short_turns_within_the_context_only() -> None:
    usual = sys.getswitchinterval()
    with short_turns():
        assert sys.getswitchinterval() <= 0.001
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_contexts_that_overlap_restore_the_usual_turns() -> None:
    usual = sys.getswitchinterval()
    one, other = short_turns(), short_turns()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() <= 0.001
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(usual)

"""Who is at fault: what the first rank concludes, and what travels between two ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_autosync.engine import waiting
from lightning_autosync.engine.failure_detector import FailureDetector
from lightning_autosync.engine.inquiry import Inquiry, Verdict
from lightning_autosync.engine.waiting import explained, wait_for_ranks
from lightning_autosync.errors import ExchangeError, PeerLost
from lightning_autosync.strategy.process_group import GroupMembers, LossMonitor

ANSWER_TIMEOUT = 2.0


def inquiry(late: bool = True) -> Inquiry:
    """Of three ranks, all of which were asked at time 0."""
    found = Inquiry({1, 2}, ANSWER_TIMEOUT)
    assert found.ranks_to_ping(0.0) == [1, 2]
    assert found.ranks_to_ping(0.1) == []
    found.request(0.1, late, 1)
    return found


def test_who_does_not_answer_is_named_after_the_answer_timeout() -> None:
    found = inquiry()
    found.answered(1, 8.0)
    assert found.verdict(1.9) is None
    verdict = found.verdict(2.1)
    assert verdict is not None
    assert (verdict.rank, verdict.why[:18]) == (2, "it does not answer")


def test_all_who_do_not_answer_are_told_of() -> None:
    verdict = inquiry().verdict(2.1)
    assert verdict is not None
    assert verdict.rank == 1
    assert "ranks 2 do not answer either" in verdict.why


@pytest.mark.parametrize(("late", "rank"), [(True, 2), (False, None)])
def test_who_does_something_else_is_named_after_the_time_out_only(late: bool, rank: int | None) -> None:
    found = inquiry(late)
    found.answered(1, 8.0)
    found.answered(2, None)
    assert found.verdict(0.2) is None  # one that dies may close its connections one after the other
    verdict = found.verdict(1.0)
    assert verdict is not None
    assert verdict.rank == rank


def test_who_has_ended_is_named() -> None:
    found = inquiry()
    found.answered(1, 8.0)
    found.leave(2)
    assert found.verdict(1.0) == Verdict(2, "it ended without an error while other ranks continued")


@pytest.mark.parametrize("late", [True, False])
def test_where_nobody_is_at_fault_the_first_to_notice_is_named(late: bool) -> None:
    found = inquiry(late)
    found.answered(1, 8.0)
    found.answered(2, 8.0)
    found.request(0.2, late, 2)
    verdict = found.verdict(1.0)
    assert verdict is not None
    assert verdict.rank is None
    assert "rank 1" in verdict.why


def test_nothing_is_concluded_before_somebody_asks() -> None:
    assert Inquiry({1}, ANSWER_TIMEOUT).verdict(100.0) is None


@pytest.fixture
def ends() -> Iterator[tuple[FailureDetector, FailureDetector]]:
    """Both ends of two ranks in one process."""
    one, other = socket.socketpair()
    pair = FailureDetector(0, {1: one}, 4.0), FailureDetector(1, {0: other}, 4.0)
    yield pair
    for end in reversed(pair):
        end.close()


def wait_for_verdict(end: FailureDetector) -> Verdict:
    assert end._known.wait(20.0)
    assert end.verdict is not None
    return end.verdict


def end_training(end: FailureDetector) -> str:
    try:
        end.end_training()
    except ExchangeError as error:
        return str(error)
    return "ended"


def test_training_ends_where_all_ranks_have_ended_it(ends: tuple[FailureDetector, FailureDetector]) -> None:
    with ThreadPoolExecutor() as threads:
        for passes in (2, 0, 3):  # one job may train several times
            for end in ends:
                for _ in range(passes):
                    end.count_batch()
            assert list(threads.map(end_training, ends)) == ["ended", "ended"]
            for end in ends:
                end.check()


@pytest.mark.parametrize("longer", [0, 1])
def test_a_further_batch_than_others_had_is_an_error(
    ends: tuple[FailureDetector, FailureDetector], longer: int
) -> None:
    for end in (*ends, ends[longer]):
        end.count_batch()
    told = f"rank {1 - longer} had 1 batches until the end of training, but this rank ({longer}) is in batch 2"
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(end_training, ends[1 - longer])
        with pytest.raises(ExchangeError, match=re.escape(told)) as raised:
            wait_for_ranks(lambda seconds: bool(ends[longer].check()), "a test", 20.0)
        ends[longer].announce(raised.value)
        assert told in ended.result()


@pytest.mark.parametrize("longer", [0, 1])
def test_a_rank_that_ends_after_one_with_more_batches_is_an_error(
    ends: tuple[FailureDetector, FailureDetector], longer: int
) -> None:
    for end in (*ends, ends[longer]):
        end.count_batch()
    ends[longer].end_batches()
    while longer not in ends[0]._ends:
        time.sleep(0.01)
    ends[1 - longer].end_batches()
    with pytest.raises(ExchangeError, match=f"rank {1 - longer} had 1 batches"):
        wait_for_ranks(lambda seconds: bool(ends[longer].check()), "a test", 20.0)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_reaches_the_other(ends: tuple[FailureDetector, FailureDetector], failing: int) -> None:
    ends[failing].announce(ValueError("too small"))
    assert wait_for_verdict(ends[1 - failing]) == Verdict(failing, "it ended with ValueError: too small", True)
    with pytest.raises(PeerLost, match=f"rank {failing} is lost: it ended with ValueError: too small"):
        ends[1 - failing].check()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_end_that_closes_without_a_word_is_a_process_that_died(
    ends: tuple[FailureDetector, FailureDetector], failing: int
) -> None:
    ends[failing]._connections[1 - failing].socket.shutdown(socket.SHUT_RDWR)
    assert wait_for_verdict(ends[1 - failing]) == Verdict(failing, "its process has ended")


@pytest.mark.parametrize("leaving", [0, 1])
def test_who_takes_leave_is_not_at_fault_until_somebody_misses_it(
    ends: tuple[FailureDetector, FailureDetector], leaving: int
) -> None:
    ends[leaving].close()
    ends[1 - leaving].check()
    assert "it ended without an error while other ranks continued" in str(ends[1 - leaving].explain("a barrier failed"))


@pytest.mark.parametrize("asking", [0, 1])
def test_who_asks_after_the_time_out_is_not_named_itself(
    ends: tuple[FailureDetector, FailureDetector], asking: int
) -> None:
    """As after a backend's own error, which has ended the wait by then."""
    told = str(ends[asking].explain("a collective call failed: Timed out", late=True))
    assert told.startswith(f"rank {1 - asking} is lost: it is alive, but has not reached this collective call")


@pytest.mark.parametrize("nonsense", [b'[1, 2]\n{"ping"\n', b"[" * 10_000 + b"\n"])
def test_nonsense_ends_the_connection_only(ends: tuple[FailureDetector, FailureDetector], nonsense: bytes) -> None:
    ends[1]._connections[0].socket.send(nonsense)
    assert wait_for_verdict(ends[0]) == Verdict(1, "it sent data that is not a valid message")


def test_a_wait_ends_with_the_verdict(ends: tuple[FailureDetector, FailureDetector]) -> None:
    ends[0].announce(ValueError("too small"))
    with pytest.raises(PeerLost, match="rank 0 is lost"):
        wait_for_ranks(lambda seconds: bool(time.sleep(0.01)), "a message", 60.0)


def test_a_wait_in_vain_says_for_what_and_how_long() -> None:
    with pytest.raises(ExchangeError, match=r"a message: no answer from the other ranks in 0\.3 s"):
        wait_for_ranks(lambda seconds: bool(time.sleep(seconds)), "a message", 0.3)


def test_a_rank_waits_while_any_of_its_threads_does(ends: tuple[FailureDetector, FailureDetector]) -> None:
    one, other = ends[0].waiting(), ends[0].waiting()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert ends[0]._waiting_since is not None
    other.__exit__(None, None, None)
    assert ends[0]._waiting_since is None


def test_a_sigterm_ends_a_wait_that_does_not_end_by_itself(ends: tuple[FailureDetector, FailureDetector]) -> None:
    ends[1].terminate()
    with pytest.raises(ExchangeError, match="this rank got a SIGTERM"):
        wait_for_ranks(lambda seconds: bool(time.sleep(0.01)), "a message", 60.0)


def wait_for_error(end: FailureDetector, seconds: float = 5.0) -> str:
    """The error with which a wait of this rank ends; none if it goes on for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            end.check()
        except ExchangeError as error:
            return str(error)
        time.sleep(0.01)
    return ""


def test_who_ends_like_the_others_waits_for_them_until_they_are_gone(
    ends: tuple[FailureDetector, FailureDetector],
) -> None:
    ends[0].terminate()
    ends[0].fail(ValueError("too small"))
    wait_for_verdict(ends[1])
    ends[1].fail(ValueError("too small"))
    assert [wait_for_error(end, 0.3) for end in ends] == ["", ""]
    ends[1].close()
    assert wait_for_error(ends[0]) == (
        "the other ranks did not come to a collective call that this rank (0) made as it ended: it got a SIGTERM"
    )


def test_who_ends_without_an_error_of_its_own_lets_the_first_rank_finish_only(
    ends: tuple[FailureDetector, FailureDetector],
) -> None:
    """The first rank makes no more calls, and the other one ends after it."""
    ends[0].fail(ValueError("too small"))
    assert wait_for_error(ends[1]) == "rank 0 is lost: it ended with ValueError: too small"
    ends[1].fail(PeerLost(0, "it ended with ValueError: too small"))
    assert wait_for_error(ends[1], 0.3) == ""
    assert "did not come to a collective call that this rank (0) made" in wait_for_error(ends[0])
    ends[0].close()
    assert "rank 0 is lost" in wait_for_error(ends[1])


def test_who_waits_for_the_first_rank_ends_when_that_gives_up_its_hooks(
    ends: tuple[FailureDetector, FailureDetector],
) -> None:
    """The first rank's process lives on, and no teardown follows what its hook raises."""
    ends[1].fail(ValueError("too small"))
    why = "it ended with ValueError: too small"
    assert wait_for_error(ends[0]) == f"rank 1 is lost: {why}"
    ends[0].fail(PeerLost(1, why))
    assert wait_for_error(ends[1], 1.5 * ends[1].answer_timeout) == ""  # the first rank writes a checkpoint
    assert wait_for_error(ends[0]) == f"rank 1 is lost: {why}"
    called = "the other ranks did not come to a collective call that this rank (1) made as it ended"
    assert wait_for_error(ends[1]) == f"{called}: {why}"


@pytest.mark.parametrize("failing", [0, 1])
def test_who_ends_with_an_error_does_not_wait_for_one_that_does_not_answer(failing: int) -> None:
    """As one that is stopped: its connections stay open."""
    one, other = socket.socketpair()
    end = FailureDetector(failing, {1 - failing: one}, 4.0)
    try:
        end.fail(ValueError("too small"))
        assert wait_for_error(end, 0.5 * end.answer_timeout) == ""
        assert f"rank {1 - failing} is lost: it does not answer" in wait_for_error(end)
    finally:
        end.close()
        other.close()


def test_who_ends_with_an_error_does_not_wait_for_one_that_died(
    ends: tuple[FailureDetector, FailureDetector],
) -> None:
    ends[1]._connections[0].socket.shutdown(socket.SHUT_RDWR)
    wait_for_verdict(ends[0])
    ends[0].fail(ValueError("too small"))
    with pytest.raises(PeerLost, match="its process has ended"):
        ends[0].check()


def test_an_interrupt_from_the_keyboard_ends_ranks_between_different_calls(
    ends: tuple[FailureDetector, FailureDetector],
) -> None:
    for end in ends:
        end.fail(KeyboardInterrupt())
    assert "it ended with KeyboardInterrupt" in wait_for_error(ends[0])


def test_without_a_monitor_an_error_stays_what_it_is() -> None:
    error = ExchangeError("lost the connection to rank 1")
    assert explained(error) is error
    assert type(explained("why")) is ExchangeError


def test_torch_is_left_alone_when_all_are_closed(ends: tuple[FailureDetector, FailureDetector]) -> None:
    assert dist.Work.wait is waiting._wait
    for end in ends:
        end.close()
    assert dist.Work.wait is waiting._torch_wait


@pytest.mark.parametrize("backend", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_backend_of_gpus_is_left_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes a wait of limited time for one that blocks, and aborts the group at its end."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_pg_backend_config", {None: backend})
    with waiting.monitored_by(LossMonitor("a step", GroupMembers(1, dict, lambda _: None, 4.0))):
        assert dist.Work.wait is waiting._torch_wait


def test_no_work_waits_in_slices_where_it_may_be_of_a_group_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[Any, ...]] = []
    groups = {"default": "cpu:gloo,cuda:gloo"}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_pg_backend_config", groups)
    monkeypatch.setattr(waiting, "_torch_wait", lambda _, *limit: waits.append(limit))
    work = SimpleNamespace(_get_op_type=lambda: -1)
    with waiting.monitored_by(LossMonitor("a step", GroupMembers(1, dict, lambda _: None, 4.0))):
        waiting._wait(work)
        groups["made later"] = "cuda:nccl"
        waiting._wait(work)
    assert [len(limit) for limit in waits] == [1, 0]


def test_a_forked_child_does_not_hide_that_its_parent_died() -> None:
    """As a loader's workers, which outlive it by seconds."""
    one, other = socket.socketpair()
    told, tell = os.pipe()
    first = FailureDetector(0, {1: one}, 4.0)
    rank = os.fork()
    if rank == 0:
        second = FailureDetector(1, {0: other}, 4.0)
        worker = os.fork()
        if worker == 0:
            time.sleep(60.0)
            os._exit(0)
        os.write(tell, worker.to_bytes(4, "big"))
        os.kill(os.getpid(), signal.SIGKILL if second is not None else 0)
    other.close()
    try:
        assert wait_for_verdict(first) == Verdict(1, "its process has ended")
    finally:
        os.waitpid(rank, 0)
        os.kill(int.from_bytes(os.read(told, 4), "big"), signal.SIGKILL)
        os.close(told)
        os.close(tell)
        first.close()

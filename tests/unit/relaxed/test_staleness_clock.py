"""The clock of bounded staleness: its bound holds in every schedule, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest
from sweeps import SHARE

from lightning_autosync.relaxed.server.clock import StalenessClock

SCHEDULES = round(SHARE * 10_000)


class Schedule:
    """Workers that push in a random order, some of which get lost, end or come back.

    It keeps its own record of what each read lacked, without looking at the clock.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.staleness = self.random.randint(0, 4)
        self.workers = list(range(self.random.randint(1, 5)))
        self.clock = StalenessClock(self.workers, self.staleness)
        self.pushed = dict.fromkeys(self.workers, 0)
        self.computing = set(self.workers)
        self.waiting: set[int] = set()

    def run(self, events: int) -> None:
        for _ in range(events):
            chance = self.random.random()
            if chance < 0.03 and len(self.pushed) > 1:
                self.lose(self.random.choice(sorted(self.pushed)))
            elif chance < 0.05 and len(self.pushed) < len(self.workers):
                self.come_back(self.random.choice([worker for worker in self.workers if worker not in self.pushed]))
            else:
                self.push()
            self.wake()

    def push(self) -> None:
        # Nobody computes only if all wait, and then somebody was forgotten.
        assert self.computing
        # A favourite makes for long runs of one worker.
        worker = self.random.choice(sorted(self.computing)) if self.random.random() < 0.5 else min(self.computing)
        self.computing.remove(worker)
        self.waiting.add(worker)
        self.pushed[worker] += 1
        assert self.clock.advance(worker, 0.5) == self.pushed[worker]

    def wake(self) -> None:
        slowest = min(self.pushed.values())
        for worker in sorted(self.waiting):
            if self.clock.may_read(worker):
                # The invariant: nothing that is `staleness` steps old is missing from what it reads.
                assert all(count >= self.pushed[worker] - self.staleness for count in self.pushed.values())
                self.waiting.remove(worker)
                self.computing.add(worker)
            else:
                assert self.pushed[worker] - slowest > self.staleness
        assert max(self.pushed.values()) - slowest <= self.staleness + 1

    def lose(self, worker: int) -> None:
        self.clock.drop(worker)
        self.computing.discard(worker)
        self.waiting.discard(worker)
        del self.pushed[worker]

    def come_back(self, worker: int) -> None:
        self.pushed[worker] = min(self.pushed.values())
        assert self.clock.add(worker) == self.pushed[worker]
        self.waiting.add(worker)


def test_the_bound_holds_in_random_schedules() -> None:
    for seed in range(SCHEDULES):
        Schedule(seed).run(60)


def test_without_staleness_all_march_in_step() -> None:
    clock = StalenessClock([0, 1, 2], 0)
    clock.advance(0, 0.5)
    clock.advance(2, 0.5)
    assert not clock.may_read(0)
    clock.advance(1, 0.5)
    assert all(clock.may_read(party) for party in clock.parties)


def test_asynchronous_parties_never_wait() -> None:
    clock = StalenessClock([0, 1], None)
    for _ in range(100):
        clock.advance(0, 0.5)
        assert clock.may_read(0)


def test_a_lost_party_is_waited_for_no_longer() -> None:
    clock = StalenessClock([0, 1], 1)
    clock.advance(0, 0.5)
    clock.advance(0, 0.5)
    assert not clock.may_read(0)
    clock.drop(1)
    assert clock.may_read(0)
    assert clock.parties == (0,)
    with pytest.raises(KeyError):
        clock.advance(1, 0.5)


def test_a_barrier_brings_all_to_the_furthest_step() -> None:
    clock = StalenessClock([0, 1], 3)
    for _ in range(3):
        clock.advance(1, 0.5)
    assert clock.align() == 3
    assert clock.steps == {0: 3, 1: 3}
    assert clock.progress == 1.5


def test_a_restored_clock_goes_on() -> None:
    clock = StalenessClock([0, 1, 2], 2)
    clock.restore(5, 4.75)
    assert clock.steps == {0: 5, 1: 5, 2: 5}
    assert clock.progress == 4.75

"""Inside a worker: one training by one method."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.lab.convergence.course import Course, judge
from lightning_autosync.lab.convergence.ending import Ending
from lightning_autosync.lab.convergence.settings import Method
from lightning_autosync.lab.convergence.tasks import AnyTask, Task, loss
from lightning_autosync.lab.convergence.ways import Way, open_way
from lightning_autosync.measure.conditions import bytes_sent
from lightning_autosync.measure.models.straggler import Straggler, StragglerSettings
from lightning_autosync.plan import SyncPlan
from lightning_autosync.workload import Workload

_TASK: TypeAdapter[Task] = TypeAdapter(AnyTask)


@dataclass(frozen=True)
class Budget:
    """How long to train, and how fast.

    Attributes:
        pace: seconds of a step's computation; None lets it take what it takes.
        steps: of each worker; None trains until ``limit`` or ``target``.
        limit: seconds.
        target: metric at which a training without fixed steps may end, in percent.
        patience: looks in a row at which rank 0's own model must have reached it.
        interval: seconds between looks.
    """

    pace: float | None
    steps: int | None
    limit: float | None
    target: float | None
    patience: int
    interval: float


def train(
    task: dict[str, Any],
    method: dict[str, Any],
    plan: dict[str, Any],
    workload: dict[str, Any],
    cluster: dict[str, Any],
    straggler: dict[str, Any],
    budget: dict[str, Any],
    rate: float,
    momentum: float,
    seed: int,
    key: str,
    timeout: float,
) -> dict[str, Any]:
    """Train once; what this rank found.

    Args:
        straggler: who is slow; ``seed`` is that of its pauses too.
        seed: of the initial weights, and with the rank of the mini-batches.
        key: unique in the life of the process group.
    """
    made = _TASK.validate_python(task)
    torch.manual_seed(seed)
    module = made.module()
    store = dist.PrefixStore(key, dist.distributed_c10d._get_default_store())
    way = open_way(
        Method.model_validate(method),
        module,
        rate,
        momentum,
        SyncPlan.from_dict(plan),
        Workload.from_dict(workload),
        ClusterSpec.from_dict(cluster),
        store,
        timeout,
    )
    slowness = Straggler(StragglerSettings.model_validate({**straggler, "seed": seed}), dist.get_rank())
    training = _Training(way, made, Course(module, budget["interval"]), slowness, Budget(**budget), store, seed)
    found = _run_or_abandon(way, training)
    moments = training.common_moments()
    averages = training.course.averages(moments)
    # Each rank judges its share of the moments.
    own = range(dist.get_rank(), len(moments), dist.get_world_size())
    scores = judge(module, averages[own.start :: own.step], made.accuracy)
    return {**found, "moments": [moments[place] for place in own], "scores": scores}


def _run_or_abandon(way: Way, training: _Training) -> dict[str, Any]:
    try:
        return training.run()
    except BaseException:
        # The others may be anywhere: nothing that waits for them.
        way.abandon()
        raise


class _Training:
    """The loop of one rank."""

    def __init__(
        self,
        way: Way,
        task: Task,
        course: Course,
        straggler: Straggler,
        budget: Budget,
        store: dist.Store,
        seed: int,
    ) -> None:
        self._way, self._task, self.course, self._straggler, self._budget = way, task, course, straggler, budget
        self._rank = dist.get_rank()
        self._ending = Ending(store, self._rank, way.lock_step, budget.steps)
        self._inputs, self._labels = task.training()
        self._generator = torch.Generator().manual_seed(1_000_003 * seed + self._rank)
        self._passed = 0
        self._next_look = 0.0
        self._exchange = 0.0

    def run(self) -> dict[str, Any]:
        """Train, meet the others, and leave them."""
        self._way.start()
        dist.barrier()
        sent = bytes_sent()
        self.course.begin()
        self._begin = time.perf_counter()
        steps = 0
        while not self._ending.reached(steps):
            self._step(steps)
            steps += 1
        self._seconds = self.course.end()
        after = bytes_sent()
        self._way.meet()
        state_bytes = self._way.state_bytes
        self._way.close()
        return {
            "steps": steps,
            "seconds": self._seconds,
            "waiting": self._exchange / self._seconds,
            "final": self._task.accuracy(self._module) if self._rank == 0 else None,
            "bytes_sent": None if sent is None or after is None else after - sent,
            "state_bytes": state_bytes,
            "groups": [group._asdict() for group in self._way.groups],
        }

    def common_moments(self) -> list[float]:
        """Times at which to judge the average, from 0 to when the last rank ended; the same on all ranks."""
        longest = torch.tensor(self._seconds, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        looks = int(float(longest) / self._budget.interval)
        return [number * self._budget.interval for number in range(looks + 1)] + [float(longest)]

    @property
    def _module(self) -> torch.nn.Module:
        return self.course.module

    def _step(self, number: int) -> None:
        begin = time.perf_counter()
        self._way.optimizer.zero_grad()
        chosen = torch.randint(len(self._inputs), (self._task.batch,), generator=self._generator)
        value = loss(self._way.forward, self._inputs[chosen], self._labels[chosen])
        # As long as computation lasts by the clock, looking costs nothing.
        if self._rank == 0 and self._budget.limit is not None:
            self._look(number)
        if self._budget.pace is not None:
            self._sleep_until(begin + self._budget.pace + self._straggler.delay(self._budget.pace))
        computed = time.perf_counter()
        value.backward()
        if not self._way.lock_step:
            computed = time.perf_counter()  # backward has exchanged nothing
        self._way.step(self._task.batch)
        self._exchange += time.perf_counter() - computed
        self.course.look()

    def _look(self, step: int) -> None:
        """Rank 0: shall this step be the last?"""
        elapsed = time.perf_counter() - self._begin
        assert self._budget.limit is not None
        if elapsed >= self._budget.limit:
            self._ending.announce(step)
        if self._budget.target is None or elapsed < self._next_look:
            return
        self._next_look = elapsed + self._budget.interval
        self._passed = self._passed + 1 if self._task.accuracy(self._module) >= self._budget.target else 0
        if self._passed >= self._budget.patience:
            self._ending.announce(step)

    @staticmethod
    def _sleep_until(deadline: float) -> None:
        left = deadline - time.perf_counter()
        if left > 0:
            time.sleep(left)

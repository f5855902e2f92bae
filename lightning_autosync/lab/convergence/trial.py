"""Inside a worker: one training with one method.

The metric over time is evaluated after the training. Evaluation during training would slow down a rank, and the
replicas of relaxed methods differ. So each rank keeps copies of its parameters with their times, and the average over
ranks is evaluated at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.lab.convergence.methods import PlannedJob, SyncMethod, open_method
from lightning_autosync.lab.convergence.settings import MethodSettings
from lightning_autosync.lab.convergence.tasks import AnyTask, Task, loss
from lightning_autosync.measure.models.straggler import Straggler, StragglerSettings
from lightning_autosync.measure.tcp_info import bytes_sent
from lightning_autosync.plan import SyncPlan
from lightning_autosync.workload import Workload


class ParameterHistory:
    """Copies of one rank's parameters over time.

    Args:
        module: module whose parameters are copied. A copy takes microseconds for some ten thousand elements.
        interval: minimum seconds between copies.
    """

    def __init__(self, module: nn.Module, interval: float) -> None:
        self.module = module
        self._interval = interval
        self._times: list[float] = []
        self._copies: list[Tensor] = []
        self._begin = 0.0

    def begin(self) -> None:
        """Start the clock; call it on all ranks at the same time."""
        self._begin = time.perf_counter()
        self._keep(0.0)

    def look(self) -> None:
        """Keep a copy if the interval is over; call this after each step."""
        now = time.perf_counter() - self._begin
        if now >= self._times[-1] + self._interval:
            self._keep(now)

    def end(self) -> float:
        """Keep the last copy; returns the seconds since `begin`."""
        now = time.perf_counter() - self._begin
        self._keep(now)
        return now

    def averages(self, moments: Sequence[float]) -> Tensor:
        """[moments, parameters] mean over ranks of each rank's latest copy at every moment; collective."""
        places = torch.searchsorted(torch.tensor(self._times), torch.tensor(moments), right=True) - 1
        found = torch.stack([self._copies[place] for place in places.tolist()])
        dist.all_reduce(found)
        return found / dist.get_world_size()

    def _keep(self, now: float) -> None:
        self._times.append(now)
        self._copies.append(parameters_to_vector(self.module.parameters()).detach().clone())


def judge(module: nn.Module, vectors: Tensor, metric: Callable[[nn.Module], float]) -> list[float]:
    """The metric of ``module`` with each of the parameter ``vectors``; the module keeps the last vector."""
    scores = []
    for vector in vectors:
        vector_to_parameters(vector, module.parameters())
        scores.append(metric(module))
    return scores


def time_to(target: float, moments: Sequence[float], scores: Sequence[float]) -> float | None:
    """The first moment at which the score is at least ``target``; None if it never is."""
    return next((moment for moment, score in zip(moments, scores, strict=True) if score >= target), None)


_LAST = "last"


class TrainingEnd:
    """Decides on one rank when its training ends; consulted before each step.

    Rank 0 announces its current step as the last. With synchronous methods the other ranks make that step too: none can
    be further, since no rank can finish the step without rank 0. With other methods they stop as soon as they read the
    announcement.

    Args:
        store: store for this training only.
        synchronous: whether all ranks must make the same number of steps.
        steps: number of steps of each rank; None lets rank 0 decide.
    """

    def __init__(self, store: dist.Store, rank: int, synchronous: bool, steps: int | None) -> None:
        self._store, self._rank, self._lock_step, self._steps = store, rank, synchronous, steps
        self._last: int | None = None

    def announce(self, step: int) -> None:
        """Make ``step`` (counted from 0) the last; rank 0 calls this before that step."""
        if self._last is None:
            self._last = step
            self._store.set(_LAST, str(step))

    def reached(self, step: int) -> bool:
        """Whether the training is over before ``step`` (counted from 0)."""
        if self._steps is not None:
            return step >= self._steps
        if self._rank != 0 and self._last is None and self._store.check([_LAST]):
            self._last = int(self._store.get(_LAST))
        if self._last is None:
            return False
        return step > self._last or (self._rank != 0 and not self._lock_step)


_TASK: TypeAdapter[Task] = TypeAdapter(AnyTask)


@dataclass(frozen=True)
class TrainingBudget:
    """How long to train, and how fast; fields are as in `ConvergenceSettings`."""

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
    """Train once.

    Args:
        straggler: which ranks are slow; ``seed`` also draws their pauses.
        seed: seed of the initial weights and, together with the rank, of the mini-batches.
        key: unique key in the life of the process group.
    """
    made = _TASK.validate_python(task)
    torch.manual_seed(seed)
    module = made.module()
    store = dist.PrefixStore(key, dist.distributed_c10d._get_default_store())
    job = PlannedJob(SyncPlan.from_dict(plan), Workload.from_dict(workload), ClusterSpec.from_dict(cluster), timeout)
    synchronization = open_method(MethodSettings.model_validate(method), module, rate, momentum, job, store)
    slowness = Straggler(StragglerSettings.model_validate({**straggler, "seed": seed}), dist.get_rank())
    history = ParameterHistory(module, budget["interval"])
    training = _Training(synchronization, made, history, slowness, TrainingBudget(**budget), store, seed)
    found = _run_or_abandon(synchronization, training)
    moments = training.common_moments()
    averages = training.history.averages(moments)
    # Each rank judges its share of the moments.
    own = range(dist.get_rank(), len(moments), dist.get_world_size())
    scores = judge(module, averages[own.start :: own.step], made.accuracy)
    return {**found, "moments": [moments[place] for place in own], "scores": scores}


def _run_or_abandon(method: SyncMethod, training: _Training) -> dict[str, Any]:
    try:
        return training.run()
    except BaseException:
        # The other ranks may be anywhere in their training, so waiting for them could hang.
        method.abandon()
        raise


class _Training:
    """The training loop of one rank."""

    def __init__(
        self,
        method: SyncMethod,
        task: Task,
        history: ParameterHistory,
        straggler: Straggler,
        budget: TrainingBudget,
        store: dist.Store,
        seed: int,
    ) -> None:
        self._method, self._task, self.history, self._straggler, self._budget = method, task, history, straggler, budget
        self._rank = dist.get_rank()
        self._end = TrainingEnd(store, self._rank, method.synchronous, budget.steps)
        self._inputs, self._labels = task.training()
        # A factor above any number of ranks, so that no two pairs of seed and rank draw the same mini-batches.
        self._generator = torch.Generator().manual_seed(1_000_003 * seed + self._rank)
        self._passed = 0
        self._next_evaluation = 0.0
        self._exchange = 0.0

    def run(self) -> dict[str, Any]:
        """Train, and return what this rank measured."""
        self._method.start()
        dist.barrier()
        sent = bytes_sent()
        self.history.begin()
        self._begin = time.perf_counter()
        steps = 0
        while not self._end.reached(steps):
            self._step(steps)
            steps += 1
        self._seconds = self.history.end()
        after = bytes_sent()
        self._method.finish()
        state_bytes = self._method.state_bytes
        self._method.close()
        return {
            "steps": steps,
            "seconds": self._seconds,
            "waiting": self._exchange / self._seconds,
            "final": self._task.accuracy(self._module) if self._rank == 0 else None,
            "bytes_sent": None if sent is None or after is None else after - sent,
            "state_bytes": state_bytes,
            "groups": [group._asdict() for group in self._method.groups],
        }

    def common_moments(self) -> list[float]:
        """Times at which to evaluate the average, from 0 to the end of the last rank; collective."""
        longest = torch.tensor(self._seconds, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        looks = int(float(longest) / self._budget.interval)
        return [number * self._budget.interval for number in range(looks + 1)] + [float(longest)]

    @property
    def _module(self) -> torch.nn.Module:
        return self.history.module

    def _step(self, number: int) -> None:
        begin = time.perf_counter()
        self._method.optimizer.zero_grad()
        chosen = torch.randint(len(self._inputs), (self._task.batch,), generator=self._generator)
        value = loss(self._method.forward, self._inputs[chosen], self._labels[chosen])
        # With paced computation the evaluation costs no extra time: it happens within the step's pause.
        if self._rank == 0 and self._budget.limit is not None:
            self._evaluate(number)
        if self._budget.pace is not None:
            self._sleep_until(begin + self._budget.pace + self._straggler.delay(self._budget.pace))
        computed = time.perf_counter()
        value.backward()
        if not self._method.synchronous:
            computed = time.perf_counter()  # backward without exchange counts as computation
        self._method.step(self._task.batch)
        self._exchange += time.perf_counter() - computed
        self.history.look()

    def _evaluate(self, step: int) -> None:
        """On rank 0: announce the end if the time limit or the target is reached."""
        elapsed = time.perf_counter() - self._begin
        assert self._budget.limit is not None
        if elapsed >= self._budget.limit:
            self._end.announce(step)
        if self._budget.target is None or elapsed < self._next_evaluation:
            return
        self._next_evaluation = elapsed + self._budget.interval
        self._passed = self._passed + 1 if self._task.accuracy(self._module) >= self._budget.target else 0
        if self._passed >= self._budget.patience:
            self._end.announce(step)

    @staticmethod
    def _sleep_until(deadline: float) -> None:
        left = deadline - time.perf_counter()
        if left > 0:
            time.sleep(left)

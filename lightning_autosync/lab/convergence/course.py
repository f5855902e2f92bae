"""How good the replicas' average was at each moment of a training, found out afterwards.

Evaluating during training would slow the one rank that does it, and relaxed replicas differ; so each rank keeps
copies of its parameters with their times, and the average over ranks is judged when all is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Course:
    """Copies of one rank's parameters over time.

    Args:
        module: whose parameters are kept; some ten thousand elements, so that a copy takes microseconds.
        interval: seconds between copies, at least.
    """

    def __init__(self, module: nn.Module, interval: float) -> None:
        self.module = module
        self._interval = interval
        self._times: list[float] = []
        self._copies: list[Tensor] = []
        self._begin = 0.0

    def begin(self) -> None:
        """The clock starts; call it on all ranks together."""
        self._begin = time.perf_counter()
        self._keep(0.0)

    def look(self) -> None:
        """After a step: keep a copy if it is time."""
        now = time.perf_counter() - self._begin
        if now >= self._times[-1] + self._interval:
            self._keep(now)

    def end(self) -> float:
        """Keep the last copy; seconds since `begin`."""
        now = time.perf_counter() - self._begin
        self._keep(now)
        return now

    def averages(self, moments: Sequence[float]) -> Tensor:
        """The mean over ranks of each rank's latest copy at every moment: [moments, parameters]; collective."""
        places = torch.searchsorted(torch.tensor(self._times), torch.tensor(moments), right=True) - 1
        found = torch.stack([self._copies[place] for place in places.tolist()])
        dist.all_reduce(found)
        return found / dist.get_world_size()

    def _keep(self, now: float) -> None:
        self._times.append(now)
        self._copies.append(parameters_to_vector(self.module.parameters()).detach().clone())


def judge(module: nn.Module, vectors: Tensor, metric: Callable[[nn.Module], float]) -> list[float]:
    """The metric of ``module`` with each of the parameter vectors; the module keeps the last."""
    scores = []
    for vector in vectors:
        vector_to_parameters(vector, module.parameters())
        scores.append(metric(module))
    return scores


def time_to(target: float, moments: Sequence[float], scores: Sequence[float]) -> float | None:
    """The first moment at which the score is at least ``target``; None if it never is."""
    return next((moment for moment, score in zip(moments, scores, strict=True) if score >= target), None)

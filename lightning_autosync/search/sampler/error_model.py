"""The simulator's errors: a Gaussian process on the logarithm of measured over estimated time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy
from scipy.linalg import cho_solve, cholesky, solve_triangular

from lightning_autosync.search.features import POOLED, Floats, squared_distance

_OFFSET = 3.0
"""Standard deviation of the error that all plans of one workload and cluster share, on the log scale."""


@dataclass(frozen=True)
class Scales:
    """Hyperparameters of the process; deviations are standard deviations of the logarithm of a time.

    Attributes:
        shares: deviation of the linear part, over the shares of bytes that each method carries.
        local: deviation of the part that only similar plans share.
        reach: distance over which plans are similar (length scale).
        noise: deviation of a measurement.
        task_correlation: correlation of the same plan's errors on different workloads or clusters.
    """

    shares: float = 0.1
    local: float = 0.1
    reach: float = 0.7
    noise: float = 0.02
    task_correlation: float = 0.5


class ErrorModel:
    """A Gaussian process over plan features with a linear and a local part. The evidence chooses its scales on a grid.

    Errors on other workloads and clusters (tasks) count according to their correlation with this task's errors so far.
    So misleading sources lose their influence.
    """

    def __init__(self) -> None:
        self._scales = Scales()
        self._fitted_to = 0
        self._known: tuple[Floats, Floats] | None = None
        self._factor: Floats = numpy.zeros((0, 0))
        self._weights: Floats = numpy.zeros(0)

    def fit(self, features: Floats, errors: Floats, tasks: Floats) -> None:
        """Condition on observed errors.

        Args:
            features: [n, features] features of the plans; n is at least 1.
            errors: [n] logarithms of measured over estimated seconds.
            tasks: [n] number of each plan's workload and cluster; 0 is the task of the search.
        """
        parts = _KernelParts.between(features, tasks, features, tasks)
        # The grid costs a Cholesky factorization for each point, so choose scales only after enough new errors.
        if abs(len(errors) - self._fitted_to) >= max(4, self._fitted_to // 8):
            grid = _grid(len(set(tasks.tolist())) > 1)
            self._scales = max(grid, key=lambda scales: _evidence(scales, parts, errors))
            self._fitted_to = len(errors)
        self._known = features, tasks
        self._factor = _factor(self._scales, parts)
        self._weights = cho_solve((self._factor, True), errors)

    def forget_scales(self) -> None:
        """Choose scales again at the next `fit`, even after few new errors."""
        self._fitted_to = 0

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        """[n] mean and [n] standard deviation of the errors of plans, for the task of the search."""
        prior = _OFFSET**2 + self._scales.shares**2 * (features[:, :POOLED] ** 2).sum(axis=1) + self._scales.local**2
        if self._known is None:
            return numpy.zeros(len(features)), numpy.sqrt(prior)
        across = _KernelParts.between(features, numpy.zeros(len(features)), *self._known).kernel(self._scales)
        explained = solve_triangular(self._factor, across.T, lower=True)
        variance = numpy.maximum(prior - (explained**2).sum(axis=0), 1e-8)  # rounding may make it negative
        return across @ self._weights, numpy.sqrt(variance)


@dataclass(frozen=True)
class _KernelParts:
    """The inputs of the kernel, arrays [n, m]: inner products, squared distances, and equality of tasks."""

    products: Floats
    distances: Floats
    same_task: Any

    @classmethod
    def between(cls, one: Floats, tasks: Floats, other: Floats, other_tasks: Floats) -> _KernelParts:
        products = one[:, :POOLED] @ other[:, :POOLED].T
        return cls(products, squared_distance(one, other), tasks[:, None] == other_tasks[None, :])

    def kernel(self, scales: Scales) -> Floats:
        local = scales.local**2 * numpy.exp(-self.distances / (2 * scales.reach**2))
        correlation = numpy.where(self.same_task, 1.0, scales.task_correlation)
        kernel: Floats = self.same_task * _OFFSET**2 + correlation * (scales.shares**2 * self.products + local)
        return kernel


def _factor(scales: Scales, parts: _KernelParts) -> Floats:
    """The lower Cholesky factor of the covariance of measured errors."""
    covariance = parts.kernel(scales)
    # The last term keeps the matrix positive definite despite rounding, where plans have equal features.
    covariance[numpy.diag_indices_from(covariance)] += scales.noise**2 + 1e-9
    factor: Floats = cholesky(covariance, lower=True, overwrite_a=True, check_finite=False)
    return factor


def _evidence(scales: Scales, parts: _KernelParts, errors: Floats) -> float:
    """Logarithm of the marginal likelihood, up to a constant."""
    factor = _factor(scales, parts)
    return -0.5 * float(errors @ cho_solve((factor, True), errors)) - float(numpy.log(numpy.diag(factor)).sum())


def _grid(several_tasks: bool) -> Iterator[Scales]:
    correlations = (0.0, 0.5, 0.9) if several_tasks else (0.5,)
    parts = product((0.06, 0.15, 0.4), (0.03, 0.1, 0.3), (0.5, 1.0), (0.01, 0.03), correlations)
    return (Scales(*part) for part in parts)

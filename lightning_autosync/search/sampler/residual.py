"""What the simulator gets wrong: a Gaussian process on the logarithm of measured over estimated time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy
from scipy.linalg import cho_solve, cholesky, solve_triangular

from lightning_autosync.search.sampler.features import POOLED, Floats, squared_distance

_OFFSET = 3.0
"""Standard deviation of what all plans of one workload and cluster have in common, on the log scale."""


@dataclass(frozen=True)
class Scales:
    """Hyperparameters of the process; deviations are of the logarithm of a time.

    Attributes:
        shares: deviation that goes with the share of bytes that travel in some way (linear part).
        local: deviation of what only like plans have in common.
        reach: distance over which plans are alike.
        noise: deviation of a measurement.
        kinship: correlation of the same plan's error on different workloads or clusters.
    """

    shares: float = 0.1
    local: float = 0.1
    reach: float = 0.7
    noise: float = 0.02
    kinship: float = 0.5


class Residuals:
    """A Gaussian process over the features of plans, with linear and local parts; a few scales are chosen by evidence.

    Errors on other workloads and clusters tell about this one as far as they have been alike so far (``kinship``), so
    that sources that mislead lose their say.
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
            features: [n, features] of the plans; n is at least 1.
            errors: [n] logarithms of measured over estimated seconds.
            tasks: [n] number of the workload and cluster of each; 0 is the one that is searched for.
        """
        likeness = _Likeness.between(features, tasks, features, tasks)
        if abs(len(errors) - self._fitted_to) >= max(4, self._fitted_to // 8):
            grid = _grid(len(set(tasks.tolist())) > 1)
            self._scales = max(grid, key=lambda scales: _evidence(scales, likeness, errors))
            self._fitted_to = len(errors)
        self._known = features, tasks
        self._factor = _factor(self._scales, likeness)
        self._weights = cho_solve((self._factor, True), errors)

    def forget_scales(self) -> None:
        """Have the scales chosen again at the next `fit`, however few errors came in since."""
        self._fitted_to = 0

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the errors of plans of the task that is searched for, [n] each."""
        prior = _OFFSET**2 + self._scales.shares**2 * (features[:, :POOLED] ** 2).sum(axis=1) + self._scales.local**2
        if self._known is None:
            return numpy.zeros(len(features)), numpy.sqrt(prior)
        across = self._across(features)
        explained = solve_triangular(self._factor, across.T, lower=True)
        variance = numpy.maximum(prior - (explained**2).sum(axis=0), 1e-8)
        return across @ self._weights, numpy.sqrt(variance)

    def _across(self, features: Floats) -> Floats:
        assert self._known is not None
        return _Likeness.between(features, numpy.zeros(len(features)), *self._known).kernel(self._scales)


@dataclass(frozen=True)
class _Likeness:
    """What the kernel is made of, arrays [n, m]: inner products, squared distances, and whether tasks are the same."""

    products: Floats
    distances: Floats
    same: Any

    @classmethod
    def between(cls, one: Floats, tasks: Floats, other: Floats, other_tasks: Floats) -> _Likeness:
        products = one[:, :POOLED] @ other[:, :POOLED].T
        return cls(products, squared_distance(one, other), tasks[:, None] == other_tasks[None, :])

    def kernel(self, scales: Scales) -> Floats:
        local = scales.local**2 * numpy.exp(-self.distances / (2 * scales.reach**2))
        kin = numpy.where(self.same, 1.0, scales.kinship)
        made: Floats = self.same * _OFFSET**2 + kin * (scales.shares**2 * self.products + local)
        return made


def _factor(scales: Scales, likeness: _Likeness) -> Floats:
    """The lower Cholesky factor of the covariance of measured errors."""
    covariance = likeness.kernel(scales)
    covariance[numpy.diag_indices_from(covariance)] += scales.noise**2 + 1e-9
    made: Floats = cholesky(covariance, lower=True, overwrite_a=True, check_finite=False)
    return made


def _evidence(scales: Scales, likeness: _Likeness, errors: Floats) -> float:
    """Logarithm of the marginal likelihood, up to a constant."""
    factor = _factor(scales, likeness)
    return -0.5 * float(errors @ cho_solve((factor, True), errors)) - float(numpy.log(numpy.diag(factor)).sum())


def _grid(several: bool) -> Iterator[Scales]:
    """Scales worth a try; ``several``: whether there are several tasks."""
    kinships = (0.0, 0.5, 0.9) if several else (0.5,)
    parts = product((0.06, 0.15, 0.4), (0.03, 0.1, 0.3), (0.5, 1.0), (0.01, 0.03), kinships)
    return (Scales(*part) for part in parts)

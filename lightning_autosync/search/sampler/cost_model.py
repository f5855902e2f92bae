"""The cost model: estimates times of plans from the simulator and its errors on measured plans."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.learned import Estimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.plan import SyncPlan, signature
from lightning_autosync.search.features import Floats, PlanFeatures
from lightning_autosync.search.population import Candidate
from lightning_autosync.search.sampler.error_model import ErrorModel
from lightning_autosync.workload import Workload

FOLDS = 3
"""Number of folds for cross-fitting. With more folds, copies are closer to the simulator, but training is slower."""
MAX_SAMPLES_OF_SOURCE = 48
"""Maximum number of samples of one source whose errors are used, since the simulator has to estimate each."""
MAX_SAMPLES = 480
"""The same for all sources together, but at least two of each: the cost of a proposal grows with the cube."""


class CrossFit:
    """Trains a simulator, and copies of it that never see one fold of the plans (cross-fitting).

    A simulator has smaller errors on its training plans than on new plans. The copy that never saw a plan shows the
    error for a new plan.

    Args:
        estimator: simulator to train in place; copies start from its current state.
        sources: samples of other models and clusters, which are part of every training.
    """

    def __init__(self, estimator: Estimator, sources: Sequence[Sample] = ()) -> None:
        self._estimator = estimator
        self._copies = [copy.deepcopy(estimator) for _ in range(FOLDS)]
        self._sources = [(sample, _fold(sample.plan)) for sample in sources]

    def fit(self, own: Sequence[Sample]) -> None:
        """Train the simulator and its copies on the sources and on the search's own samples."""
        samples = [*self._sources, *((sample, _fold(sample.plan)) for sample in own)]
        self._estimator.fit([sample for sample, _ in samples])
        for number, one in enumerate(self._copies):
            one.fit([sample for sample, fold in samples if fold != number])

    def unseen(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Floats:
        """[n] logarithms of seconds of plans, each estimated by the copy that never saw the plan."""
        logs = numpy.zeros(len(plans))
        folds = [_fold(plan) for plan in plans]
        for number, one in enumerate(self._copies):
            places = [place for place, fold in enumerate(folds) if fold == number]
            if places:
                logs[places] = numpy.log(one.estimate(workload, cluster, [plans[place] for place in places]).seconds)
        return logs


def _fold(plan: SyncPlan) -> int:
    """The fold of a plan: the same for all workloads and clusters and in every process."""
    return int(signature(plan), 16) % FOLDS


@dataclass(frozen=True)
class CostEstimate:
    """Estimates for n candidates: [n] mean and [n] standard deviation of the logarithm of their seconds."""

    mean: Floats
    deviation: Floats


class CostModel:
    """Estimates the step time of plans for one workload on one cluster.

    Args:
        estimator: simulator; None if the rates of the links are unknown. Then all plans are equal at first.
        sources: samples of other workloads or clusters, which show the simulator's errors.
    """

    def __init__(
        self, workload: Workload, cluster: ClusterSpec, estimator: Estimator | None, sources: Sequence[Sample] = ()
    ) -> None:
        self._workload = workload
        self._cluster = cluster
        self._estimator = estimator
        self._sources = sources
        self._simulated: dict[str, tuple[float, float]] = {}
        self._unseen: dict[str, float] = {}
        self._cross_fit: CrossFit | None = None
        self._source_errors: tuple[Floats, Floats, Floats] | None = None
        self._errors = ErrorModel()
        self._shift = 0.0

    def use_trained(self, cross_fit: CrossFit, measured: Sequence[Candidate]) -> None:
        """Discard all estimates after the simulator was trained on the sources and the ``measured`` candidates."""
        self._simulated.clear()
        self._source_errors = None
        self._errors.forget_scales()  # errors of the trained simulator have other scales
        self._cross_fit = cross_fit
        logs = cross_fit.unseen(self._workload, self._cluster, [one.plan for one in measured])
        self._unseen = dict(zip((one.signature for one in measured), logs.tolist(), strict=True))

    def is_simulated(self, candidate: Candidate) -> bool:
        """Whether the simulator has estimated a candidate already."""
        return candidate.signature in self._simulated

    def simulate(self, candidates: Sequence[Candidate]) -> CostEstimate:
        """The simulator's own estimate, cached by plan."""
        new = {one.signature: one.plan for one in candidates if one.signature not in self._simulated}
        if new:
            logs, deviations = self._ask(self._workload, self._cluster, list(new.values()))
            pairs = zip(logs.tolist(), deviations.tolist(), strict=True)
            self._simulated |= dict(zip(new, pairs, strict=True))
        known = numpy.array([self._simulated[one.signature] for one in candidates]).reshape(-1, 2)
        return CostEstimate(known[:, 0], known[:, 1])

    def learn(self, measured: Mapping[str, tuple[Candidate, float]]) -> None:
        """Learn the simulator's errors on ``measured``: by signature, a candidate and the logarithm of its seconds."""
        candidates = [candidate for candidate, _ in measured.values()]
        simulated = self.simulate(candidates).mean
        expected = [self._unseen.get(one.signature, log) for one, log in zip(candidates, simulated, strict=True)]
        errors = numpy.array([seconds for _, seconds in measured.values()]) - numpy.array(expected)
        features = numpy.array([candidate.features for candidate in candidates])
        parts = [(features, errors, numpy.zeros(len(errors)))] if candidates else []
        if (transferred := self.source_errors()) is not None:
            parts.append(transferred)
        if parts:
            joined: list[Any] = [numpy.concatenate(part) for part in zip(*parts, strict=True)]
            self._errors.fit(*joined)

    def estimate(self, candidates: Sequence[Candidate]) -> CostEstimate:
        """The simulator's estimate, corrected by its errors so far."""
        simulated = self.simulate(candidates)
        return self._corrected(candidates, simulated.mean, simulated.deviation)

    def rough(self, candidates: Sequence[Candidate]) -> CostEstimate:
        """The same as `estimate`, but with calibrated rough prices where the simulator has no estimate yet."""
        known = [self._simulated.get(one.signature, (one.rough + self._shift, 0.0)) for one in candidates]
        logs, deviations = numpy.array(known).reshape(-1, 2).T
        return self._corrected(candidates, logs, deviations)

    def calibrate(self, candidates: Sequence[Candidate]) -> None:
        """Fit the offset between rough prices and the simulator's, from candidates that have both."""
        both = [one for one in candidates if one.signature in self._simulated]
        if both:
            self._shift = float(numpy.median([self._simulated[one.signature][0] - one.rough for one in both]))

    def _corrected(self, candidates: Sequence[Candidate], logs: Floats, deviations: Floats) -> CostEstimate:
        errors, spread = self._errors.predict(numpy.array([one.features for one in candidates]))
        return CostEstimate(logs + errors, numpy.hypot(spread, deviations))

    def _ask(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> tuple[Floats, Floats]:
        if self._estimator is None:
            return numpy.zeros(len(plans)), numpy.zeros(len(plans))
        estimate = self._estimator.estimate(workload, cluster, plans)
        return numpy.log(estimate.seconds), numpy.asarray(estimate.deviation)

    def source_errors(self) -> tuple[Floats, Floats, Floats] | None:
        """Features, errors and task numbers of the sources, computed once per training; None without sources."""
        if self._source_errors is None and self._sources:
            tasks: dict[tuple[str, str], list[Sample]] = {}
            for sample in self._sources:
                tasks.setdefault((sample.workload.fingerprint, sample.cluster.fingerprint), []).append(sample)
            limit = max(2, min(MAX_SAMPLES_OF_SOURCE, MAX_SAMPLES // len(tasks)))
            parts = [self._errors_on(samples, number, limit) for number, samples in enumerate(tasks.values(), 1)]
            joined: Any = tuple(numpy.concatenate(part) for part in zip(*parts, strict=True))
            self._source_errors = joined
        return self._source_errors

    def _errors_on(self, samples: Sequence[Sample], task: int, limit: int) -> tuple[Floats, Floats, Floats]:
        chosen = _fastest_and_others(samples, limit)
        workload, cluster = chosen[0].workload, chosen[0].cluster
        plans = [sample.plan for sample in chosen]
        if self._cross_fit is None:
            logs, _ = self._ask(workload, cluster, plans)
        else:
            logs = self._cross_fit.unseen(workload, cluster, plans)
        features_of = PlanFeatures(workload)
        features = numpy.array([features_of(sample.plan) for sample in chosen])
        errors = numpy.array([math.log(sample.seconds) for sample in chosen]) - logs
        return features, errors, numpy.full(len(chosen), float(task))


def _fastest_and_others(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """Up to ``limit`` samples: the fastest, and the same number of others, drawn with a fixed seed."""
    ordered = sorted(samples, key=lambda sample: sample.seconds)
    half = limit // 2
    others = ordered[half:]
    return ordered[:half] + random.Random(0).sample(others, min(len(others), half))

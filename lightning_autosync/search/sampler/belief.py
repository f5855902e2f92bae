"""Belief: how long candidates take, by the simulator and by what was measured of others."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.learned import Estimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.sampler.features import Embedding, Floats
from lightning_autosync.search.sampler.holdout import HoldOut
from lightning_autosync.search.sampler.population import Candidate
from lightning_autosync.search.sampler.residual import Residuals
from lightning_autosync.workload import Workload

MOST_OF_A_SOURCE = 48
"""Samples of one source whose errors are looked at; each has to be estimated."""
MOST_OF_ALL = 480
"""The same of all sources together, but two of each at least: the work of a proposal grows with the cube."""


@dataclass(frozen=True)
class Beliefs:
    """What is believed of some candidates, arrays [n]: mean and deviation of the logarithm of their seconds."""

    mean: Floats
    deviation: Floats


class Believer:
    """Prices candidates of one workload on one cluster.

    Args:
        workload: that is searched for.
        cluster: that is searched for.
        estimator: the simulator; None where nothing is known of the links: then all plans are the same to begin with.
        sources: samples of other workloads or clusters, which tell what the simulator gets wrong.
    """

    def __init__(
        self, workload: Workload, cluster: ClusterSpec, estimator: Estimator | None, sources: Sequence[Sample] = ()
    ) -> None:
        self._workload = workload
        self._cluster = cluster
        self._estimator = estimator
        self._sources = sources
        self._estimates: dict[str, tuple[float, float]] = {}
        self._unseen: dict[str, float] = {}
        self._holdout: HoldOut | None = None
        self._transferred: tuple[Floats, Floats, Floats] | None = None
        self._residuals = Residuals()
        self._shift = 0.0

    def taught(self, holdout: HoldOut, candidates: Sequence[Candidate]) -> None:
        """Estimate all anew: the simulator was trained on the sources and on the measured ``candidates``.

        What it gets wrong of those is told by twins of it that were kept from them.
        """
        self._estimates.clear()
        self._transferred = None
        self._residuals.forget_scales()  # errors are others from now on
        self._holdout = holdout
        logs = holdout.unseen(self._workload, self._cluster, [one.plan for one in candidates])
        self._unseen = dict(zip((one.signature for one in candidates), logs.tolist(), strict=True))

    def estimated(self, candidate: Candidate) -> bool:
        """Whether the simulator was asked about a candidate already."""
        return candidate.signature in self._estimates

    def estimate(self, candidates: Sequence[Candidate]) -> tuple[Floats, Floats]:
        """Logarithms of the simulator's seconds and its deviations, [n] each; it is asked once about each plan."""
        new = {one.signature: one.plan for one in candidates if one.signature not in self._estimates}
        if new:
            logs, deviations = self._ask(self._workload, self._cluster, list(new.values()))
            pairs = zip(logs.tolist(), deviations.tolist(), strict=True)
            self._estimates |= dict(zip(new, pairs, strict=True))
        known = numpy.array([self._estimates[one.signature] for one in candidates]).reshape(-1, 2)
        return known[:, 0], known[:, 1]

    def learn(self, measured: Mapping[str, tuple[Candidate, float]]) -> None:
        """Take in what was measured: by signature a candidate and the logarithm of its seconds."""
        candidates = [candidate for candidate, _ in measured.values()]
        estimates, _ = self.estimate(candidates)
        expected = [
            self._unseen.get(one.signature, estimate) for one, estimate in zip(candidates, estimates, strict=True)
        ]
        errors = numpy.array([seconds for _, seconds in measured.values()]) - numpy.array(expected)
        features = numpy.array([candidate.features for candidate in candidates])
        parts = [(features, errors, numpy.zeros(len(errors)))] if candidates else []
        if (transferred := self.source_errors()) is not None:
            parts.append(transferred)
        if parts:
            joined: list[Any] = [numpy.concatenate(part) for part in zip(*parts, strict=True)]
            self._residuals.fit(*joined)

    def believe(self, candidates: Sequence[Candidate]) -> Beliefs:
        """What the simulator says, corrected by what it got wrong so far."""
        return self._corrected(candidates, *self.estimate(candidates))

    def guess(self, candidates: Sequence[Candidate]) -> Beliefs:
        """The same, cheaply: of plans about which the simulator was not asked, their rough prices at its level."""
        known = [self._estimates.get(one.signature, (one.rough + self._shift, 0.0)) for one in candidates]
        logs, deviations = numpy.array(known).reshape(-1, 2).T
        return self._corrected(candidates, logs, deviations)

    def rough(self, candidates: Sequence[Candidate]) -> Floats:
        """The means of `guess`."""
        return self.guess(candidates).mean

    def calibrate(self, candidates: Sequence[Candidate]) -> None:
        """Bring the rough prices to the simulator's level, by those candidates that have both."""
        both = [one for one in candidates if one.signature in self._estimates]
        if both:
            self._shift = float(numpy.median([self._estimates[one.signature][0] - one.rough for one in both]))

    def _corrected(self, candidates: Sequence[Candidate], logs: Floats, deviations: Floats) -> Beliefs:
        errors, spread = self._residuals.predict(numpy.array([one.features for one in candidates]))
        return Beliefs(logs + errors, numpy.hypot(spread, deviations))

    def _ask(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> tuple[Floats, Floats]:
        if self._estimator is None:
            return numpy.zeros(len(plans)), numpy.zeros(len(plans))
        estimate = self._estimator.estimate(workload, cluster, plans)
        return numpy.log(estimate.seconds), numpy.asarray(estimate.deviation)

    def source_errors(self) -> tuple[Floats, Floats, Floats] | None:
        """Features, errors and task numbers of the sources, worked out once a training; None without sources."""
        if self._transferred is None and self._sources:
            tasks: dict[tuple[str, str], list[Sample]] = {}
            for sample in self._sources:
                tasks.setdefault((sample.workload.fingerprint, sample.cluster.fingerprint), []).append(sample)
            most = max(2, min(MOST_OF_A_SOURCE, MOST_OF_ALL // len(tasks)))
            parts = [self._errors_of(samples, number, most) for number, samples in enumerate(tasks.values(), 1)]
            joined: Any = tuple(numpy.concatenate(part) for part in zip(*parts, strict=True))
            self._transferred = joined
        return self._transferred

    def _errors_of(self, samples: Sequence[Sample], task: int, most: int) -> tuple[Floats, Floats, Floats]:
        chosen = _best_and_others(samples, most)
        workload, cluster = chosen[0].workload, chosen[0].cluster
        plans = [sample.plan for sample in chosen]
        if self._holdout is None:
            logs, _ = self._ask(workload, cluster, plans)
        else:
            logs = self._holdout.unseen(workload, cluster, plans)
        embedding = Embedding(workload)
        features = numpy.array([embedding(sample.plan) for sample in chosen])
        errors = numpy.array([math.log(sample.seconds) for sample in chosen]) - logs
        return features, errors, numpy.full(len(chosen), float(task))


def _best_and_others(samples: Sequence[Sample], most: int) -> list[Sample]:
    """Up to ``most`` samples of a source: the fastest, and as many of the others, drawn by a fixed seed."""
    ordered = sorted(samples, key=lambda sample: sample.seconds)
    half = most // 2
    others = ordered[half:]
    return ordered[:half] + random.Random(0).sample(others, min(len(others), half))

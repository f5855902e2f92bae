"""A simulator that learns, and twins of it that were kept from some plans, to tell what it gets wrong of others."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.learned import Estimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.plan import SyncPlan, signature
from lightning_autosync.search.sampler.features import Floats
from lightning_autosync.workload import Workload

PARTS = 3
"""Parts into which plans fall; the more, the nearer twins come to the simulator, and the longer they take to train."""


class HoldOut:
    """Trains a simulator and its twins, each of which never sees one part of the plans.

    On plans that a simulator was trained on it errs less than on others, so these errors would make it look better than
    it is where it matters. The twin that was kept from a plan errs on it as on any other (cross-fitting).

    Args:
        estimator: that learns; it is trained in place, its twins are copies of what it is now.
        sources: samples of other models and clusters, of which each training is, too.
    """

    def __init__(self, estimator: Estimator, sources: Sequence[Sample] = ()) -> None:
        self._estimator = estimator
        self._twins = [copy.deepcopy(estimator) for _ in range(PARTS)]
        self._sources = [(sample, _part(sample.plan)) for sample in sources]

    def fit(self, own: Sequence[Sample]) -> None:
        """Train all of them, on the sources and on samples of the search itself."""
        samples = [*self._sources, *((sample, _part(sample.plan)) for sample in own)]
        self._estimator.fit([sample for sample, _ in samples])
        for number, twin in enumerate(self._twins):
            twin.fit([sample for sample, part in samples if part != number])

    def unseen(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Floats:
        """Logarithms of the seconds of plans, [n], each as estimated by the twin that was kept from it."""
        made = numpy.zeros(len(plans))
        parts = [_part(plan) for plan in plans]
        for number, twin in enumerate(self._twins):
            places = [place for place, part in enumerate(parts) if part == number]
            if places:
                seconds = twin.estimate(workload, cluster, [plans[place] for place in places]).seconds
                made[places] = numpy.log(seconds)
        return made


def _part(plan: SyncPlan) -> int:
    """The part that a plan falls into, the same for all workloads and clusters and in every process."""
    return int(signature(plan), 16) % PARTS

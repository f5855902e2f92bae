"""What every simulator answers: how long steps take under plans, and how sure it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.learned.dataset.sample import Sample
from lightning_autosync.learned.files import read_header, write_simulator
from lightning_autosync.learned.scene import Scenes
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.replay.constants import Constants
from lightning_autosync.workload import Workload

Floats = NDArray[numpy.float64]


class Estimate(NamedTuple):
    """Step times of several plans, arrays [plans].

    Attributes:
        seconds: of a step.
        deviation: standard deviation of the logarithm of ``seconds``, as an ensemble disagrees; 0 where there is none.
    """

    seconds: Floats
    deviation: Floats


@runtime_checkable
class Estimator(Protocol):
    """Prices plans without a cluster, and learns from measured ones."""

    def estimate(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Estimate:
        """Price synchronous plans for one workload on one cluster.

        Raises:
            ClusterError: the rates of the cluster are unknown.
            PlanError: a plan has no schedule, or is not for this workload and cluster.
        """
        ...

    def fit(self, samples: Sequence[Sample]) -> None:
        """Train further, from what was loaded or fitted before, on measured plans; seconds for some hundred samples."""
        ...


@runtime_checkable
class Simulator(Estimator, Protocol):
    """An estimator that can be kept."""

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write what `load_simulator` reads."""
        ...


class ReplayEstimator:
    """The replay alone: it knows the links and the hosts' constants and learns nothing from samples.

    Args:
        constants: costs of the hosts; None takes the defaults.
    """

    KIND = "replay"

    def __init__(self, constants: Constants | None = None) -> None:
        self.constants = constants or Constants()
        self._scenes = Scenes(self.constants)

    def estimate(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Estimate:
        """As the replay prices them; the deviation is 0."""
        replay = self._scenes.of(workload, cluster).replay
        schedules = (compile_plan(plan, workload, cluster) for plan in plans)
        seconds = numpy.array([replay.predict(schedule).step_time for schedule in schedules], dtype=numpy.float64)
        return Estimate(seconds, numpy.zeros(len(seconds)))

    def fit(self, samples: Sequence[Sample]) -> None:
        """Nothing: the constants come from a probe, never from plans."""

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write its constants."""
        write_simulator(directory, self.KIND, self.constants)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> ReplayEstimator:
        """Read what `save` wrote.

        Raises:
            SimulatorError: it is no simulator, of another kind, or of another format version.
        """
        return cls(read_header(directory, cls.KIND).constants)

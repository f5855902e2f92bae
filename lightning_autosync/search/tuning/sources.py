"""What a run knows before its first trial: a simulator, and what was measured elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna

from lightning_autosync.learned import Estimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.measure.hosts import job_hosts
from lightning_autosync.replay import Constants
from lightning_autosync.search.transfer import load_transfer
from lightning_autosync.search.tuning.job import PACED, Job
from lightning_autosync.search.tuning.settings import Settings


@dataclass(frozen=True)
class Sources:
    """Where proposals come from, beside the run's own trials.

    Attributes:
        estimator: prices plans; None where the rates of the links are unknown.
        constants: of the hosts.
        studies: of other models and clusters.
        samples: measured steps of other models and clusters.
    """

    estimator: Estimator | None
    constants: Constants
    studies: Sequence[optuna.Study] = ()
    samples: Sequence[Sample] = ()

    @classmethod
    def of(cls, job: Job) -> Sources:
        """Those that the job's settings name.

        Raises:
            DocumentError: a source of transfer or a fitted simulator is not what it should be.
        """
        settings = job.settings
        constants = _constants(settings)
        transfer = load_transfer(settings.transfer, job.workload, job.cluster, settings.semantics)
        estimator = transfer.estimator or settings.simulator.build(constants, settings.search.seed or 0)
        return cls(estimator if job.cluster.measured else None, constants, transfer.studies, transfer.samples)


def _constants(settings: Settings) -> Constants:
    launch = "torchrun" if settings.within_job else settings.launch.kind
    return job_hosts(launch, settings.model.kind in PACED, settings.constants)

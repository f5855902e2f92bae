"""How well a simulator orders plans, and how near it is to what they took."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy
from numpy.typing import NDArray
from pydantic import ConfigDict

from lightning_autosync.documents import PLAIN
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.validation.accuracy import kendall_tau
from lightning_autosync.learned.examples import Examples
from lightning_autosync.learned.training import told_apart


@dataclass(frozen=True)
class Accuracy:
    """Of one simulator on one test part.

    Attributes:
        ranking: share of the pairs of plans, of one workload on one cluster, in the right order; of equal predictions,
            half. Pairs that differ by less than the noise of their measurements are left out; between batches, by
            which a collection measures, that includes the machine's drift.
        left_out: share of the pairs that were left out.
        tau: Kendall's tau-b, the mean over workloads and clusters, nothing left out.
        median, p90: of the relative errors of the seconds.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    ranking: float
    left_out: float
    tau: float
    median: float
    p90: float

    @classmethod
    def of(cls, examples: Examples, seconds: NDArray[numpy.float64]) -> Accuracy:
        """Compare predicted ``seconds`` [samples] with the measured ones.

        Raises:
            DocumentError: no two of the measured times can be told apart.
        """
        predicted = numpy.log(seconds)
        right = counted = pairs = 0.0
        taus = []
        for pair in numpy.unique(examples.pair):
            members = examples.pair == pair
            target, guess = examples.target[members], predicted[members]
            upper = numpy.triu_indices(len(target), 1)
            unsure = examples.noise[members], examples.drift[members], examples.batch[members]
            apart = told_apart(target, *unsure)[upper]
            signs = numpy.sign(target[upper[0]] - target[upper[1]]) * numpy.sign(guess[upper[0]] - guess[upper[1]])
            right += float(((signs[apart] + 1) / 2).sum())
            counted += int(apart.sum())
            pairs += len(apart)
            if len(target) > 1:
                taus.append(kendall_tau(target.tolist(), guess.tolist()))
        if not counted:
            raise DocumentError(
                "dataset: no two plans of the test, of one workload on one cluster, can be told apart: collect more, "
                "or give compare=[] to fit without a comparison"
            )
        errors = abs(numpy.exp(predicted - examples.target) - 1)
        return cls(
            ranking=right / counted,
            left_out=1 - counted / pairs,
            tau=statistics.mean(taus),
            median=float(numpy.median(errors)),
            p90=float(numpy.quantile(errors, 0.9)),
        )


METRICS = tuple(field.name for field in fields(Accuracy))


def summary(runs: list[Accuracy]) -> dict[str, Any]:
    """For each metric every run, their mean and their standard deviation."""
    columns = {metric: [asdict(run)[metric] for run in runs] for metric in METRICS}
    return {
        metric: {
            "mean": statistics.mean(values),
            "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
            "runs": values,
        }
        for metric, values in columns.items()
    }

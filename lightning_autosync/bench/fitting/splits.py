"""Divides samples into a part to train on, one that chooses the epoch, and one to test on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy
from numpy.typing import NDArray

from lightning_autosync.bench.fitting.settings import SplitName
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.simulator.dataset import Sample

Integers = NDArray[numpy.int64]

TEST, VALIDATION = 0.2, 0.15
"""Shares of the plans, or of the clusters or families, that are kept for the test, and to choose the epoch."""


@dataclass(frozen=True)
class Split:
    """Places of samples.

    Attributes:
        train, validation, test: no two have a place in common.
        unseen: names of the clusters and families that only the test has.
    """

    train: Integers
    validation: Integers
    test: Integers
    unseen: tuple[str, ...] = ()


def family(sample: Sample) -> str:
    """The family of a sample's model: ``bert`` of bert_base and bert_large, ``resnet`` of resnet50."""
    found = re.match(r"[a-z]+", sample.workload.name.lower())
    return found[0] if found else sample.workload.name


def cluster(sample: Sample) -> str:
    """The name of a sample's cluster, whatever its rates were scaled by."""
    return sample.cluster.name


def divide(samples: Sequence[Sample], how: SplitName, seed: int) -> Split:
    """One division.

    Raises:
        DocumentError: there are too few clusters or families to keep some for the test.
    """
    random = Random(f"{how} {seed}")
    if how == "trial":
        return _by_trial(samples, random)
    if how == "cluster":
        return _by_names(samples, random, [cluster])
    return _by_names(samples, random, [family] if how == "model" else [cluster, family])


def _by_trial(samples: Sequence[Sample], random: Random) -> Split:
    """Plans of every workload and cluster; measurements of one plan stay together."""
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    drawn: dict[SyncPlan, float] = {}
    for place, sample in enumerate(samples):
        share = drawn.setdefault(sample.plan, random.random())
        parts[2 if share < TEST else 1 if share < TEST + VALIDATION else 0].append(place)
    return _split(parts, ())


def _by_names(samples: Sequence[Sample], random: Random, names: Sequence[Callable[[Sample], str]]) -> Split:
    """Whole clusters or families. With both, both are unseen in the test, and what has one of them is left out."""
    chosen = [_draw(sorted({name(sample) for sample in samples}), random, name.__name__) for name in names]
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    for place, sample in enumerate(samples):
        tested = [name(sample) in test for name, (test, _) in zip(names, chosen, strict=True)]
        validated = [name(sample) in validation for name, (_, validation) in zip(names, chosen, strict=True)]
        if all(tested):
            parts[2].append(place)
        elif not any(tested):
            parts[1 if any(validated) else 0].append(place)
    return _split(parts, tuple(sorted(set().union(*(test for test, _ in chosen)))))


def _draw(names: Sequence[str], random: Random, what: str) -> tuple[set[str], set[str]]:
    """Those for the test and those for validation."""
    if len(names) < 3:
        raise DocumentError(
            f"splits: samples of {len(names)} {what} names are too few to keep some unseen ({', '.join(names)}); at "
            "least 3 are needed"
        )
    shuffled = random.sample(names, len(names))
    tested = max(1, round(TEST * len(names)))
    return set(shuffled[:tested]), set(shuffled[tested : tested + max(1, round(VALIDATION * len(names)))])


def _split(parts: tuple[list[int], list[int], list[int]], unseen: tuple[str, ...]) -> Split:
    train, validation, test = (numpy.array(part, dtype=numpy.int64) for part in parts)
    if not min(len(train), len(validation), len(test)):
        raise DocumentError(f"splits: {sum(map(len, parts))} samples are too few to train, to choose and to test on")
    return Split(train, validation, test, unseen)

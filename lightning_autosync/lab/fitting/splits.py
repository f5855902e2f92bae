"""Settings of `autosync fit`, and how it divides samples into training and test parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Annotated, Any, Literal, get_args

import numpy
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lightning_autosync.documents import Configuration, Index
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned import SIMULATORS
from lightning_autosync.learned.card import HeldOut
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.registry import SimulatorSettings, check_kind
from lightning_autosync.plan import signature

SplitName = Literal["trial", "cluster", "model", "both"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


class FitSettings(Configuration):
    """One run of ``autosync fit``.

    Attributes:
        dataset: parts of a dataset, or folders of parts.
        simulator: simulator that is fitted to the whole dataset and saved. Each of its networks holds out some samples,
            by which its epoch is chosen.
        held_out: models and clusters that ``simulator`` does not see, for the accuracy in its card. Needs an empty
            ``compare``, because comparisons divide the samples themselves.
        start: folder of a fitted simulator to train further with ``simulator.tuning`` instead of an untrained one. It
            keeps its own members and sizes. None starts untrained.
        constants: file of the hosts' constants, from a probe; None uses the defaults with ``cores``.
        cores: number of cores that all ranks of a sample shared; None uses the number in the dataset. Only without
            ``constants``.
        compare: simulators to compare; empty skips the comparison.
        splits: what the test part holds out: ``trial`` plans, ``cluster`` whole clusters, ``model`` whole families of
            models, ``both`` samples whose cluster and family are both unseen.
        seeds: number of divisions of each kind, each with its own networks. Their test parts are the blocks of a
            cross-validation: each plan, cluster or family is tested once before any is tested again (see `divide`).
        seed: seed that shuffles plans, clusters and families, and of the networks of the first division.
        processes: number of processes that encode samples and train; None means one per core.
        runs: file of the comparison's runs, to read and to continue; None uses ``runs.jsonl`` in the run directory.
    """

    dataset: Annotated[tuple[str, ...], Field(min_length=1)]
    simulator: SimulatorSettings
    held_out: HeldOut = HeldOut()
    start: str | None = None
    constants: str | None = None
    cores: PositiveFloat | None = None
    compare: tuple[str, ...] = ("replay", "linear", "recurrent", "attention", "hetero")
    splits: tuple[SplitName, ...] = SPLITS
    seeds: PositiveInt = 5
    seed: Index = 0
    processes: PositiveInt | None = None
    runs: str | None = None

    @property
    def simulators(self) -> dict[str, SimulatorSettings]:
        """Settings of all simulators by kind: shipped settings, except for the simulator that is fitted."""
        return {kind: SimulatorSettings.shipped(kind) for kind in SIMULATORS} | {self.simulator.kind: self.simulator}

    @field_validator("dataset", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("compare")
    @classmethod
    def _check_compare(cls, compare: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_kind(kind) for kind in compare)

    @field_validator("simulator")
    @classmethod
    def _check_simulator(cls, simulator: SimulatorSettings) -> SimulatorSettings:
        try:
            check_kind(simulator.kind)
        except ValueError as error:
            raise ValueError(f"kind: {error}") from None
        return simulator

    @model_validator(mode="after")
    def _check(self) -> FitSettings:
        if self.held_out and self.compare:
            raise ValueError("held_out: allowed with compare=[] only")
        if self.constants is not None and self.cores is not None:
            raise ValueError("cores: the file of constants has the number of cores; leave out cores or constants")
        return self


Integers = NDArray[numpy.int64]

BLOCKS = 5
"""Number of blocks of plans, clusters or families. Each division tests another block."""
HELD_OUT = 0.15
"""Share of the plans, clusters or families that each network holds out."""
_TURNS = 4
"""Number of held-out parts of the training samples; networks use them in turn."""


@dataclass(frozen=True)
class Split:
    """Ascending indices of samples in each part.

    Attributes:
        held_out: subsets of ``train``. Each network of an ensemble holds out one, by which its epoch is chosen.
        test: test samples, disjoint from ``train``.
        unseen: names of the clusters and families that only the test part has.
    """

    train: Integers
    held_out: tuple[Integers, ...]
    test: Integers
    unseen: tuple[str, ...] = ()


def family(sample: Sample) -> str:
    """The family of a sample's model, for example ``bert`` for bert_base and bert_large."""
    found = re.match(r"[a-z]+", sample.workload.name.lower())
    return found[0] if found else sample.workload.name


def cluster(sample: Sample) -> str:
    """The name of a sample's cluster, which does not depend on the scale of its rates."""
    return sample.cluster.name


_NAMES: Mapping[SplitName, tuple[Callable[[Sample], str], ...]] = {
    "trial": (),
    "cluster": (cluster,),
    "model": (family,),
    "both": (cluster, family),
}


def divide(samples: Sequence[Sample], how: SplitName, seed: int, number: int = 0) -> Split:
    """One division of a grouped cross-validation.

    Plans, clusters or families are shuffled and cut into `BLOCKS` blocks, or into one per name if there are fewer
    names. Each division tests the next block. After the last block, they are shuffled anew. With ``both``, the test is
    the intersection of a block of clusters and a block of families: each block has its turn, but not each pair.

    Args:
        how: what only the test part has.
        seed: seed of the shuffling, the same for all divisions of a comparison.
        number: number of the division, counted from 0.

    Raises:
        DocumentError: there are too few clusters or families to hold out some for the test.
    """
    if _NAMES[how]:
        made = _by_names(samples, _NAMES[how], f"{how} {seed}", number)
    else:
        made = _by_trial(samples, f"{how} {seed}", number)
    return _checked(made, len(samples))


def hold_out(samples: Sequence[Sample], held_out: HeldOut) -> tuple[list[Sample], list[Sample]]:
    """The samples to learn from, and the samples whose model and cluster are both held out.

    Samples of which only the model or only the cluster is held out are in neither.

    Raises:
        DocumentError: a held-out name is not in the samples, or too few samples remain.
    """
    for what, name, chosen in (("models", family, held_out.models), ("clusters", cluster, held_out.clusters)):
        known = {name(sample) for sample in samples}
        for one in chosen:
            if one not in known:
                raise DocumentError(
                    f"held_out.{what}: '{one}' is not in the dataset; it has {', '.join(sorted(known))}"
                )
    models, clusters = set(held_out.models), set(held_out.clusters)
    kept = [sample for sample in samples if family(sample) not in models and cluster(sample) not in clusters]
    apart = [sample for sample in samples if family(sample) in models and cluster(sample) in clusters]
    if not kept or (held_out and not apart):
        raise DocumentError("held_out: nothing remains to learn from, or no sample has a held-out model and cluster")
    return kept, apart


def for_all(samples: Sequence[Sample], seed: int, members: int) -> Split:
    """A division without a test part: all samples are for training.

    Each network of an ensemble holds out some clusters. A single network holds out some plans of all clusters, as do
    all networks if there are fewer than three clusters.
    """
    names = {cluster(sample) for sample in samples}
    several = members > 1 and len(names) > 2
    made = _by_names(samples, (cluster,), f"all {seed}") if several else _by_trial(samples, f"all {seed}")
    return _checked(made, len(samples), tested=False)


def _by_trial(samples: Sequence[Sample], seed: str, number: int | None = None) -> Split:
    """Divide by plans. Plans that do the same stay in one part. Without a number there is no test part."""
    shuffles, block = divmod(number or 0, BLOCKS)
    random = Random(f"{seed} {shuffles}")
    drawn: dict[str, float] = {}
    shares = numpy.array([drawn.setdefault(signature(sample.plan), random.random()) for sample in samples])
    shares = (shares - block / BLOCKS) % 1  # rotate, so that the block to test is the interval that starts at 0
    test = 0.0 if number is None else 1 / BLOCKS
    edges = [test + turn * HELD_OUT for turn in range(_TURNS + 1)]
    held_out = [(shares >= low) & (shares < high) for low, high in pairwise(edges)]
    return Split(_places(shares >= test), tuple(map(_places, held_out)), _places(shares < test))


def _by_names(
    samples: Sequence[Sample], names: Sequence[Callable[[Sample], str]], seed: str, number: int | None = None
) -> Split:
    """Divide by whole clusters or families.

    With both, the test part has samples whose cluster and family are both unseen. Samples with only one unseen name are
    in no part.
    """
    found = [numpy.array([name(sample) for sample in samples]) for name in names]
    kinds = [sorted(set(of.tolist())) for of in found]
    drawn = [_draw(of, name.__name__, seed, number) for of, name in zip(kinds, names, strict=True)]

    def within(chosen: Iterable[set[str]]) -> list[NDArray[numpy.bool_]]:
        return [numpy.isin(of, sorted(some)) for of, some in zip(found, chosen, strict=True)]

    in_test = within(test for test, _ in drawn)
    train = ~numpy.any(in_test, axis=0)
    held_out = [train & numpy.any(within([turns[turn] for _, turns in drawn]), axis=0) for turn in range(_TURNS)]
    unseen = tuple(sorted(set().union(*(test for test, _ in drawn))))
    return Split(_places(train), tuple(map(_places, held_out)), _places(numpy.all(in_test, axis=0)), unseen)


def _draw(names: Sequence[str], what: str, seed: str, number: int | None) -> tuple[set[str], list[set[str]]]:
    """Names for the test, and names to hold out in each turn; the latter repeat if there are too few."""
    if len(names) < 3:
        raise DocumentError(
            f"splits: {len(names)} {what} names ({', '.join(names)}) are too few to hold some out for the test; at "
            "least 3 are needed: collect more, or give splits=[trial], or compare=[] to fit without a comparison"
        )
    blocks = min(BLOCKS, len(names))
    shuffles, block = divmod(number or 0, blocks)
    shuffled = Random(f"{seed} {what} {shuffles}").sample(names, len(names))
    start = len(names) * block // blocks
    stop = start if number is None else len(names) * (block + 1) // blocks
    others = shuffled[stop:] + shuffled[:start]
    size = max(1, round(HELD_OUT * len(names)))
    turns = [{others[(turn * size + n) % len(others)] for n in range(size)} for turn in range(_TURNS)]
    return set(shuffled[start:stop]), turns


def _places(mask: NDArray[numpy.bool_]) -> Integers:
    found: Integers = numpy.flatnonzero(mask)
    return found


def _checked(split: Split, count: int, tested: bool = True) -> Split:
    """The split without held-out parts that are empty or all of ``train``.

    Raises:
        DocumentError: no held-out part remains, or the test part is empty.
    """
    held_out = tuple(part for part in split.held_out if 0 < len(part) < len(split.train))
    if not held_out or (tested and not len(split.test)):
        raise DocumentError(f"splits: {count} samples are too few for training, validation and test; collect more")
    return replace(split, held_out=held_out)

"""What `autosync fit` is told, and how it divides samples for training and tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Annotated, Any, Literal, get_args

import numpy
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from lightning_autosync.documents import Configuration, Index
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned import SIMULATORS
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.registry import SimulatorSettings, check_kind
from lightning_autosync.plan import signature

SplitName = Literal["trial", "cluster", "model", "both"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


class FitSettings(Configuration):
    """One run of ``autosync fit``.

    Attributes:
        dataset: parts of a dataset, or folders of them.
        simulator: what is fitted to the whole dataset and saved; each of its networks is kept from some samples, by
            which its epoch is chosen.
        start: folder of a fitted simulator to train further, by ``simulator.tuning``, in place of an untrained one; its
            members and sizes are its own. None for none.
        constants: file of the hosts' constants, from a probe; None takes the defaults on ``cores``.
        cores: cores that all ranks of a sample shared; None takes those that the dataset names. Only without
            ``constants``.
        compare: simulators that are judged side by side; none skips it.
        splits: how samples are divided: ``trial`` keeps plans for the test, ``cluster`` whole clusters, ``model`` whole
            families of models, ``both`` what is on such a cluster and of such a family.
        seeds: divisions of each kind, each with networks of its own. Their tests are the blocks of a cross-validation:
            a plan, cluster or family is tested once before any is tested again (see `divide`).
        seed: by which plans, clusters and families are shuffled, and of the networks of the first division.
        processes: that encode samples and train; None takes one a core.
        runs: file of the comparison's runs, to read and to go on with; None takes ``runs.jsonl`` in the run directory.
    """

    dataset: Annotated[tuple[str, ...], Field(min_length=1)]
    simulator: SimulatorSettings
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
        """Those that can be compared, by kind: as shipped, but for the one that is fitted."""
        return {kind: SimulatorSettings.shipped(kind) for kind in SIMULATORS} | {self.simulator.kind: self.simulator}

    @field_validator("dataset", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("compare")
    @classmethod
    def _check_compare(cls, compare: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_kind(kind) for kind in compare)


Integers = NDArray[numpy.int64]

BLOCKS = 5
"""Parts of the plans, or of the clusters or families, of which each division keeps another for the test."""
HELD_OUT = 0.15
"""Share of the plans, or of the clusters or families, that is kept from each network."""
_TURNS = 4
"""Parts of what is trained on of which each network is kept from one."""


@dataclass(frozen=True)
class Split:
    """Places of samples, ascending.

    Attributes:
        train: to learn from.
        held_out: parts of these; each network of an ensemble is kept from one, by which its epoch is chosen.
        test: none of them is in ``train``.
        unseen: names of the clusters and families that only the test has.
    """

    train: Integers
    held_out: tuple[Integers, ...]
    test: Integers
    unseen: tuple[str, ...] = ()


def family(sample: Sample) -> str:
    """The family of a sample's model: ``bert`` of bert_base and bert_large, ``resnet`` of resnet50."""
    found = re.match(r"[a-z]+", sample.workload.name.lower())
    return found[0] if found else sample.workload.name


def cluster(sample: Sample) -> str:
    """The name of a sample's cluster, whatever its rates were scaled by."""
    return sample.cluster.name


_NAMES: Mapping[SplitName, tuple[Callable[[Sample], str], ...]] = {
    "trial": (),
    "cluster": (cluster,),
    "model": (family,),
    "both": (cluster, family),
}


def divide(samples: Sequence[Sample], how: SplitName, seed: int, number: int = 0) -> Split:
    """One division of a grouped cross-validation.

    Plans, or clusters or families, are shuffled and cut into `BLOCKS` blocks, or one for each name where there are
    fewer; division after division tests the next block. So none tests what another has tested, until each block had
    its turn; then they are shuffled anew. With ``both``, a block of clusters meets one of families: each block is
    tested in its turn, but not each pair of them.

    Args:
        samples: what is divided.
        how: what the test part has alone.
        seed: of the shuffling, the same for all divisions that belong together.
        number: of the division, from 0 on.

    Raises:
        DocumentError: there are too few clusters or families to keep some for the test.
    """
    if _NAMES[how]:
        made = _by_names(samples, _NAMES[how], f"{how} {seed}", number)
    else:
        made = _by_trial(samples, f"{how} {seed}", number)
    return _checked(made, len(samples))


def for_all(samples: Sequence[Sample], seed: int, members: int) -> Split:
    """No test: samples of all clusters are trained on.

    The networks of an ensemble are kept from some clusters each; a single one, or where there are fewer than three
    clusters, from some plans of all.
    """
    names = {cluster(sample) for sample in samples}
    several = members > 1 and len(names) > 2
    made = _by_names(samples, (cluster,), f"all {seed}") if several else _by_trial(samples, f"all {seed}")
    return _checked(made, len(samples), tested=False)


def _by_trial(samples: Sequence[Sample], seed: str, number: int | None = None) -> Split:
    """Plans of every workload and cluster; what does the same stays together. Without a number, no test."""
    shuffles, block = divmod(number or 0, BLOCKS)
    random = Random(f"{seed} {shuffles}")
    drawn: dict[str, float] = {}
    shares = numpy.array([drawn.setdefault(signature(sample.plan), random.random()) for sample in samples])
    shares = (shares - block / BLOCKS) % 1  # the block comes first
    test = 0.0 if number is None else 1 / BLOCKS
    edges = [test + turn * HELD_OUT for turn in range(_TURNS + 1)]
    held_out = [(shares >= low) & (shares < high) for low, high in pairwise(edges)]
    return Split(_places(shares >= test), tuple(map(_places, held_out)), _places(shares < test))


def _by_names(
    samples: Sequence[Sample], names: Sequence[Callable[[Sample], str]], seed: str, number: int | None = None
) -> Split:
    """Whole clusters or families. With both, both are unseen in the test, and what has one of them is left out."""
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
    """Those for the test, and for each turn those that are held out; the latter come again if there are too few."""
    if len(names) < 3:
        raise DocumentError(
            f"splits: samples of {len(names)} {what} names are too few to keep some unseen ({', '.join(names)}); at "
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
    """The split if no part is empty; of parts to hold out those that are something and leave something."""
    held_out = tuple(part for part in split.held_out if 0 < len(part) < len(split.train))
    if not held_out or (tested and not len(split.test)):
        raise DocumentError(f"splits: {count} samples are too few to train, to choose and to test on; collect more")
    return replace(split, held_out=held_out)

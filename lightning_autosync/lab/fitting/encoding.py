"""Encodes samples once for all kinds of simulators, on several cores."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy

from lightning_autosync.learned.context import Contexts
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.ensemble import KINDS
from lightning_autosync.learned.examples import Examples, number_pairs
from lightning_autosync.learned.plan_arrays import plan_arrays
from lightning_autosync.measure.conditions import usable_cores
from lightning_autosync.replay import Constants

Piece = TypeVar("Piece")
Made = TypeVar("Made")


def spread(
    make: Callable[..., Callable[[Piece], Made]],
    arguments: tuple[Any, ...],
    work: Sequence[Piece],
    processes: int | None = None,
) -> Iterator[Made]:
    """Map ``make(*arguments)`` over pieces of work on several processes; results come in the order of ``work``.

    Args:
        make: makes the function to map, once in each process.
        arguments: its arguments, which are sent to each process once.
        work: arguments of the mapped function.
        processes: number of processes; None means one per core. With a single one, this process does the work.
    """
    count = min(processes or usable_cores(), len(work))
    if count <= 1:
        yield from map(make(*arguments), work)
        return
    # A fork copies torch's locks but not its threads, which may hold them. So processes are spawned.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count, context, _prepare, (make, arguments)) as pool:
        try:
            with _without_interrupts():
                answers = pool.map(_answer, work)
            yield from answers
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()  # the pool's shutdown would wait for pieces that have begun
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT, so that child processes that start in the block inherit the mask and never see a Ctrl-C.

    This process receives it after the block, and then ends the children.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_there: Callable[[Any], Any]


def _prepare(make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    global _there
    _there = make(*arguments)


def _answer(piece: Any) -> Any:
    return _there(piece)


_CHUNK = 64
"""Number of samples in a piece of work."""


class _Encoded(NamedTuple):
    """An encoded sample: the replay's prediction, and for each kind of simulator the encoding and its base prediction.

    Predictions are logarithms of seconds. A simulator adds its output to the base.
    """

    replayed: float
    kinds: dict[str, tuple[Any, float]]


def encode_samples(
    samples: Sequence[Sample],
    constants: Constants,
    kinds: Sequence[str],
    processes: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Examples]:
    """Encode samples for each kind of simulator. For ``replay``, items are empty and ``base`` is its prediction.

    Args:
        processes: number of processes; None means one per core.
        progress: called with the number of further samples that are done.
    """
    # Sort by workload and cluster, so that the samples of a chunk share cached contexts.
    order = numpy.argsort(number_pairs(samples), kind="stable")
    found: list[Any] = [None] * len(samples)
    chunks = [order[start : start + _CHUNK] for start in range(0, len(order), _CHUNK)]
    work = [[samples[place] for place in chunk] for chunk in chunks]
    for chunk, made in zip(chunks, spread(_Encoder, (constants, tuple(kinds)), work, processes), strict=True):
        for place, one in zip(chunk, made, strict=True):
            found[place] = one
        progress(len(chunk))
    encoded = {}
    for kind in kinds:
        if kind == "replay":
            encoded[kind] = Examples.of(samples, [None] * len(samples), [one.replayed for one in found])
        else:
            columns = zip(*(one.kinds[kind] for one in found), strict=True)
            encoded[kind] = Examples.of(samples, *map(list, columns))
    return encoded


class _Encoder:
    """Encodes samples and caches the contexts of their workloads and clusters."""

    def __init__(self, constants: Constants, kinds: Sequence[str]) -> None:
        self._contexts = Contexts(constants)
        self._kinds = {name: KINDS[name] for name in kinds if name in KINDS}

    def __call__(self, samples: Sequence[Sample]) -> list[_Encoded]:
        return [self._encode(sample) for sample in samples]

    def _encode(self, sample: Sample) -> _Encoded:
        found = plan_arrays(self._contexts.of(sample.workload, sample.cluster), sample.plan)
        items = {name: (kind.encode(found), kind.base(found)) for name, kind in self._kinds.items()}
        return _Encoded(float(numpy.log(found.prediction.step_time)), items)

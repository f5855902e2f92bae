"""The run itself: contenders take turns in the same live workers, in opposite order every other round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.bench import conditions
from lightning_autosync.measure.bench.bounds import Bound, least_step
from lightning_autosync.measure.bench.load import LoadMeter
from lightning_autosync.measure.bench.preparation import Preparation, prepare
from lightning_autosync.measure.bench.result import Measurement, Result, Round
from lightning_autosync.measure.bench.settings import Settings
from lightning_autosync.measure.emulation.check import measured_links
from lightning_autosync.measure.emulation.link_check import LinkCheck
from lightning_autosync.measure.workers import InputError, WorkerError, WorkerPool

_WORKER = "lightning_autosync.measure.bench"
_log = logging.getLogger(__name__)


class ContenderError(WorkerError):
    """A worker failed in the turn of a contender. What was wrong input says so itself, in its own words.

    Attributes:
        contender: its name.
        failure: what the workers said.
    """

    def __init__(self, contender: str, failure: WorkerError) -> None:
        message = str(failure) if isinstance(failure, InputError) else f"contender '{contender}': {failure}"
        super().__init__(message, failure.rank, failure.traceback, failure.kind, failure.reason)
        self.contender = contender
        self.failure = failure


class Pool(Protocol):
    """What a bench asks of its workers; `WorkerPool` is one."""

    world_size: int

    @property
    def pids(self) -> Sequence[int]: ...

    def run(self, function: str, /, *, ranks: Iterable[int] | None = None, **arguments: Any) -> list[Any]: ...

    def close(self) -> None: ...


def run_bench(settings: Settings, keep: Callable[[Result], None] | None = None) -> Result:
    """Measure every contender.

    Args:
        settings: the run.
        keep: called after each round but the last with what there is by then.

    Raises:
        DocumentError: a contender, the cluster or a plan is wrong.
        LaunchError: the workers cannot be started in the way asked for.
        WorkerError: a worker failed; in the turn of a contender a `ContenderError`.
    """
    preparation = prepare(settings)
    with _pool(settings, preparation.cluster) as (pool, links):
        return play(settings, preparation, pool, links, keep)


def play(
    settings: Settings,
    preparation: Preparation,
    pool: Pool,
    links: Sequence[LinkCheck] = (),
    keep: Callable[[Result], None] | None = None,
) -> Result:
    """Measure every contender on workers that are there already.

    Args:
        settings: the run.
        preparation: of these settings.
        pool: the workers.
        links: what their emulated links carry.
        keep: as for `run_bench`.

    Raises:
        WorkerError: as for `run_bench`.
    """
    machines = sorted({tuple(one) for one in pool.run(f"{_WORKER}.conditions:machine")})
    here = settings.launch.kind != "ssh" and machines == [conditions.machine()]
    load_before = pool.run(f"{_WORKER}.conditions:load_average", ranks=[0])[0]
    bench = _Bench(settings, preparation, pool, LoadMeter(pool.pids) if here else None)
    bench.set_up()
    found = {
        **pool.run(f"{_WORKER}.conditions:describe_worker", ranks=[0])[0],
        "conditions_are": "those of rank 0 and its machine",
        "machines": [name for _, name in machines],
        "links": [{**asdict(link), "deviation": link.deviation} for link in links],
        "load_average_before": load_before,
        "bytes_counted": "TCP payload that the ranks sent, as the kernel counts it by socket; framing is not in it",
    }
    bound = _bound(settings, preparation)
    for number in range(settings.rounds):
        bench.play_round(number)
        load_after = pool.run(f"{_WORKER}.conditions:load_average", ranks=[0])[0]
        result = Result(settings, preparation, bound, {**found, "load_average_after": load_after}, bench.measurements())
        if keep is not None and number + 1 < settings.rounds:
            keep(result)
    return result


def turn_order(names: list[str], number: int) -> list[str]:
    """Who goes when in round ``number``: A B C, C B A, A B C, ..."""
    return names if number % 2 == 0 else names[::-1]


class _Bench:
    """The contenders of one run and what was measured of them so far.

    ``load`` watches the workers' machine, where that is this one and their processes are its own.
    """

    def __init__(self, settings: Settings, preparation: Preparation, pool: Pool, load: LoadMeter | None) -> None:
        self._settings = settings
        self._orders = preparation.orders
        self._contenders = settings.all_contenders()
        self._names = list(preparation.orders)
        self._pool = pool
        self._deviations = dict.fromkeys(self._names, 0.0)
        self._load = load
        self._rounds: dict[str, list[Round]] = {name: [] for name in self._names}
        self._sent: dict[str, list[float | None]] = {name: [] for name in self._names}
        self._foreign: dict[str, list[float | None]] = {name: [] for name in self._names}

    def set_up(self) -> None:
        """Make all contenders, check that they compute the same gradients, and warm each up.

        The check comes before any step: later, weights that differ in their last digits may differ by more in
        gradients, as where a ReLU is on in one and off in the other.
        """
        _log.info("warming up %d contenders on %d ranks", len(self._names), self._pool.world_size)
        for name in self._names:
            with _turn(name):
                self._pool.run(f"{_WORKER}.contenders:set_up", **self._orders[name])
        reference, *others = self._names
        if others:
            with _turn(reference):
                self._pool.run(f"{_WORKER}.contenders:keep_gradients", name=reference)
        for name in others:
            with _turn(name):
                found = self._pool.run(f"{_WORKER}.contenders:deviation", name=name, reference=reference)
            self._deviations[name] = max(found)
        for name in self._names:
            with _turn(name):
                self._measure(name, self._settings.warm_up)

    def play_round(self, number: int) -> None:
        """One turn for each contender."""
        for name in turn_order(self._names, number):
            with _turn(name):
                self._take_turn(name)
        _log.info("round %d of %d", number + 1, self._settings.rounds)

    def _take_turn(self, name: str) -> None:
        before = self._bytes_sent()
        if self._load is not None:
            self._load.restart()
        self._rounds[name].append(self._measure(name, self._settings.steps))
        self._foreign[name].append(None if self._load is None else self._load.foreign_cores())
        self._sent[name].append(self._per_step(before, self._bytes_sent()))

    def measurements(self) -> dict[str, Measurement]:
        """What was found."""
        return {
            name: Measurement(
                rounds=self._rounds[name],
                sent=_all_or_none(self._sent[name]),
                foreign_cores=_all_or_none(self._foreign[name]),
                deviation=self._deviations[name],
                periodic=self._contenders[name].periodic is not None,
            )
            for name in self._names
        }

    def _measure(self, name: str, steps: int) -> list[list[float]]:
        return self._pool.run(f"{_WORKER}.contenders:measure", name=name, steps=steps)

    def _bytes_sent(self) -> int | None:
        """By all ranks together."""
        counts = self._pool.run(f"{_WORKER}.conditions:bytes_sent")
        return None if None in counts else sum(counts)

    def _per_step(self, before: int | None, after: int | None) -> float | None:
        if before is None or after is None:
            return None
        return (after - before) / self._settings.steps / self._pool.world_size


@contextmanager
def _turn(contender: str) -> Iterator[None]:
    """Whatever fails within, it is in that contender's turn."""
    try:
        yield
    except WorkerError as failure:
        raise ContenderError(contender, failure) from None


def _all_or_none(values: list[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


@contextmanager
def _pool(settings: Settings, cluster: ClusterSpec) -> Iterator[tuple[WorkerPool, list[LinkCheck]]]:
    """Workers, and what their emulated links carry."""
    scheduling = None if settings.scheduling == "none" else settings.scheduling
    with settings.launch.open(cluster) as launch:
        links = measured_links(launch)
        with WorkerPool(cluster.world_size, launch, timeout=settings.timeout, scheduling=scheduling) as pool:
            yield pool, links


def _bound(settings: Settings, preparation: Preparation) -> Bound | None:
    if not settings.emulated or settings.model.kind not in ("flat", "paced"):
        return None
    return least_step(preparation.workload, preparation.cluster)

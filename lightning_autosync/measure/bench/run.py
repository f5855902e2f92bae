"""A bench: all contenders live side by side in the same workers, and take turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice

from lightning_autosync.measure import conditions, replica_calls, tcp_info
from lightning_autosync.measure.bench.preparation import Preparation, prepare
from lightning_autosync.measure.bench.result import BenchResult, ContenderMeasurement
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.hosts import Bound, least_step
from lightning_autosync.measure.interleaving import alternating_rounds
from lightning_autosync.measure.progress import Report, silent
from lightning_autosync.measure.session import Contender, ContenderError, MeasurementSession
from lightning_autosync.measure.step_time import Steps
from lightning_autosync.measure.workers import WorkerError

_log = logging.getLogger(__name__)


def run_bench(
    settings: BenchSettings, keep: Callable[[BenchResult], None] | None = None, report: Report = silent
) -> BenchResult:
    """Measure every contender.

    Args:
        keep: receives the result so far after each round except the last.
        report: told of each turn.

    Raises:
        DocumentError: a contender, the cluster or a plan is wrong.
        LaunchError: the workers cannot be started in the requested way.
        WorkerError: a worker failed; during a contender's turn, this is a `ContenderError`.
    """
    preparation = prepare(settings)
    with MeasurementSession(
        preparation.cluster, settings.launch, settings.timeout, settings.scheduling, device=settings.device
    ) as session:
        return play(settings, preparation, session, keep, report)


def play(
    settings: BenchSettings,
    preparation: Preparation,
    session: MeasurementSession,
    keep: Callable[[BenchResult], None] | None = None,
    report: Report = silent,
) -> BenchResult:
    """Measure every contender in an open session.

    Args:
        preparation: preparation of these settings.
        keep, report: as in `run_bench`.

    Raises:
        WorkerError: as in `run_bench`.
    """
    load_before = session.run(conditions.load_average, ranks=[0])[0]
    bench = _Bench(settings, preparation, session)
    bench.set_up()
    found = {
        **session.run(conditions.describe_worker, ranks=[0])[0],
        "conditions_are": "those of rank 0 and its machine",
        "machines": [name for _, name in session.machines],
        "links": [{**asdict(link), "deviation": link.deviation} for link in session.links],
        "load_average_before": load_before,
        "bytes_counted": "TCP payload that the ranks sent, as the kernel counts it by socket; framing is not in it",
    }
    bound = _bound(settings, preparation)
    for number in bench.play_rounds(report):
        load_after = session.run(conditions.load_average, ranks=[0])[0]
        result = BenchResult(
            settings, preparation, bound, {**found, "load_average_after": load_after}, bench.measurements()
        )
        if keep is not None and number < settings.rounds:
            keep(result)
    return result


class _Bench:
    """The contenders of one run and their measurements so far."""

    def __init__(self, settings: BenchSettings, preparation: Preparation, session: MeasurementSession) -> None:
        self._settings = settings
        self._session = session
        self._periodic = {name: one.periodic is not None for name, one in settings.all_contenders().items()}
        self._contenders = [Contender(name, order) for name, order in preparation.orders.items()]
        self._deviations = dict.fromkeys(preparation.orders, 0.0)
        self._rounds: dict[str, list[Steps]] = {name: [] for name in preparation.orders}
        self._sent: dict[str, list[float | None]] = {name: [] for name in preparation.orders}
        self._foreign: dict[str, list[float | None]] = {name: [] for name in preparation.orders}

    def set_up(self) -> None:
        """Create all contenders, compare their gradients, and warm each up.

        Gradients are compared before any step. Later, weights that differ in their last digits may lead to larger
        differences of gradients, for example where a ReLU is active in only one of two replicas.
        """
        _log.info("warming up %d contenders on %d ranks", len(self._contenders), self._session.pool.world_size)
        for contender in self._contenders:
            self._session.set_up(contender)
        reference, *others = self._contenders
        if others:
            self._session.call(reference, replica_calls.keep_gradients)
        for contender in others:
            found = self._session.call(contender, replica_calls.deviation, reference=reference.name)
            self._deviations[contender.name] = max(found)
        for contender in self._contenders:
            self._session.measure(contender, self._settings.warm_up)

    def play_rounds(self, report: Report) -> Iterator[int]:
        """Give each contender one turn per round; yields the number of completed rounds after each round."""
        rounds = islice(alternating_rounds(lambda: self._contenders), self._settings.rounds)
        total, done = self._settings.rounds * len(self._contenders), 0
        for number, turns in enumerate(rounds, start=1):
            for contender in turns:
                with _turn_of(contender):
                    self._take_turn(contender)
                done += 1
                report(done, total, f"round {number}, {contender.name}")
            yield number

    def measurements(self) -> dict[str, ContenderMeasurement]:
        """The measurements so far."""
        return {
            name: ContenderMeasurement(
                rounds=rounds,
                sent=_all_or_none(self._sent[name]),
                foreign_cores=_all_or_none(self._foreign[name]),
                deviation=self._deviations[name],
                periodic=self._periodic[name],
            )
            for name, rounds in self._rounds.items()
        }

    def _take_turn(self, contender: Contender) -> None:
        before = self._bytes_sent()
        load = self._session.watch_load()
        self._rounds[contender.name].append(self._session.measure(contender, self._settings.steps))
        self._foreign[contender.name].append(load.foreign_cores())
        self._sent[contender.name].append(self._per_step(before, self._bytes_sent()))

    def _bytes_sent(self) -> int | None:
        """Total payload bytes that all ranks have sent; None if one cannot count."""
        counts = self._session.run(tcp_info.bytes_sent)
        return None if None in counts else sum(counts)

    def _per_step(self, before: int | None, after: int | None) -> float | None:
        if before is None or after is None:
            return None
        return (after - before) / self._settings.steps / self._session.pool.world_size


@contextmanager
def _turn_of(contender: Contender) -> Iterator[None]:
    """Attribute worker errors within the block to the contender, including errors of calls that do not name it."""
    try:
        yield
    except ContenderError:
        raise
    except WorkerError as failure:
        raise ContenderError(contender.name, failure) from None


def _all_or_none(values: list[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _bound(settings: BenchSettings, preparation: Preparation) -> Bound | None:
    if not settings.emulated or settings.model.kind not in ("flat", "paced"):
        return None
    return least_step(preparation.workload, preparation.cluster)

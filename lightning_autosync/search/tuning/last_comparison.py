"""The end of a run: the best plans, the best builder and the best of DDP once more, taking turns as in a bench."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_autosync.measure.bench.preparation import Preparation, plan_class, prepare
from lightning_autosync.measure.bench.run import play
from lightning_autosync.measure.bench.settings import BenchSettings, ContenderSettings, DDPOptions, DDPSweep
from lightning_autosync.measure.session import ContenderError, MeasurementSession, reason
from lightning_autosync.measure.workers import InputError, WorkerError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.tuning.errors import TuningError
from lightning_autosync.search.tuning.final import Final
from lightning_autosync.search.tuning.job import Job, bench_settings

_log = logging.getLogger(__name__)


def compare(
    job: Job, session: MeasurementSession, plans: Mapping[str, SyncPlan], rivals: Sequence[str], directory: Path
) -> Final:
    """Measure plans and settings of DDP in turns, once more where a worker fails.

    A plan that fails twice, or that workers refuse, is left out.

    Args:
        job: what is tuned; its settings say how many rounds judge, and as many before them choose.
        session: its live workers.
        plans: the finalists by name; builders' have the builder's.
        rivals: names of DDP's settings, one or more.
        directory: of the run; ``finalists/NAME.yaml`` appear in it.

    Raises:
        TuningError: a worker failed twice in the turn of something else, or none of the plans is left.
        LaunchError: workers cannot be started again.
    """
    paths = {name: directory / "finalists" / f"{name}.yaml" for name in plans}
    for name, path in paths.items():
        plans[name].save(path)
    own = _opponents(job, rivals)
    others = prepare(own)
    left, failures = dict(plans), _Failures()
    while left:
        contenders = {name: ContenderSettings(plan=str(paths[name]), embeddings="rows") for name in left}
        settings = own.model_copy(update={"contenders": {**own.contenders, **contenders}})
        try:
            played = play(settings, _prepared(job, left, others), session)
        except WorkerError as error:
            failures.note(error, left)
        else:
            return Final.of(played, left, rivals, failures.left_out)
    raise TuningError(f"the last comparison failed with every plan; the last: {failures.last}")


class _Failures:
    """Of workers in a last comparison: each plan may fail once, and so may all that is no plan, taken together.

    Attributes:
        left_out: why plans are left out, by name.
        last: why a worker failed the last time.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        self.last = ""
        self._seen: set[str | None] = set()

    def note(self, error: WorkerError, plans: dict[str, SyncPlan]) -> None:
        """Take the plan in whose turn a worker failed out of ``plans`` if another try could not help.

        Raises:
            TuningError: it is not the first time, and it was not in a plan's turn.
        """
        self.last = reason(error)
        name: str | None = None
        failure = error
        if isinstance(error, ContenderError) and error.contender in plans:
            name, failure = error.contender, error.failure
        if name is not None and (name in self._seen or isinstance(failure, InputError)):
            self.left_out[name] = reason(failure)
            del plans[name]
            _log.warning("the last comparison failed: %s; once more without %s", self.last, name)
        elif name in self._seen:
            raise TuningError(f"the last comparison failed twice: {self.last}")
        else:
            self._seen.add(name)
            _log.warning("the last comparison failed: %s; once more", self.last)


def _opponents(job: Job, rivals: Sequence[str]) -> BenchSettings:
    """Settings of a bench of some of DDP's settings, beside which plans come."""
    by_name = {options.name: options for options in job.settings.ddp.options()}
    first, *others = (by_name[name] for name in rivals)
    beside = {options.name: ContenderSettings(ddp=options) for options in others}
    return bench_settings(
        job.settings,
        ddp=_only(first),
        contenders={**beside, **job.settings.contenders},
        rounds=2 * job.settings.rounds,
    )


def _only(options: DDPOptions) -> DDPSweep:
    return DDPSweep(
        bucket_cap_mb=(options.bucket_cap_mb,),
        gradient_as_bucket_view=(options.gradient_as_bucket_view,),
        static_graph=(options.static_graph,),
    )


def _prepared(job: Job, plans: Mapping[str, SyncPlan], others: Preparation) -> Preparation:
    """Plans are set up for the workload that they were made for, whose times may be measured."""
    orders = {name: {"name": name, **job.plan_order(plan)} for name, plan in plans.items()}
    classes = {name: plan_class(plan) for name, plan in plans.items()}
    return Preparation(
        cluster=job.cluster,
        workload=job.workload,
        orders={**others.orders, **orders},
        classes={**others.classes, **classes},
        reasons=others.reasons,
    )

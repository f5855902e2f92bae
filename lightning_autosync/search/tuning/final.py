"""The end of a run: the best plans, the best builder and the best DDP once more, in interleaved rounds of a bench."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_autosync.bench.interleaving import play
from lightning_autosync.bench.preparation import Preparation, plan_class, prepare
from lightning_autosync.bench.result import Result
from lightning_autosync.bench.settings import Contender, DDPOptions, DDPSweep
from lightning_autosync.bench.statistics import Interval, relative_medians
from lightning_autosync.bench.table import EXACT
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.tuning.job import Job, bench_settings
from lightning_autosync.search.tuning.stage import Stage, reason
from lightning_autosync.workers import WorkerError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Final:
    """What the last comparison found.

    Attributes:
        result: as of a bench.
        plans: those that could win, by name.
        builder: the name among them of the best builder; None if none ran.
    """

    result: Result
    plans: Mapping[str, SyncPlan]
    builder: str | None

    @property
    def winner(self) -> str:
        """The fastest plan, times taken relative to their round; the builder's unless it beats that round by round.

        An exact plan whose gradients are not DDP's is not taken, unless that holds for all.
        """
        found, classes = self.result.measurements, self.result.classes
        sound = [name for name in self.plans if classes[name] != "exact" or found[name].deviation <= EXACT]
        times = relative_medians({name: found[name].times for name in sound or self.plans})
        fastest = min(times, key=times.__getitem__)
        if self.builder in times and self.result.ratio(fastest, self.builder).median >= 1:
            return self.builder
        return fastest

    @property
    def seconds(self) -> float:
        """Of a step of the winner: the median over rounds."""
        return self.result.measurements[self.winner].median

    def ratio(self, name: str) -> Interval:
        """The winner's time over that of another contender, paired by round."""
        return self.result.ratio(self.winner, name)

    def to_dict(self) -> dict[str, Any]:
        """As a bench writes it; each contender says what it is, and the winner how it stands to the others."""
        made = self.result.to_dict()
        for name, contender in made["contenders"].items():
            contender["kind"] = self._kind(name)
        opponents = {"ddp": self.result.best_ddp, "builder": self.builder}
        ratios = {kind: asdict(self.ratio(name)) for kind, name in opponents.items() if name is not None}
        return {**made, "winner": self.winner, "opponents": opponents, "winner_over": ratios}

    def _kind(self, name: str) -> str:
        if name == self.winner:
            return "plan"
        if name == self.builder:
            return "builder"
        if name in self.plans:
            return "finalist"
        return "ddp" if self.result.settings.all_contenders()[name].ddp is not None else "contender"


def compare(
    job: Job, stage: Stage, plans: Mapping[str, SyncPlan], builder: str | None, ddp: str, directory: Path
) -> Final | None:
    """Measure plans and the best DDP in turns; None if workers fail twice.

    Args:
        job: what is tuned; its settings say how many rounds.
        stage: its live workers.
        plans: the finalists, the builder's among them, by name.
        builder: its name.
        ddp: name of the DDP setting.
        directory: of the run; ``finalists/NAME.yaml`` appear in it.

    Raises:
        LaunchError: workers cannot be started again.
    """
    options = next(options for options in job.settings.ddp.options() if options.name == ddp)
    paths = {name: directory / "finalists" / f"{name}.yaml" for name in plans}
    for name, path in paths.items():
        plans[name].save(path)
    own = bench_settings(job.settings, ddp=_only(options))
    contenders = {name: Contender(plan=str(path), embeddings="rows") for name, path in paths.items()}
    settings = own.model_copy(update={"contenders": {**own.contenders, **contenders}})
    preparation = _prepared(job, plans, prepare(own))
    for _ in range(2):
        try:
            return Final(play(settings, preparation, stage.pool), plans, builder)
        except WorkerError as error:
            _log.warning("the last comparison failed: %s", reason(error))
            stage.restart()
    return None


def _only(options: DDPOptions) -> DDPSweep:
    return DDPSweep(
        bucket_cap_mb=(options.bucket_cap_mb,),
        gradient_as_bucket_view=(options.gradient_as_bucket_view,),
        static_graph=(options.static_graph,),
    )


def _prepared(job: Job, plans: Mapping[str, SyncPlan], others: Preparation) -> Preparation:
    """Plans are set up for the workload that they were made for, whose times may be measured."""
    orders = {
        name: {"name": name, **job.plan_order(plan), "timeout": job.settings.timeout} for name, plan in plans.items()
    }
    classes = {name: plan_class(plan) for name, plan in plans.items()}
    return Preparation(
        cluster=job.cluster,
        workload=job.workload,
        orders={**others.orders, **orders},
        classes={**others.classes, **classes},
        reasons=others.reasons,
    )

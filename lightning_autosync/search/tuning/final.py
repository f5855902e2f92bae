"""The end of a run: the best plans, the best builder and the best of DDP once more, in interleaved rounds of a bench.

The fastest of several is partly the luckiest of the rounds in which it was chosen. So the first half of the rounds
chooses the winner and the setting of DDP that it is compared with; the second half judges, and only its ratios count.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_autosync.bench.interleaving import play
from lightning_autosync.bench.preparation import Preparation, plan_class, prepare
from lightning_autosync.bench.result import Measurement, Result
from lightning_autosync.bench.settings import Contender, DDPOptions, DDPSweep
from lightning_autosync.bench.statistics import Interval, relative_medians
from lightning_autosync.bench.table import EXACT
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.tuning.errors import TuningError
from lightning_autosync.search.tuning.job import Job, bench_settings
from lightning_autosync.search.tuning.stage import Stage, reason
from lightning_autosync.workers import WorkerError

LEAST_ROUNDS = 5
"""Judging rounds below which nothing is claimed: all of four fall on one side by chance too often."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Final:
    """What the last comparison found.

    Attributes:
        choice: as of a bench, of the rounds that choose.
        result: the same of those that judge.
        plans: those that could win, by name.
        builder: the name among them of the best builder; None if none ran.
        rivals: names of DDP's settings, one or more.
    """

    choice: Result
    result: Result
    plans: Mapping[str, SyncPlan]
    builder: str | None
    rivals: Sequence[str]

    @classmethod
    def of(cls, played: Result, plans: Mapping[str, SyncPlan], builder: str | None, rivals: Sequence[str]) -> Final:
        """From one bench, half of whose rounds choose."""
        half = played.settings.rounds // 2
        return cls(_rounds(played, 0, half), _rounds(played, half, 2 * half), plans, builder, rivals)

    @cached_property
    def winner(self) -> str:
        """The fastest plan of the choosing rounds, each time relative to its round; the builder's unless it beats that.

        An exact plan whose gradients are not DDP's is not taken, unless that holds for all.
        """
        found, classes = self.choice.measurements, self.choice.classes
        sound = [name for name in self.plans if classes[name] != "exact" or found[name].deviation <= EXACT]
        times = relative_medians({name: found[name].times for name in sound or self.plans})
        fastest = min(times, key=times.__getitem__)
        if self.builder in times and self.choice.ratio(fastest, self.builder).median >= 1:
            return self.builder
        return fastest

    @cached_property
    def ddp(self) -> str:
        """The fastest setting of DDP of the choosing rounds, likewise."""
        times = relative_medians({name: self.choice.measurements[name].times for name in self.rivals})
        return min(times, key=times.__getitem__)

    @property
    def opponents(self) -> dict[str, str]:
        """What the winner is compared with, by kind; the builder, too, if that is the winner."""
        return {"ddp": self.ddp} | ({} if self.builder is None else {"builder": self.builder})

    @property
    def seconds(self) -> float:
        """Of a step of the winner: the median over the judging rounds."""
        return self.result.measurements[self.winner].median

    def ratio(self, name: str) -> Interval:
        """The winner's time over that of another contender, paired by judging round."""
        return self.result.ratio(self.winner, name)

    def gains(self, name: str) -> bool:
        """Whether the winner may be claimed to be faster than another: the ratio's whole interval is below 1."""
        return self.tells and self.ratio(name).high < 1

    @property
    def tells(self) -> bool:
        """Whether there were rounds enough to claim anything."""
        return self.result.settings.rounds >= LEAST_ROUNDS

    def to_dict(self) -> dict[str, Any]:
        """As a bench writes the judging rounds; contenders say what they are, the winner how it stands to opponents."""
        made = self.result.to_dict()
        for name, contender in made["contenders"].items():
            contender["kind"] = self._kind(name)
            contender["ratio_to_best_ddp"] = asdict(self.result.ratio(name, self.ddp))
        chosen = {name: measurement.times for name, measurement in self.choice.measurements.items()}
        return {
            **made,
            "best_ddp": self.ddp,
            "winner": self.winner,
            "opponents": {"ddp": self.ddp, "builder": self.builder},
            "winner_over": {kind: asdict(self.ratio(name)) for kind, name in self.opponents.items()},
            "gains": {kind: self.gains(name) for kind, name in self.opponents.items()},
            "choosing": {"rounds": self.choice.settings.rounds, "round_seconds": chosen},
        }

    def _kind(self, name: str) -> str:
        if name == self.winner:
            return "plan"
        if name == self.builder:
            return "builder"
        if name in self.plans:
            return "finalist"
        return "ddp" if self.result.settings.all_contenders()[name].ddp is not None else "contender"


def compare(
    job: Job, stage: Stage, plans: Mapping[str, SyncPlan], builder: str | None, rivals: Sequence[str], directory: Path
) -> Final:
    """Measure plans and settings of DDP in turns, once more where a worker fails.

    Args:
        job: what is tuned; its settings say how many rounds judge, and as many before them choose.
        stage: its live workers.
        plans: the finalists, the builder's among them, by name.
        builder: its name.
        rivals: names of DDP's settings, one or more.
        directory: of the run; ``finalists/NAME.yaml`` appear in it.

    Raises:
        TuningError: a worker failed again.
        LaunchError: workers cannot be started again.
    """
    paths = {name: directory / "finalists" / f"{name}.yaml" for name in plans}
    for name, path in paths.items():
        plans[name].save(path)
    by_name = {options.name: options for options in job.settings.ddp.options()}
    first, *others = (by_name[name] for name in rivals)
    beside = {options.name: Contender(ddp=options) for options in others}
    own = bench_settings(
        job.settings,
        ddp=_only(first),
        contenders={**beside, **job.settings.contenders},
        rounds=2 * job.settings.rounds,
    )
    contenders = {name: Contender(plan=str(path), embeddings="rows") for name, path in paths.items()}
    settings = own.model_copy(update={"contenders": {**own.contenders, **contenders}})
    preparation = _prepared(job, plans, prepare(own))
    try:
        played = play(settings, preparation, stage.pool, stage.links)
    except WorkerError as error:
        _log.warning("the last comparison failed: %s; once more", reason(error))
        stage.restart()
        try:
            played = play(settings, preparation, stage.pool, stage.links)
        except WorkerError as again:
            raise TuningError(f"the last comparison failed twice: {reason(again)}") from None
    return Final.of(played, plans, builder, rivals)


def _rounds(played: Result, start: int, end: int) -> Result:
    """Some rounds of a bench, as if there had been no others."""
    settings = played.settings.model_copy(update={"rounds": end - start})
    measurements = {name: _of_rounds(one, start, end) for name, one in played.measurements.items()}
    return replace(played, settings=settings, measurements=measurements)


def _of_rounds(measurement: Measurement, start: int, end: int) -> Measurement:
    sent, foreign = measurement.sent, measurement.foreign_cores
    return replace(
        measurement,
        rounds=measurement.rounds[start:end],
        sent=None if sent is None else sent[start:end],
        foreign_cores=None if foreign is None else foreign[start:end],
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

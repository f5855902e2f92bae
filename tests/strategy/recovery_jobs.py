"""Jobs of two ranks whose links become slow and recover, by scripted times."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import jobs
import models
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from tuning_jobs import PAIR, SHORT, SLOW, hurrying

from lightning_autosync import AutoSyncStrategy, ClusterSpec
from lightning_autosync.errors import OpeningError
from lightning_autosync.plan import Compressor, SyncPlan, builders
from lightning_autosync.replay import Constants
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.tuning import job_tuning, live, preparation, proposals
from lightning_autosync.strategy.tuning.contest import Contest
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.strategy.tuning.live import LiveTuner
from lightning_autosync.strategy.tuning.pass_times import OverlappingTimes, OwnTimes, PassTimes
from lightning_autosync.strategy.tuning.predictor import PREDICTOR
from lightning_autosync.strategy.tuning.proposals import Alternative, JobLinks, Proposals
from lightning_autosync.strategy.tuning.tuner import Tuner
from lightning_autosync.workload import Workload, describe

SLOWED, RECOVERED, EPOCHS = 20, 110, 24
"""Passes after which links become slow and recover; epochs of eight passes."""
USUAL, LONG, AVOIDING = 0.1, 0.3, 0.2
"""Seconds of a pass: of the first plan with usual links and with slow ones, and of the plan for slow links."""
KIND = Compressor(kind="topk", ratio=0.2)


class Script:
    """Times of the passes of a job: those of its first plan depend on the links, those of the other one do not.

    Args:
        fault: happens in the first pass that the first plan synchronizes after the job had left it.
        opens: whether ranks can open the first plan then.

    Attributes:
        passes: number of passes so far.
        former: numbers of the passes that the first plan synchronized after the job had left it.
        tunes: whether the job said, in each of these passes, that another plan may be in use.
        measured: numbers of the passes after which links were measured, and why.
        slowing: for each of these measurements, whether the plan became slower before it.
        clusters: links for which plans were opened beside a training that goes on.
        kept: whether the first plan was open after a pass for which it was not needed.
        mistaken: times that a trial got for passes of the plan for slow links, and that are not those of this plan.
        told: lines of the log.
    """

    def __init__(self, fault: Callable[[], None] = lambda: None, opens: bool = True) -> None:
        self.passes, self._last = 0, PassTimes(0.0, 0.0, 0.0)
        self._tuner: Any = None
        self._fault, self._opens = fault, opens
        self.former: list[int] = []
        self.tunes: list[bool] = []
        self.measured: list[tuple[int, str]] = []
        self.slowing: list[bool] = []
        self.clusters: list[str] = []
        self.kept: list[bool] = []
        self.mistaken: list[float] = []
        self.told: list[str] = []

    @property
    def links(self) -> ClusterSpec:
        return SLOW if SLOWED <= self.passes < RECOVERED else PAIR

    def run(self, follows: list[SyncPlan], trials: int = 0, **options: Any) -> Any:
        """The module of a job that takes the first of these plans on usual links, and the second one on slow links."""
        after_pass, measure, reserve = LiveTuner.after_pass, JobTuning._measure_again, ExactReplica._reserve
        record = Tuner.record
        plans = [Alternative(plan, f"plan {number}", 1.0) for number, plan in enumerate(follows)]

        def propose(workload: Workload, links: JobLinks, *_: Any) -> tuple[Proposals, str]:
            first = links.cluster.name == SLOW.name
            return Proposals([plans[first], plans[not first], *plans[2:]], "a test says so"), ""

        def note_pass(tuner: LiveTuner) -> str:
            self.passes += 1
            self._tuner = tuner
            reason = after_pass(tuner)
            self.kept.append(not tuner._excursions.under_way and tuner._former in tuner._engines)
            return reason

        def note_times(tuner: Tuner, seconds: float) -> None:
            plan = tuner._awaited[0]
            if plan is not None and (plan_of(plan) == follows[1]) != math.isclose(seconds, AVOIDING, rel_tol=1e-6):
                self.mistaken.append(seconds)
            record(tuner, seconds)

        def plan_of(index: int) -> SyncPlan:
            return self._tuner.alternatives[index].plan

        def times(_: Any, __: Any) -> PassTimes:
            former = self._tuner._used == self._tuner._former
            if former:
                self._fault()
                self.former.append(self.passes)
                self.tunes.append(not self._tuner.settled)
            avoids = not former and plan_of(self._tuner._used) == follows[1]
            warms = former and len(self.former) % 2 == 1  # the first pass of an excursion is slow
            last, seconds = self._last, AVOIDING if avoids else LONG if warms or self.links is SLOW else USUAL
            self._last = PassTimes(seconds, 0.0, 0.05)
            return last if options.get("overlap") else self._last

        def note_measurement(tuning: JobTuning, reason: str, *slowing: Any) -> bool:
            self.measured.append((self.passes, reason))
            self.slowing.append(slowing != (None,))
            return measure(tuning, reason, *slowing)

        def note_opening(replica: ExactReplica, schedule: Any, cluster: ClusterSpec, *arguments: Any) -> Any:
            self.clusters.append(cluster.name)
            if not self._opens and replica._tuning._former is not None and cluster is not SLOW:
                raise OpeningError("a test says so")
            return reserve(replica, schedule, cluster, *arguments)

        strategy = AutoSyncStrategy(cluster=PAIR, tuning=replace(SHORT, probe=1.0, plans=trials), **options)
        with ExitStack() as patches:
            for owner, name, function in (
                (LiveTuner, "after_pass", note_pass),
                (JobTuning, "_measure_again", note_measurement),
                (ExactReplica, "_reserve", note_opening),
                (Tuner, "record", note_times),
                (live, "rank_zero_info", self.told.append),
                (OwnTimes, "of", times),
                (OverlappingTimes, "of", times),
                (preparation, "propose", propose),
                (job_tuning, "find_links", lambda *_: JobLinks(self.links, Constants(), origin="measured")),
                (proposals, "compare_with_job", lambda *_: []),
                (PREDICTOR, "predict", lambda workload, cluster, constants, plans, *_: [0.01] * len(plans)),
            ):
                patches.enter_context(mock.patch.object(owner, name, function))
            patches.enter_context(hurrying())
            return jobs.fit("Plain", strategy, max_epochs=EPOCHS)


def recovery(trials: int, opens: bool = True, semantics: str = "exact", overlap: str | None = None) -> dict[str, Any]:
    """How a job ends whose links become slow and recover, and what it notices when.

    Args:
        trials: number of plans that it may try; each trial lasts to the end of the job.
        opens: as for `Script`.
        overlap: with it, the plan for slow links overlaps, and the first one waits.
    """
    script, plans = Script(opens=opens), follow_each_other(semantics, overlap)
    with mock.patch.object(Contest, "_decide", return_value=None):
        ours = script.run(plans, trials, semantics=semantics, overlap=overlap)
    fixed = AutoSyncStrategy(plan=plans[0], cluster=PAIR, semantics=semantics)
    theirs = jobs.fit("Plain", fixed if semantics == "compressed" else DDPStrategy(), max_epochs=EPOCHS)
    return {"distance": jobs.distance(ours, theirs), **{name: vars(script)[name] for name in NOTED}}


NOTED = "former", "tunes", "measured", "slowing", "clusters", "kept", "mistaken", "told"


def follow_each_other(semantics: str = "exact", overlap: str | None = None) -> list[SyncPlan]:
    """Plans for usual links and for slow ones, which differ in priorities, and if they are exact, DDP's."""
    workload, compressor = describe(models.Plain()), {"compressor": KIND} if semantics == "compressed" else {}
    first = builders.all_reduce(workload, PAIR, topology="star", **compressor)
    other = first.model_copy(update={"groups": tuple(each.model_copy(update={"priority": 1}) for each in first.groups)})
    waits = {"waits": overlap is not None}
    exact = [] if compressor else [builders.all_reduce(workload, PAIR).model_copy(update=waits)]
    return [first.model_copy(update=waits), other, *exact]


def failing() -> None:
    """Train a job whose rank 1 fails in the first pass of an excursion."""

    def fail() -> None:
        if dist.get_rank() == 1:
            raise OSError("a test says so")

    Script(fail).run(follow_each_other(), timeout=timedelta(seconds=20))

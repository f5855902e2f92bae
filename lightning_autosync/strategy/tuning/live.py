"""`LiveTuner`: tries plans on the passes of a running job, and keeps the fastest."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch.distributed as dist

from lightning_autosync.documents import counted
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import broadcast_json
from lightning_autosync.engine.resources import Resources
from lightning_autosync.engine.tracing import Recorder, StepTrace
from lightning_autosync.errors import OpeningError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.memory import StepTime
from lightning_autosync.strategy.log import rank_zero_info
from lightning_autosync.strategy.tuning.drift import WINDOW, DriftWatch, median_times
from lightning_autosync.strategy.tuning.findings import report_of, step_times, summary
from lightning_autosync.strategy.tuning.opening import BackgroundOpening
from lightning_autosync.strategy.tuning.pass_times import AgreedTimes, OverlappingTimes, OwnTimes, PassTimes
from lightning_autosync.strategy.tuning.prices import PlanPrices
from lightning_autosync.strategy.tuning.recovery import Excursions, FormerPlan
from lightning_autosync.strategy.tuning.report import TrialReport
from lightning_autosync.strategy.tuning.settings import TuningSettings
from lightning_autosync.strategy.tuning.tuner import Candidate, Tuner

_END = -1
"""Chosen in place of a plan when tuning has ended."""
_WINDOW_IN_TRIALS = 3
"""Passes of the present plan in a window while others are tried. About half of the passes of a trial are of this plan,
and a change of the links shall be noticed as soon as after the trials."""


@dataclass(frozen=True)
class Alternative:
    """A plan that could synchronize the job.

    Attributes:
        name: name for people.
        predicted: predicted seconds of its synchronization; of a step, once the computation is known; NaN if it was not
            predicted.
        native: whether it is the plan of DDP.
        balanced: predicted seconds of a step whose computation lasts as long as gradients need on the links; None if
            that was not predicted.
        busy: predicted utilization of the cores in such a step.
    """

    plan: SyncPlan
    name: str
    predicted: float
    native: bool = False
    balanced: float | None = None
    busy: float = 0.0

    def waiting(self) -> Alternative:
        """The same, but steps wait at the end of the backward pass, also with ``overlap="step"``."""
        return replace(self, plan=self.plan.model_copy(update={"waits": True}), name=f"{self.name}, waiting")


class LiveTuner:
    """Runs the tuner of one job: it measures passes, opens the engines of candidates and switches between them.

    A candidate is opened on a thread while the present plan synchronizes passes, and tried once all ranks have it open.
    The engine of the present plan stays open beside the candidate's, so that a switch costs nothing. Both have buffers
    for all gradients, but only one of them synchronizes a pass. Meanwhile and after tuning, it watches by the passes of
    the present plan whether links change.

    Args:
        alternatives: the plans; the first one is in use.
        engine: the engine of the first plan.
        opening: opens the resources of the plans. A plan for which it raises `OpeningError` on every rank is given up.
        make: makes the engine of one of the plans, which is open.
        use: lets the engine of one of the plans synchronize the following passes.
        group: the ranks; None is the default group.
        drift: watches whether links change, if passes wait at their end.
        prices: predicts the plans anew on rank 0, with the computation of the first passes; None keeps the predictions.
        overlaps: whether passes may overlap with the next forward pass. ``group`` must then be one that nothing else
            uses at that time, because passes end at different places of the programs of ranks.
        watches: whether `trace` tells when this rank had the sums of messages.
        former: the plan from which links became slower; it synchronizes passes now and then, to show whether they have
            recovered. ``opening``, ``make`` and ``use`` know it as the plan behind all ``alternatives``.

    Attributes:
        passes: number of synchronized passes so far.
        trace: times of the last pass.
    """

    trace: StepTrace

    def __init__(
        self,
        alternatives: Sequence[Alternative],
        engine: Engine,
        opening: BackgroundOpening,
        make: Callable[[int, Resources], Engine],
        use: Callable[[int, Engine], None],
        settings: TuningSettings,
        group: dist.ProcessGroup | None,
        drift: DriftWatch,
        prices: PlanPrices | None = None,
        overlaps: bool = False,
        watches: bool = False,
        former: FormerPlan | None = None,
    ) -> None:
        self._watches = watches
        self._alternatives = list(alternatives)
        self._engines = {0: engine}
        self._opening, self._make, self._use = opening, make, use
        self._own: OwnTimes | OverlappingTimes = OverlappingTimes() if overlaps else OwnTimes()
        self._times = AgreedTimes(group, overlaps)
        candidates = [_candidate(each) for each in alternatives]
        limits = settings.warm_up, settings.passes, settings.horizon, settings.plans
        # The time of a pass that overlaps is known when the next one ends.
        self._overlaps, self._late = overlaps, int(overlaps)
        self._tuner = Tuner(candidates, *limits, priced=prices is None, late=self._late)
        self._prices, self._warm_up, self._fetches = prices, settings.warm_up, False
        self._rank, self._group = dist.get_rank(group), group
        self._traces: list[StepTrace] = []
        self._computed: list[float] = []
        self._recorder = Recorder(0)
        self.passes = 0
        self._ended = False
        self._drift = drift if settings.probe else None
        self._window: list[PassTimes] = []
        self._since = 0
        self._excursions, self._former = Excursions(former, settings.warm_up), len(alternatives)
        # Plans are chosen two passes ahead, so that ranks can agree on a choice before its pass begins.
        self._chosen = deque(self._tuner.following() for _ in range(2))
        # For each pass whose times are awaited, whether it is one of the former plan; None outside excursions.
        self._awaited: deque[bool | None] = deque([None] * (self._late + 2))
        if others := min(len(alternatives) - 1, settings.plans):
            rank_zero_info(
                f"AutoSync: after {counted(settings.warm_up, 'step')}, up to "
                f"{counted(others, 'other plan')} may be tried on training steps; the present plan is "
                f"{alternatives[0].name}"
            )
        self._follow()

    @property
    def trials(self) -> Sequence[TrialReport]:
        """The outcomes so far."""
        return [report_of(trial, self._alternatives) for trial in self._tuner.trials]

    @property
    def alternatives(self) -> Sequence[Alternative]:
        """The plans, with their last predictions."""
        return self._alternatives

    @property
    def present(self) -> Alternative:
        """The plan that is used when nothing is tried."""
        return self._alternatives[self._tuner.present]

    @property
    def ended(self) -> bool:
        """Whether all trials have ended."""
        return self._ended

    @property
    def finished(self) -> bool:
        """Whether no trial will follow; the last one's plan may still synchronize the next passes."""
        return bool(self._tuner.finished)

    @property
    def slowing(self) -> tuple[PassTimes, PassTimes] | None:
        """Times of a pass before and after it became slower, if `after_pass` has just given this as a reason."""
        return None if self._drift is None else self._drift.slowing

    @property
    def settled(self) -> bool:
        """Whether the present plan synchronizes each pass: trials have ended, and no excursion is under way."""
        return self._ended and not self._chosen

    @property
    def waits_at_end(self) -> bool:
        """Whether the coming pass has to wait at its end, although it could overlap.

        Its computation is measured, or new predictions are taken. For these, ranks wait for rank 0, which they may do
        only where all are at the same place of their programs.
        """
        return self._overlaps and not self._tuner.priced and (self._fetches or self.passes < self._warm_up)

    @property
    def state(self) -> str:
        """What the tuner does, or why it has ended."""
        if self._tuner.finished:
            return f"ended: {self._tuner.finished}"
        if not self._tuner.priced:
            return "about to predict plans with the computation of the first steps"
        trying = self._tuner.trying
        return "about to try other plans" if trying is None else f"trying {self._alternatives[trying].name}"

    @property
    def evidence(self) -> tuple[StepTime, list[StepTime]]:
        """See `step_times`."""
        return step_times(self._tuner, self._alternatives)

    def after_pass(self) -> str:
        """Call on every rank at the end of each synchronized pass; collective.

        Returns:
            Why links should be measured again; empty if they need not.

        Raises:
            ExchangeError: a rank was lost, or did not answer in time.
        """
        self.passes += 1
        self.trace = self._recorder.end()
        own = self._own.of(self.trace)
        reason = self._watch(own) if self.settled and not self._begins_excursion() else self._try(own)
        self._recorder.begin()
        return reason

    def watch(self) -> None:
        """Let `trace` tell from the next pass on when this rank had the sums of messages."""
        self._watches = self._recorder.watches = True
        self._engines[self._used].trace(self._recorder)

    def close(self) -> None:
        """Close the engines of all plans but the present one, and stop predictions.

        If trials have not ended, a line in the log tells what they have found so far.
        """
        if not self._ended and not self._tuner.finished:
            rank_zero_info(
                f"AutoSync: these trials stopped before their end: {summary(self._tuner, self._alternatives)}"
            )
        if self._prices is not None:
            self._prices.stop()
        self._times.forget()
        if self._tuner.present in self._engines:
            self._switch(self._tuner.present)
        with ExitStack() as closing:  # if closing one of them fails, the others are closed nevertheless
            if (engine := self._engines.get(self._used)) is not None:
                closing.callback(engine.trace, None)
            for index in [each for each in self._engines if each != self._used]:
                closing.callback(self._engines.pop(index).close)
            closing.callback(self._opening.close)

    def _try(self, own: PassTimes) -> str:
        reason = ""
        if self._times.under_way:
            known, agreed = len(self._tuner.trials), self._times.take()
            self._reprice(agreed)
            former = self._awaited.popleft()
            reason = self._watch_in_trials(agreed) if former is None else self._look(former, agreed)
            for trial in self._tuner.trials[known:]:
                rank_zero_info(f"AutoSync: {report_of(trial, self._alternatives)}")
            if self._chosen[-1] == _END:  # all ranks have agreed on that
                self._finish()
                return reason
        self._open_next()
        self._chosen.append(self._choose())
        self._follow()
        self._share(own, self._chosen[-1], self._tuner.present, self._opening.is_under_way(), self._knows_prices())
        return reason

    def _choose(self) -> int:
        """Choose the plan of the pass after the next one. A trial waits while an excursion is under way."""
        if self._excursions.under_way:
            self._tuner.interrupt()
            former = self._excursions.following()
            self._awaited.append(former)
            return self._former if former else self._tuner.present
        self._awaited.append(None)
        return _END if self._tuner.finished else self._tuner.following()

    def _begins_excursion(self) -> bool:
        """Whether an excursion begins after the trials, so that ranks agree on times and plans in each pass again."""
        if not self._excursions.is_due(self.passes, self._tuner.usual_seconds) or self._times.under_way:
            return False
        self._forget_window()
        self._chosen.append(self._tuner.present)
        self._awaited.extend([False] * (self._late + 2))
        return True

    def _look(self, former: bool, agreed: PassTimes) -> str:
        """Record the times of a pass in an excursion; returns why links should be measured again, empty if not."""
        reason = self._excursions.record(former, agreed)
        if reason and self._drift is not None:
            self._drift.slowing = None  # an earlier reason's
        if not self._excursions.under_way and self._former in self._engines:
            self._opening.discard([self._engines.pop(self._former)])
        return reason

    def _watch_in_trials(self, agreed: PassTimes) -> str:
        """Record the times of a pass; returns why links should be measured again, empty if they need not."""
        counts, present = self._tuner.expects_present, self._tuner.present
        self._tuner.record(agreed.period)
        if not self._watches_drift:
            return ""
        assert self._drift is not None
        if self._tuner.present != present:
            self._forget_window()
            self._drift.begin_anew()
            return ""
        self._since += 1
        self._window += [agreed] * counts
        if len(self._window) < _WINDOW_IN_TRIALS:
            return ""
        medians, passes = median_times(self._window), self._since
        self._forget_window()
        reason = self._drift.record(medians, passes)
        if reason:  # they are measured now, so the end of the trials need not see to that
            self._tuner.earliest[present] = medians.period
        return reason

    def _forget_window(self) -> None:
        self._window, self._since = [], 0

    def _share(
        self, own: PassTimes, choice: int = 0, present: int = 0, opening: bool = False, priced: bool = False
    ) -> None:
        """Start an exchange with the other ranks; arguments as for `AgreedTimes.share`."""
        # Notes that did not travel need a call that waits, which steps with overlap must not.
        notes = None if self._overlaps else self._engines[self._used].notes
        self._times.share(own, choice, present, opening, priced, notes)

    def _reprice(self, agreed: PassTimes) -> None:
        """Collect the times of the first passes, and take new predictions once rank 0 knows them; collective."""
        if self._tuner.priced:
            return
        self._computed.append(agreed.compute)
        known = self._times.priced
        fetch, self._fetches = self._fetches or (known and not self._overlaps), known
        if fetch:
            assert self._prices is not None
            found = broadcast_json(self._prices.wait(), self._group)
            if found:
                priced = zip(self._alternatives, found, strict=True)
                self._alternatives = [replace(each, predicted=price) for each, price in priced]
            self._tuner.reprice(found)

    def _knows_prices(self) -> bool:
        """Whether this rank knows new predictions that it has not shared. Rank 0 begins them after some passes."""
        if self._prices is None or self._tuner.priced or self._rank:
            return False
        if self.passes <= self._warm_up:
            self._traces.append(self.trace)
            if self.passes == self._warm_up:
                # The first pass is slower: buffers and connections are new.
                times = self._computed[1 + self._late :] or [self.trace.backward]
                self._prices.start(self._traces[-len(times) :], statistics.median(times))
            return False
        return self._prices.wait() is not None

    @property
    def _watches_drift(self) -> bool:
        # Times of passes that end in the next forward pass say too little about links.
        return self._drift is not None and not (self._overlaps and not self.present.plan.waits)

    def _watch(self, own: PassTimes) -> str:
        if not self._watches_drift:
            return ""
        assert self._drift is not None
        reason = self._drift.record(self._times.take()) if self._times.under_way else ""
        self._window.append(own)
        if len(self._window) == WINDOW:
            self._share(median_times(self._window))
            self._window = []
        return reason

    def _follow(self) -> None:
        """Let the plan that was chosen for the next pass synchronize it."""
        self._switch(self._chosen.popleft())

    def _open_next(self) -> None:
        """Begin to open the plan that is to synchronize passes, or let it do so if all ranks have it open."""
        if (plan := self._opening.plan) is not None:
            if not self._times.opening:  # at the end of the last pass, on any rank
                self._take(plan)
        elif self._excursions.is_due(self.passes, self._tuner.usual_seconds):
            self._excursions.begin(self.passes)
            self._opening.start(self._former)
        # The last candidate may still synchronize the next pass. It is closed before another one takes memory.
        elif (plan := self._tuner.opening) is not None and {self._used, *self._chosen} == {self._tuner.present}:
            self._close_others()
            self._opening.start(plan)

    def _take(self, plan: int) -> None:
        """Let a plan synchronize passes that was opened."""
        try:
            resources = self._opening.take()
        except OpeningError as error:  # on every rank, so all go on alike
            self._give_up(plan, error)
        else:
            engine = self._engines[plan] = self._make(plan, resources)
            engine.enabled = False  # its first pass is a later one
            (self._excursions if plan == self._former else self._tuner).opened()

    def _give_up(self, plan: int, error: OpeningError) -> None:
        if plan == self._former:
            self._excursions.give_up()
            if self._drift is not None:
                self._drift.expect_no_excursions()
            rank_zero_info(
                "AutoSync: the plan that was used before links became slower cannot show whether they have recovered, "
                f"because ranks cannot set it up: {error}. Links are measured again from time to time."
            )
            return
        self._tuner.give_up()
        rank_zero_info(
            f"AutoSync: plan {self._alternatives[plan].plan.fingerprint} ({self._alternatives[plan].name}) is not "
            f"tried, because ranks cannot set it up: {error}. Training continues with {self.present.name}."
        )

    def _switch(self, plan: int) -> None:
        engine = self._engines[plan]
        self._used = plan
        self._use(plan, engine)
        asks = self._prices is not None and self._rank == 0 and self.passes < self._warm_up
        self._recorder = Recorder(len(engine.schedule.messages), self._watches, times_gradients=asks)
        for other in self._engines.values():
            other.trace(self._recorder if other is engine else None)

    def _close_others(self) -> None:
        """Close the engines of all plans but the present one."""
        others = [index for index in self._engines if index != self._tuner.present]
        self._opening.discard([self._engines.pop(index) for index in others])

    def _finish(self) -> None:
        """Use the present plan alone from now on: the trials have ended, or an excursion after them."""
        self._chosen.clear()
        self._awaited.clear()
        self._times.forget()
        self._switch(self._tuner.present)
        self._close_others()
        self._forget_window()
        if self._ended:
            return
        self._ended = True
        if self._drift is not None:
            self._drift.begin_anew()
            self._drift.compare_with(self._tuner.earliest[self._tuner.present], "before or in its trials")
        rank_zero_info(f"AutoSync: {summary(self._tuner, self._alternatives)}")


def _candidate(each: Alternative) -> Candidate:
    native = all(group.topology == "native" for group in each.plan.groups)
    return Candidate(each.name, each.predicted, each.native, native, len(each.plan.groups), each.plan.waits)

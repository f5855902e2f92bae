"""Which plan synchronizes each pass while a job tunes itself: decisions from the times of passes, without a network."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from lightning_autosync.documents import counted
from lightning_autosync.strategy.tuning.contest import CLEARLY_SLOWER, GIVE_UP, Contest, candidates_turn

_LEAST_KNOWN = 4
"""Passes of the present plan before a candidate is tried, to know when to give it up."""
LARGEST_RATIO = 1.1
"""Predicted time of a plan, relative to the present one, up to which it may be tried."""
KIND_ERROR, KIND_SPREAD, OWN_SPREAD = 0.08, 0.1, 0.08
"""Of the logarithm of measured over predicted time, of other plans relative to native ones: mean and standard deviation
of the part that all plans of a kind have in common, before any was measured, and standard deviation of each plan's own
part. In six jobs of docs/measured.md that began with trees, the first part was 0.08 on average, from -0.08 to 0.18."""
_LARGEST_ERROR = 3 * KIND_SPREAD
"""Largest error of a prediction that counts for other plans of its kind."""
_CLEAR_LOSSES = 2
"""After so many clearly slower plans of one kind, no other plan of that kind is tried: its predictions do not hold on
these hosts."""


@dataclass(frozen=True)
class Candidate:
    """A plan that may be tried.

    Attributes:
        name: name for people, such as that of its builder.
        predicted: predicted seconds of a step.
        always: whether it is tried first, also if it is predicted to be slower. DDP's plan is, so that no plan is kept
            that was measured to be slower than it. It is not tried where it would be given up soon: if `reprice` gave
            it more than `GIVE_UP` times the time of the present plan, predicted and measured.
        native: whether the backend's all-reduce carries all its messages. Predictions of such plans err alike, and so
            do those of all others.
    """

    name: str
    predicted: float
    always: bool = False
    native: bool = False


@dataclass(frozen=True)
class Trial:
    """The outcome of one candidate.

    Attributes:
        candidate: index of the candidate.
        against: index of the plan that it was compared with.
        accepted: whether it replaced that plan.
        seconds: median seconds of passes of ``against`` and of the candidate.
        passes: number of passes of each.
    """

    candidate: int
    against: int
    accepted: bool
    seconds: tuple[float, float]
    passes: tuple[int, int]


class Tuner:
    """Tries candidates one after the other, each against the present plan, until no gain is expected.

    The next one is that with the largest expected gain. What trials tell of one kind of plan counts for the others.

    The first candidate is the present plan at the beginning. All ranks give their tuner the same times, so all decide
    alike. Times may arrive some passes late: `record` takes them in the order in which `following` chose the plans.
    The caller opens a candidate while the present plan goes on (see `opening`), and then calls `opened` or `give_up`.

    Args:
        candidates: the plans.
        warm_up: passes at the beginning that do not count.
        plans: maximum number of candidates that are tried.
        passes: maximum number of passes of each plan in a contest; twice as many where a gain is not yet sure.
        horizon: number of passes that are expected to follow; gains count so often.
        priced: whether the predictions are final. Otherwise nothing is tried before `reprice`.
        late: number of times that `record` takes before that of the first pass.

    Attributes:
        present: index of the present plan.
        trials: outcomes so far.
        finished: why tuning ended; empty before.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        warm_up: int = 10,
        passes: int = 16,
        horizon: int = 1000,
        plans: int = 6,
        priced: bool = True,
        late: int = 0,
    ) -> None:
        self._candidates = list(candidates)
        self._plans, self._priced, self._repriced = plans, priced, False
        self._left = self._eligible()
        self._warm_up, self._passes = warm_up, passes
        self._horizon = horizon
        self._awaited: deque[int | None] = deque([None] * late)
        self._known: list[float] = []
        self._trying: int | None = None
        self._opened = False
        self._given_up = self._tried = 0
        self._contest: Contest | None = None
        self._turn = 0
        self._kind_errors: list[float] = []
        self._clear_losses = {False: 0, True: 0}
        self.present = 0
        self.trials: list[Trial] = []
        self.finished = ""

    @property
    def trying(self) -> int | None:
        """Index of the candidate that is being tried; None if there is none."""
        return self._trying

    @property
    def opening(self) -> int | None:
        """Index of the candidate that is to be opened, so that it can be tried; None if there is none."""
        return None if self._opened else self._trying

    def opened(self) -> None:
        """Try the candidate that was to be opened."""
        self._opened = True

    @property
    def usual_seconds(self) -> float:
        """Median seconds of a pass with the present plan; NaN before any was recorded."""
        return statistics.median(self._known) if self._known else math.nan

    def following(self) -> int:
        """Choose the plan for the next pass; returns its index."""
        plan, counts = self.present, self.opening is None  # the work of opening a plan disturbs passes
        if self._trying is not None and self._opened:
            # The candidate's first pass does not count: its buffers and connections are new.
            counts = self._turn > 0
            plan = self._trying if not counts or candidates_turn(self._turn - 1) else self.present
            self._turn += 1
        self._awaited.append(plan if counts else None)
        return plan

    def record(self, seconds: float) -> None:
        """Record the time of the earliest pass that was chosen and is not recorded.

        Args:
            seconds: the time, the same on all ranks; NaN if the pass does not count.
        """
        plan = self._awaited.popleft()
        if self._warm_up:
            self._warm_up -= 1
            return
        if plan is None or math.isnan(seconds):
            return
        if self._contest is None:
            if plan == self.present:
                self._known = [*self._known[1 - self._passes :], seconds]
        elif plan in (self.present, self._trying):
            self._contest.record(plan == self._trying, seconds)
            if self._contest.accepted is not None:
                self._end_contest(self._contest)
        ready = self._priced and len(self._known) >= min(self._passes, _LEAST_KNOWN)
        if self._contest is None and not self.finished and ready:
            self._begin_contest()

    @property
    def priced(self) -> bool:
        """Whether the predictions are final."""
        return self._priced

    def reprice(self, predicted: Sequence[float]) -> None:
        """Replace the predictions before the first trial.

        Args:
            predicted: predicted seconds of a step by candidate; empty to keep the earlier ones.
        """
        if predicted:
            known = zip(self._candidates, predicted, strict=True)
            self._candidates = [replace(each, predicted=seconds) for each, seconds in known]
            self._left, self._repriced = self._eligible(), True
        self._priced = True

    def _eligible(self) -> list[int]:
        """Candidates that may be tried."""
        most = LARGEST_RATIO * self._candidates[0].predicted
        return [n for n, each in enumerate(self._candidates) if n and (each.always or each.predicted < most)]

    def give_up(self) -> None:
        """End the present trial without an outcome, because its plan cannot be opened."""
        self._trying, self._contest = None, None
        self._given_up += 1

    def _begin_contest(self) -> None:
        """Begin to try the next candidate, or finish."""
        candidate = max(self._left, key=self._worth, default=None)
        worth = -math.inf if candidate is None else self._worth(candidate)
        if candidate is not None and worth > 0 and self._tried < self._plans:
            self._left.remove(candidate)
            self._trying, self._turn, self._opened = candidate, 0, False
            self._tried += 1
            self._contest = Contest(self._passes, self._known)
            return
        if worth > 0:
            reason = f"tuning.plans allows {counted(self._plans, 'trial')}"
        elif len(self._candidates) - 1 > self._given_up:
            reason = "no other plan is expected to gain more than a trial costs"
        else:
            reason = "there is no other plan to try"
        unopened = f"; ranks could not open {counted(self._given_up, 'plan')}" if self._given_up else ""
        self.finished = reason + unopened

    def _end_contest(self, contest: Contest) -> None:
        assert self._trying is not None
        accepted = bool(contest.accepted)
        self.trials.append(Trial(self._trying, self.present, accepted, contest.seconds, contest.passes))
        predicted = self._candidates[self._trying].predicted / self._candidates[self.present].predicted
        if sign := self._kind_sign(self._trying):
            self._clear_losses[self._candidates[self._trying].native] += contest.ratio > CLEARLY_SLOWER
            error = math.log(contest.ratio / predicted)
            # A single plan may be far worse than all others of its kind.
            self._kind_errors.append(sign * max(-_LARGEST_ERROR, min(error, _LARGEST_ERROR)))
        if accepted:
            self.present = self._trying
        self._known = [contest.seconds[accepted]] * min(self._passes, _LEAST_KNOWN)
        self._trying, self._contest = None, None

    def _worth(self, candidate: int) -> float:
        """Expected gain over the passes to come minus the expected cost of a trial, in passes of the present plan."""
        if self._candidates[candidate].always:
            present = max(self._candidates[self.present].predicted, self.usual_seconds)
            hopeless = self._repriced and self._candidates[candidate].predicted > GIVE_UP * present
            return -math.inf if hopeless else math.inf
        mean = math.log(self._candidates[candidate].predicted / self._candidates[self.present].predicted)
        variance = OWN_SPREAD**2
        if sign := self._kind_sign(candidate):
            if self._clear_losses[self._candidates[candidate].native] >= _CLEAR_LOSSES:
                return -math.inf
            # What trials told of the difference between the two kinds: the mean and variance of a normal posterior.
            known = 1 / (KIND_SPREAD**-2 + len(self._kind_errors) / variance)
            mean += sign * (KIND_ERROR / KIND_SPREAD**2 + sum(self._kind_errors) / variance) * known
            variance += known
        gain, loss = _expectations(mean, math.sqrt(variance))
        return gain * self._horizon - loss * self._passes

    def _kind_sign(self, candidate: int) -> int:
        """1 if the candidate is no native plan and the present one is, -1 if it is the other way round, else 0."""
        return int(self._candidates[self.present].native) - int(self._candidates[candidate].native)


def _expectations(mean: float, spread: float) -> tuple[float, float]:
    """Expected gain and loss of a plan relative to another, if the logarithm of their ratio is normally distributed.

    Returns:
        Expectations of ``max(0, -x)`` and of ``max(0, x)`` for x with this mean and standard deviation.
    """
    normal = NormalDist()
    above = mean * normal.cdf(mean / spread) + spread * normal.pdf(mean / spread)
    return above - mean, above

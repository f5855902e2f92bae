"""Which plan synchronizes each pass while a job tunes itself: decisions from the times of passes, without a network."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from lightning_autosync.documents import counted
from lightning_autosync.strategy.tuning.contest import CLEARLY_SLOWER, GIVE_UP, Contest, candidates_turn

_LEAST_KNOWN = 4
"""Passes of the present plan before a candidate is tried, to know when to give it up."""
LARGEST_RATIO = 1.1
"""Predicted time of a plan, relative to the present one, up to which it may be tried: as trials have corrected it."""
KIND_ERROR, KIND_SPREAD, OWN_SPREAD = 0.08, 0.1, 0.08
"""Of the logarithm of measured over predicted time, of other plans relative to native ones: mean and standard deviation
of the part that all plans of a kind have in common, before any was measured, and standard deviation of each plan's own
part. In six jobs of docs/measured-jobs.md that began with trees, the first part was 0.08 on average, from -0.08 to
0.18."""
MESSAGES_SPREAD = 0.05
"""Standard deviation of the part that grows with the logarithm (base 2) of the number of messages. Its mean is 0. Where
computation keeps all cores busy, messages take longer than predicted: it was 0.15 among four ranks on two cores."""
OVERLAP_ERROR, OVERLAP_SPREAD = 0.1, 0.08
"""Mean and standard deviation of the part that plans have in common whose steps overlap, relative to plans that wait.
On six clusters of docs/measured-jobs.md it was 0.06 to 0.12."""
_Differences = tuple[float, float, float]
"""How a candidate differs from the present plan: 1 if it is no native plan and the present one is, -1 if it is the
other way round, else 0; the same for plans that wait; and the logarithm (base 2) of the ratio of their messages."""
_ERRORS = KIND_ERROR, OVERLAP_ERROR, 0.0
"""Means of the parts of an error that the differences multiply, before any trial."""
_LARGEST_ERROR = 3 * KIND_SPREAD
"""Largest error of a prediction that counts for other plans."""
BLOCK = 3
"""Passes in a row of each plan in a trial in which only one of the plans waits. The first of them does not count. After
passes that overlap, ranks are at different places of their programs, and sums of other ranks may be under way. Between
two sites, single passes made overlap seem 1% faster than waiting, and it was 9% slower."""
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
            that was measured to be slower than it. It is not tried where it would be given up soon: if it is predicted
            to take more than `GIVE_UP` times the time of the present plan, predicted and measured.
        native: whether the backend's all-reduce carries all its messages. Predictions of such plans err alike, and so
            do those of all others.
        messages: number of its messages. Predictions of plans with many messages err alike.
        waits: whether its steps wait at the end of the backward pass. Predictions of steps that overlap err alike.
            While the present plan overlaps, the plan that waits and is predicted to be fastest is tried first, like
            one with ``always``.
    """

    name: str
    predicted: float
    always: bool = False
    native: bool = False
    messages: int = 1
    waits: bool = False

    @property
    def kind(self) -> tuple[bool, bool]:
        """Plans of the same kind have errors of their predictions in common."""
        return self.native, self.waits


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

    The next one is that with the largest expected gain. Each trial corrects the predictions of all plans, by their kind
    and by their number of messages.

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
        earliest: seconds of a pass by present plan, when it was first known.
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
        self._plans, self._priced = plans, priced
        self._left = list(range(1, len(candidates)))
        self._warm_up, self._passes = warm_up, passes
        self._horizon = horizon
        self._awaited: deque[int | None] = deque([None] * late)
        self._known: list[float] = []
        self._trying: int | None = None
        self._opened = False
        self._given_up = self._tried = 0
        self._contest: Contest | None = None
        self._turn = self._last = 0
        self._errors: list[tuple[_Differences, float]] = []
        self._clear_losses: Counter[tuple[bool, bool]] = Counter()
        self.present = 0
        self.trials: list[Trial] = []
        self.earliest: dict[int, float] = {}
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
    def expects_present(self) -> bool:
        """Whether the next time that is recorded is one of the present plan, and counts."""
        return not self._warm_up and self._awaited[0] == self.present

    @property
    def usual_seconds(self) -> float:
        """Median seconds of a pass with the present plan; NaN before any was recorded."""
        return statistics.median(self._known) if self._known else math.nan

    def interrupt(self) -> None:
        """Passes that are not chosen by `following` come before the next one that is."""
        self._last = -1

    def following(self) -> int:
        """Choose the plan for the next pass; returns its index."""
        plan, counts = self.present, self.opening is None  # the work of opening a plan disturbs passes
        if self._trying is not None and self._opened:
            # The candidate's first pass does not count: its buffers and connections are new.
            mixed = self._candidates[self._trying].waits != self._candidates[self.present].waits
            turn = (self._turn - 1) // (BLOCK if mixed else 1)
            plan = self._trying if self._turn == 0 or candidates_turn(turn) else self.present
            counts = self._turn > 0 and (plan == self._last or not mixed)
            self._turn += 1
        self._last = plan
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
        self._priced = True

    def give_up(self) -> None:
        """End the present trial without an outcome, because its plan cannot be opened."""
        self._trying, self._contest = None, None
        self._given_up += 1

    def _begin_contest(self) -> None:
        """Begin to try the next candidate, or finish."""
        self.earliest.setdefault(self.present, self.usual_seconds)
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
        unopened = f"; ranks could not set up {counted(self._given_up, 'plan')}" if self._given_up else ""
        self.finished = reason + unopened

    def _end_contest(self, contest: Contest) -> None:
        assert self._trying is not None
        accepted = bool(contest.accepted)
        self.trials.append(Trial(self._trying, self.present, accepted, contest.seconds, contest.passes))
        tried, present = self._candidates[self._trying], self._candidates[self.present]
        self._clear_losses[tried.kind] += tried.kind != present.kind and contest.ratio > CLEARLY_SLOWER
        # A single plan may be far worse than all others of its kind.
        error = math.log(contest.ratio * present.predicted / tried.predicted)
        self._errors.append((self._differences(self._trying), max(-_LARGEST_ERROR, min(error, _LARGEST_ERROR))))
        if accepted:
            self.present = self._trying
        self._known = [contest.seconds[accepted]] * min(self._passes, _LEAST_KNOWN)
        self._trying, self._contest = None, None

    def _worth(self, candidate: int) -> float:
        """Expected gain over the passes to come minus the expected cost of a trial, in passes of the present plan."""
        other, own = self._candidates[candidate], self._candidates[self.present]
        if other.always or (other is self._best_waiting and not own.waits):
            present = max(own.predicted, self.usual_seconds)
            return -math.inf if other.predicted > GIVE_UP * present else math.inf
        if other.kind != own.kind and self._clear_losses[other.kind] >= _CLEAR_LOSSES:
            return -math.inf
        differences = self._differences(candidate)
        error, variance = self._prediction_error(differences)
        mean = math.log(other.predicted / own.predicted) + error
        # Without the error that is assumed before any trial: that alone keeps no plan from being tried.
        if mean - _product(_ERRORS, differences) > math.log(LARGEST_RATIO):
            return -math.inf
        gain, loss = _expectations(mean, math.sqrt(variance))
        return gain * self._horizon - loss * self._passes

    @property
    def _best_waiting(self) -> Candidate | None:
        """The candidate that is predicted to be the fastest of those that wait; None if none does."""
        waiting = (each for each in self._candidates if each.waits)
        return min(waiting, key=lambda each: each.predicted, default=None)

    def _differences(self, candidate: int) -> _Differences:
        other, present = self._candidates[candidate], self._candidates[self.present]
        return (
            present.native - other.native,
            present.waits - other.waits,
            math.log2(other.messages / present.messages),
        )

    def _prediction_error(self, differences: _Differences) -> tuple[float, float]:
        """Mean and variance of the logarithm of measured over predicted time, relative to the present plan's.

        Trials are a linear regression: each error is a part for each difference and the plan's own part, which are
        normally distributed.
        """
        means = [*_ERRORS]
        spreads = KIND_SPREAD, OVERLAP_SPREAD, MESSAGES_SPREAD
        covariances = [[each**2 * (row == column) for column in range(3)] for row, each in enumerate(spreads)]
        for known, error in self._errors:
            shared, variance = _spread(covariances, known)
            surprise = error - _product(means, known)
            means = [mean + each * surprise / variance for mean, each in zip(means, shared, strict=True)]
            covariances = [
                [covariance - each * other / variance for covariance, other in zip(row, shared, strict=True)]
                for row, each in zip(covariances, shared, strict=True)
            ]
        return _product(means, differences), _spread(covariances, differences)[1]


def _spread(covariances: Sequence[Sequence[float]], differences: _Differences) -> tuple[list[float], float]:
    """Covariances of the parts with the error of a plan that differs so, and the variance of that error."""
    shared = [_product(row, differences) for row in covariances]
    return shared, _product(shared, differences) + OWN_SPREAD**2


def _product(ones: Sequence[float], others: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(ones, others, strict=True))


def _expectations(mean: float, spread: float) -> tuple[float, float]:
    """Expected gain and loss of a plan relative to another, if the logarithm of their ratio is normally distributed.

    Returns:
        Expectations of ``max(0, -x)`` and of ``max(0, x)`` for x with this mean and standard deviation.
    """
    normal = NormalDist()
    above = mean * normal.cdf(mean / spread) + spread * normal.pdf(mean / spread)
    return above - mean, above

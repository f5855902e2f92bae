"""What the trials of a job have found: reports, times of steps, and a sentence for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_autosync.documents import counted
from lightning_autosync.search.memory import StepTime
from lightning_autosync.strategy.tuning.report import TrialReport
from lightning_autosync.strategy.tuning.tuner import Trial, Tuner

if TYPE_CHECKING:
    from lightning_autosync.strategy.tuning.live import Alternative


def report_of(trial: Trial, plans: Sequence[Alternative]) -> TrialReport:
    """The outcome of a trial, with the names of its plans."""
    tried, other = plans[trial.candidate], plans[trial.against]
    before, after = trial.seconds
    return TrialReport(
        tried.plan.fingerprint,
        tried.name,
        other.plan.fingerprint,
        before / after,
        after,
        trial.passes,
        trial.accepted,
    )


def step_times(tuner: Tuner, plans: Sequence[Alternative]) -> tuple[StepTime, list[StepTime]]:
    """Step times of the present plan, and of the others that were measured, with that of the beginning first.

    The machine's speed changes between trials. So the times of other plans are the present one's last time, divided by
    its speedups over them in trials.
    """
    last, relative, passes = {0: tuner.usual_seconds}, {0: 1.0}, {0: 1}
    for trial in tuner.trials:
        compared, other = (trial.against, trial.candidate), trial.candidate
        relative[other] = relative[trial.against] * trial.seconds[1] / trial.seconds[0]
        for index, seconds, count in zip(compared, trial.seconds, trial.passes, strict=True):
            if count:  # a far slower candidate is given up, perhaps before the other plan has a pass that counts
                last[index], passes[index] = seconds, count
    present = tuner.present
    times = {
        index: StepTime(
            name=plans[index].name,
            plan=plans[index].plan.fingerprint,
            seconds=last[present] * relative[index] / relative[present],
            steps=passes[index],
        )
        for index in sorted(relative)
    }
    return times.pop(present), list(times.values())


def summary(tuner: Tuner, plans: Sequence[Alternative]) -> str:
    """What was tried so far, and what came of it, in one sentence."""
    trials, present = [report_of(trial, plans) for trial in tuner.trials], plans[tuner.present]
    if not trials and not tuner.finished:
        return f"no trial was completed, and {_told(present)} was kept"
    if not trials:
        return f"tuning has ended without a trial: {tuner.finished}"
    steps = sum(sum(each.steps) for each in trials)
    tried = f"tried {counted(len(trials), 'other plan')} in {counted(steps, 'step')}"
    accepted = [trial.speedup for trial in trials if trial.accepted]
    if not accepted:
        return f"{tried}, and kept {_told(present)}; the fastest other was {_best(trials)}"
    return f"{tried}; {_told(present)} makes steps {math.prod(accepted):.2f}x as fast as {_told(plans[0])}"


def _told(plan: Alternative) -> str:
    return f"{plan.name} (plan {plan.plan.fingerprint})"


def _best(trials: Sequence[TrialReport]) -> str:
    best = max(trials, key=lambda trial: trial.speedup)
    return f"{best.name} (plan {best.plan}), {best.speedup:.2f}x as fast"

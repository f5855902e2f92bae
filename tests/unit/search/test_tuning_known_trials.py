"""What Optuna's samplers are told of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState
from tuning_world import settings

from lightning_autosync.plan.space import BUILDER, COMPOSED
from lightning_autosync.search.trial_attributes import BASELINE, BATCH, ORIGIN, PRICE, REFERENCE, REFINED, RUN, STEPS
from lightning_autosync.search.tuning.job import PriorKnowledge, TuningJob
from lightning_autosync.search.tuning.samplers import BUCKET, BucketSpace, CorrectedSampler, make_sampler
from lightning_autosync.search.tuning.trials import Trials

SPACE = {BUILDER: CategoricalDistribution([COMPOSED, "ps"]), "x": FloatDistribution(0.0, 1.0)}


class Listener(optuna.samplers.RandomSampler):
    """It keeps the trials that it could have learned from."""

    heard: Sequence[FrozenTrial] = ()

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, *parameter: Any) -> Any:
        self.heard = [one for one in study.get_trials() if one.number != trial.number]
        return super().sample_independent(study, trial, *parameter)


def _told() -> tuple[optuna.Study, Listener]:
    listener = Listener(seed=0)
    study = optuna.create_study(sampler=CorrectedSampler(listener, SPACE, {BUILDER: COMPOSED}))
    return study, listener


def _ask(study: optuna.Study) -> optuna.Trial:
    trial = study.ask()
    for name, distribution in SPACE.items():
        trial._suggest(name, distribution)
    return trial


def test_trials_that_were_given_up_are_complete_ones_with_the_time_of_their_steps():
    study, listener = _told()
    first, second = _ask(study), _ask(study)
    study.tell(first, 0.2)
    second.set_user_attr(STEPS, [[0.3, 0.5, 0.4], [0.1, 0.1, 0.1]])
    study.tell(second, state=TrialState.PRUNED)
    study.tell(_ask(study), state=TrialState.FAIL)
    _ask(study)
    assert [(one.state, one.value) for one in listener.heard] == [(TrialState.COMPLETE, v) for v in (0.2, 0.25)]
    assert [one.params for one in listener.heard] == [{"x": trial.params["x"]} for trial in (first, second)]


def test_plans_that_parameters_do_not_tell_are_left_out():
    study, listener = _told()
    study.enqueue_trial({BUILDER: "ps", "x": 0.0}, user_attrs={ORIGIN: BASELINE})
    study.tell(_ask(study), 0.1)
    refined = _ask(study)
    refined.set_user_attr(REFINED, "{}")
    study.tell(refined, 0.1)
    own = _ask(study)
    assert listener.heard == []
    assert own.params[BUILDER] == COMPOSED
    study.tell(own, 0.3)
    _ask(study)
    assert [one.value for one in listener.heard] == [0.3]


def test_trials_under_way_are_known():
    study, listener = _told()
    running = _ask(study)
    _ask(study)
    assert [(one.state, one.params) for one in listener.heard] == [(TrialState.RUNNING, {"x": running.params["x"]})]


def test_times_are_corrected_to_the_speed_of_the_run_that_asks():
    study, listener = _told()
    for run, reference in (("slow", 2.0), ("fast", 1.0)):
        for batch in range(0, 60, 2):
            trial = _ask(study)
            for name, value in ((RUN, run), (BATCH, batch), (REFERENCE, reference), (PRICE, 0.1)):
                trial.set_user_attr(name, value)
            trial.set_user_attr(STEPS, [[reference]])
            study.tell(trial, reference)
    trial = study.ask()
    trial.set_user_attr(RUN, "fast")
    trial._suggest("x", SPACE["x"])
    assert [one.value for one in listener.heard] == pytest.approx([1.0] * 60)
    trial = study.ask()
    trial.set_user_attr(RUN, "a new run without a reference")
    trial._suggest("x", SPACE["x"])
    assert [one.value for one in listener.heard if one.value is not None] == pytest.approx([2.0] * 60)


@pytest.mark.slow
def test_the_gaussian_process_of_horovod_learns_of_sizes_that_were_given_up(tmp_path):
    """All but two trials are given up, so that of complete ones alone it would still draw at random."""
    job = TuningJob.of(settings(sampler="horovod"))
    space = BucketSpace(job.workload, job.cluster)
    low, high = (math.log(size) for size in space.range)
    study = optuna.create_study(sampler=make_sampler(job.settings.search, space, PriorKnowledge.of(job)))
    trials = Trials(study, space, "horovod", "here")
    places = []
    for number in range(24):
        trial = trials.ask()
        trials.suggest(trial)
        places.append((math.log(trial.params[BUCKET]) - low) / (high - low))
        seconds = 0.1 + (places[-1] - 0.7) ** 2
        trial.set_user_attr(STEPS, [[seconds]])
        if number < 2:
            study.tell(trial, seconds)
        else:
            study.tell(trial, state=TrialState.PRUNED)
    assert sum(abs(place - 0.7) < 0.1 for place in places[12:]) > 8

"""Several processes on one study, and a storage that does not answer."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from tuning_world import World

from lightning_autosync.plan.builders import build
from lightning_autosync.search import storages, studies
from lightning_autosync.search.trial_attributes import BASELINE, INTERRUPTED
from lightning_autosync.search.tuning.opponents import Opponents, _store_reference, _stored_reference
from lightning_autosync.search.tuning.samplers import BucketSpace


def test_a_trial_that_another_process_ends_first_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = optuna.storages.InMemoryStorage()
    left = World(storage=storage).trials(run="here", alone=False).ask()
    read = optuna.Study.get_trials

    def get_trials(study: optuna.Study, *arguments: Any, **named: Any) -> Any:
        found = read(study, *arguments, **named)
        if named.get("states") == (TrialState.RUNNING,):
            study.tell(left.number, state=TrialState.FAIL)
        return found

    monkeypatch.setattr(optuna.Study, "get_trials", get_trials)
    trials = World(storage=storage).trials(run="here", alone=False)
    (record,) = trials.records()
    assert (record.state, record.interrupted) == ("failed", False)


def test_a_trial_that_another_process_ends_in_the_midst_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = optuna.storages.InMemoryStorage()
    trials = World(storage=storage).trials(run="here", alone=False)
    left = trials.ask()
    write = storage.set_trial_user_attr

    def set_trial_user_attr(number: int, name: str, value: Any) -> None:
        write(number, name, value)
        if name == INTERRUPTED:
            storage.set_trial_state_values(number, TrialState.FAIL)

    monkeypatch.setattr(storage, "set_trial_user_attr", set_trial_user_attr)
    trials.interrupt(left)
    assert trials.study.trials[left.number].state == TrialState.FAIL


def test_a_reference_that_another_process_has_kept_stays() -> None:
    study, job = optuna.create_study(), World().job
    ours, theirs = (build(name, job.workload, job.cluster) for name in ("ps", "all_reduce"))
    for plan in (theirs, ours):
        _store_reference(study, plan)
        assert _stored_reference(study) == theirs


def test_a_storage_that_does_not_answer_is_one_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    study = world.trials().study
    plan = build("ps", world.job.workload, world.job.cluster)

    def silent(*arguments: Any, **named: Any) -> Any:
        raise optuna.exceptions.StorageInternalError("gone")

    for name in ("get_study_user_attrs", "set_study_user_attr", "get_all_trials"):
        monkeypatch.setattr(study._storage, name, silent)
    session: Any = None
    for asking in (
        lambda: world.job.claim(study),
        lambda: _store_reference(study, plan),
        lambda: Opponents(world.job, session, session, study, None),
        lambda: studies.enqueue(study, BucketSpace(world.job.workload, world.job.cluster), [], BASELINE),
    ):
        with pytest.raises(storages.StorageError, match="does not answer: StorageInternalError: gone"):
            asking()

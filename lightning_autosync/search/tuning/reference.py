"""The reference: a plan that is measured again and again, so that its times tell how fast the machine is just then."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import optuna

from lightning_autosync.documents import parse_json
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.storages import StudyError, answered
from lightning_autosync.search.tuning.interruptions import uninterrupted
from lightning_autosync.search.tuning.job import Job
from lightning_autosync.search.tuning.measuring import Course
from lightning_autosync.search.tuning.stage import Entrant, Stage, TrialError

REFERENCE = "autosync:reference-plan"
"""User attribute of a study: the plan that shows the drift of the machine, as JSON text; one for all its sessions and
processes, since times relative to one plan say nothing of times relative to another."""
_STEPS = 2
"""Steps of a turn beside a batch of trials."""
_TRIES = 3
"""Plans that are tried in turn where the one before does not run."""
_FAILURES = 2
"""Failures one after the other after which the reference is measured no more: a hanging one takes a time-out each."""
_log = logging.getLogger(__name__)


class Reference:
    """One plan on live workers; without one that runs, nothing is known of drift.

    Args:
        job: what is tuned.
        stage: its live workers.
    """

    def __init__(self, job: Job, stage: Stage) -> None:
        self._job = job
        self._stage = stage
        self._entrant: Entrant | None = None
        self._failures = 0

    def settle(self, study: optuna.Study, plans: Sequence[SyncPlan]) -> None:
        """Take the plan that the study has for it; else the first of ``plans`` that runs, which the study then keeps.

        Raises:
            LaunchError: workers cannot be started.
            StorageError: the study's storage does not answer.
        """
        if (kept := _kept(study)) is not None:
            self._take(kept)
            return
        for plan in plans[:_TRIES]:
            self._take(plan)
            if self.measure() is not None:
                if (kept := _keep(study, plan)).fingerprint != plan.fingerprint:
                    self._take(kept)
                return
        self._entrant = None
        _log.warning("no plan could be a reference: times are compared as they are, however the machine drifts")

    def measure(self) -> float | None:
        """Seconds of a step just now; None if it failed, or if there is no reference."""
        if self._entrant is None or self._failures >= _FAILURES:
            return None
        course = Course(self._entrant)
        try:
            if not self._stage.live(self._entrant):
                for _ in range(self._job.settings.trial.warm_up):
                    self._stage.measure(self._entrant, 1)
            course.add(self._stage.measure(self._entrant, _STEPS))
            self._failures = 0
        except TrialError as error:
            self._failures += 1
            end = "; it is measured no more" if self._failures == _FAILURES else ""
            _log.warning("the reference failed: %s%s", error, end)
        return course.seconds

    def course(self) -> Course | None:
        """It as one of those that are measured in turns, apart from the others."""
        return None if self._entrant is None or self._failures >= _FAILURES else Course(self._entrant, apart=True)

    def take_down(self) -> None:
        """Let the workers forget it until it is measured again."""
        if self._entrant is not None:
            self._stage.take_down(self._entrant)

    def _take(self, plan: SyncPlan) -> None:
        self.take_down()
        self._failures = 0
        self._entrant = Entrant("reference", self._job.plan_order(plan))


@uninterrupted()
@answered()
def _kept(study: optuna.Study) -> SyncPlan | None:
    found, where = study.user_attrs.get(REFERENCE), f"study '{study.study_name}': {REFERENCE}"
    return None if found is None else SyncPlan.from_dict(parse_json(found, where, StudyError), where)


@uninterrupted()
@answered()
def _keep(study: optuna.Study, plan: SyncPlan) -> SyncPlan:
    """The plan, or that of another process which chose while this one measured, or just now with the last word."""
    if (kept := _kept(study)) is not None:
        return kept
    study.set_user_attr(REFERENCE, json.dumps(plan.to_dict()))
    return _kept(study) or plan

"""The reference plan is measured again and again, so that its times show how fast the machine is at the moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_autosync.measure.interleaving import Session, TrialMeasurement
from lightning_autosync.measure.session import Contender, ContenderError, reason
from lightning_autosync.plan import SyncPlan

_STEPS = 2
"""Steps of a turn beside a batch of trials."""
_TRIES = 3
"""Plans that are tried in turn where the one before does not run."""
_FAILURES = 2
"""Failures in a row after which the reference is not measured any more: a hanging one takes a time-out each."""
_log = logging.getLogger(__name__)


class ReferencePlan:
    """One plan on live workers. Without one that runs, nothing is known of drift.

    Args:
        session: the workers.
        order: from a plan to the arguments of `lightning_autosync.measure.replica_calls.set_up`, without the name.
        warm_up: steps after each set-up that do not count.
    """

    def __init__(self, session: Session, order: Callable[[SyncPlan], Mapping[str, Any]], warm_up: int) -> None:
        self._session = session
        self._order = order
        self._warm_up = warm_up
        self._contender: Contender | None = None
        self._failures = 0

    def take(self, plan: SyncPlan) -> None:
        """Take this plan from now on."""
        self.take_down()
        self._failures = 0
        self._contender = Contender("reference", self._order(plan))

    def take_first_that_runs(self, plans: Sequence[SyncPlan]) -> SyncPlan | None:
        """Take the first plan that runs, and return it; None if the first few do not run.

        Raises:
            LaunchError: workers cannot be started.
        """
        for plan in plans[:_TRIES]:
            self.take(plan)
            if self.measure() is not None:
                return plan
        self._contender = None
        _log.warning("no plan could be a reference: times are compared as they are, however the machine drifts")
        return None

    def measure(self) -> float | None:
        """Seconds of a step just now; None if it failed, or if there is no reference."""
        measurement = self.measurement()
        if measurement is None:
            return None
        contender = measurement.contender
        try:
            if not self._session.live(contender):
                for _ in range(self._warm_up):
                    self._session.measure(contender, 1)
            measurement.add(self._session.measure(contender, _STEPS))
            self._failures = 0
        except ContenderError as error:
            self._failures += 1
            end = "; it is not measured any more" if self._failures == _FAILURES else ""
            _log.warning("the reference failed: %s%s", reason(error.failure), end)
        return measurement.seconds

    def measurement(self) -> TrialMeasurement | None:
        """A new measurement of it, to be made in turns beside others; None if there is no reference."""
        if self._contender is None or self._failures >= _FAILURES:
            return None
        return TrialMeasurement(self._contender, apart=True)

    def take_down(self) -> None:
        """Let the workers forget it until it is measured again."""
        if self._contender is not None:
            self._session.take_down(self._contender)

"""The reference plan: repeated measurements of it show the current speed of the machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_autosync.measure.interleaving import TrialMeasurement
from lightning_autosync.measure.session import Contender, ContenderError, MeasurementSession, reason
from lightning_autosync.plan import SyncPlan

_STEPS = 2
"""Number of steps of a turn beside a batch of trials."""
_TRIES = 3
"""Maximum number of plans that are tried until one runs."""
_FAILURES = 2
"""Consecutive failures after which the reference is no longer measured, since each hang costs a timeout."""
_log = logging.getLogger(__name__)


class ReferencePlan:
    """The reference plan on live workers. If no plan runs, drift stays unknown.

    Args:
        order: maps a plan to the arguments of `lightning_autosync.measure.replica_calls.set_up`, without the name.
        warm_up: number of steps after each set-up that are not counted.

    Attributes:
        plan: the plan; None if there is no reference.
    """

    def __init__(
        self, session: MeasurementSession, order: Callable[[SyncPlan], Mapping[str, Any]], warm_up: int
    ) -> None:
        self._session = session
        self._order = order
        self._warm_up = warm_up
        self._contender: Contender | None = None
        self.plan: SyncPlan | None = None
        self._failures = 0

    def take(self, plan: SyncPlan) -> None:
        """Make ``plan`` the reference from now on."""
        self.take_down()
        self._failures = 0
        self.plan, self._contender = plan, Contender("reference", self._order(plan))

    def take_first_that_runs(self, plans: Sequence[SyncPlan]) -> SyncPlan | None:
        """Make the first plan that runs the reference and return it; None if none of the first few runs.

        Raises:
            LaunchError: workers cannot be started.
        """
        for plan in plans[:_TRIES]:
            self.take(plan)
            if self.measure() is not None:
                return plan
        self.plan = self._contender = None
        _log.warning("no plan ran as a reference, so step times are not corrected for the machine's drift")
        return None

    def measure(self) -> float | None:
        """Measure the current seconds of a step; None if this failed or there is no reference."""
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
            end = "; the reference is not measured any more" if self._failures == _FAILURES else ""
            _log.warning("the reference failed: %s%s", reason(error.failure), end)
        return measurement.seconds

    def measurement(self) -> TrialMeasurement | None:
        """A new measurement of the reference, to be made in turns with others; None if there is no reference."""
        if self._contender is None or self._failures >= _FAILURES:
            return None
        return TrialMeasurement(self._contender, is_reference=True)

    def take_down(self) -> None:
        """Remove the reference from the workers until it is measured again."""
        if self._contender is not None:
            self._session.take_down(self._contender)

"""Predicted step times of a job's plans, with the computation that its first steps have shown."""

from __future__ import annotations

import math
import statistics
import threading
import warnings
from collections import defaultdict
from collections.abc import Sequence

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.errors import MissingPackageError, PredictorError
from lightning_autosync.plan import Schedule, SyncPlan
from lightning_autosync.replay import Constants
from lightning_autosync.strategy.tuning.predictor import PREDICTOR, Predictor
from lightning_autosync.workload import Workload

PATIENCE = 60.0
"""Seconds, beside their CPU time, within which predictions must be there."""


def timed_workload(workload: Workload, schedule: Schedule, traces: Sequence[StepTrace], slowest: float) -> Workload:
    """The workload with the times of measured steps.

    A gradient that arrived in no step is taken to be ready at the end of the backward pass. What lies between two steps
    (optimizer, data) counts as part of the forward pass.

    Args:
        workload: the parameters; its own times are not used.
        schedule: the schedule by which the steps were synchronized.
        traces: the times of steps on this rank, with those of gradients; medians count.
        slowest: seconds of computation in a step of the slowest rank; the times of this rank are scaled to that.

    Raises:
        PredictorError: no gradient has a time in any step, as if all came at the end of the backward pass.
    """
    forward = statistics.median(trace.forward for trace in traces)
    backward = statistics.median(trace.backward - trace.forward for trace in traces)
    if forward + backward <= 0:
        return workload
    times = defaultdict[str, list[float]](list)
    for trace in traces:
        for message, place, at in trace.arrivals:
            times[schedule.messages[message].variables[place]].append(at - trace.forward)
    if not times:
        raise PredictorError(
            "the traces of the measured steps have no times of gradients; expected a recorder with times_gradients=True"
        )
    factor = slowest / (forward + backward)
    ready = {name: min(statistics.median(own), backward) for name, own in times.items()}
    return workload.model_copy(
        update={
            "forward_time": factor * forward,
            "backward_time": factor * backward,
            "optimizer_time": 0.0,
            "variables": tuple(
                variable.model_copy(update={"ready": factor * ready.get(variable.name, backward)})
                for variable in workload.variables
            ),
        }
    )


def computing_cores(traces: Sequence[StepTrace]) -> float | None:
    """Cores that a rank occupies during backward passes, by their traces: the median, 1 at most; None if unknown."""
    spans = [(trace.computing, trace.backward - trace.forward) for trace in traces]
    known = [busy / span for busy, span in spans if busy is not None and span > 0]
    return min(1.0, statistics.median(known)) if known else None


class PlanPrices:
    """Predicts the step times of plans in another process, while training continues.

    It gives up after ``limit`` seconds of CPU time, or when the reply takes too long because all cores are busy.

    Args:
        cluster: the links, with rates.
        constants: costs of the hosts.
        schedule: the compiled first plan, by which the measured steps were synchronized.
        limit: maximum seconds of CPU time of the predictions.
        overlaps: whether steps overlap with the next forward pass (``overlap="step"``).
        predictor: the process.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterSpec,
        constants: Constants,
        plans: Sequence[SyncPlan],
        schedule: Schedule,
        limit: float,
        overlaps: bool = False,
        predictor: Predictor = PREDICTOR,
    ) -> None:
        self._workload, self._cluster, self._constants = workload, cluster, constants
        self._plans, self._schedule = plans, schedule
        self._limit, self._overlaps = limit, overlaps
        self._predictor = predictor
        self._stopped = False
        self._found: list[float] = []
        self._thread: threading.Thread | None = None

    def start(self, traces: Sequence[StepTrace], slowest: float) -> None:
        """Begin to predict; arguments as for `timed_workload`."""
        # The thread only waits for the reply.
        self._thread = threading.Thread(target=self._run, args=(traces, slowest), name="autosync-prices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the predictions that are under way."""
        self._stopped = True
        while self._thread is not None and self._thread.is_alive():
            self._predictor.end()  # it may be about to start
            self._thread.join(0.05)

    def wait(self, seconds: float = 0.0) -> Sequence[float] | None:
        """Predicted seconds of a step by plan, after at most so many seconds; None if they are not known by then.

        They are empty if the prediction failed or took too long. A warning has told why.
        """
        if self._thread is None:
            return None
        self._thread.join(seconds)
        return None if self._thread.is_alive() else self._found

    def _predict(self, traces: Sequence[StepTrace], slowest: float) -> None:
        # Times of a workload hold for a node of speed 1.
        speed = min(node.speed for node in self._cluster.nodes)
        timed = timed_workload(self._workload, self._schedule, traces, speed * slowest)
        constants = self._constants.model_copy(update={"computing": computing_cores(traces)})
        found = self._predictor.predict(
            timed, self._cluster, constants, self._plans, self._limit, PATIENCE + self._limit, self._overlaps
        )
        if not found:
            raise PredictorError(f"they took more CPU time than tuning.search allows ({self._limit:g} s)")
        if not all(map(math.isfinite, found)):
            raise PredictorError(f"predicted seconds are {found}")
        self._found = found

    def _run(self, traces: Sequence[StepTrace], slowest: float) -> None:
        try:
            self._predict(traces, slowest)
        except MissingPackageError:
            pass  # the reason for the first plan says so
        except Exception as error:  # training does not depend on it
            if not self._stopped:
                warnings.warn(
                    f"AutoSync: plans are tried in the order of their first predictions, because new ones failed: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=1,
                )

"""Faults of the soak in jobs that tune themselves: at what moment of the tuning a rank meets its fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partialmethod
from itertools import count
from typing import Any, Protocol
from unittest import mock

from lightning_autosync import ClusterSpec, TuningSettings
from lightning_autosync.engine.connections import _Connector
from lightning_autosync.errors import ExchangeError
from lightning_autosync.measure.probe import mesh_meter, meter
from lightning_autosync.measure.probe.mesh_meter import MeshMeter
from lightning_autosync.measure.probe.quick import JobSurvey
from lightning_autosync.plan import builders
from lightning_autosync.plan.builders.default import NATIVE
from lightning_autosync.strategy.tuning import job_tuning, opening, proposals, recovery
from lightning_autosync.strategy.tuning.drift import DriftWatch
from lightning_autosync.strategy.tuning.live import LiveTuner
from lightning_autosync.strategy.tuning.opening import BackgroundOpening
from lightning_autosync.strategy.tuning.pass_times import PassTimes
from lightning_autosync.strategy.tuning.predictor import PREDICTOR
from lightning_autosync.strategy.tuning.prices import PlanPrices
from lightning_autosync.strategy.tuning.tuner import Tuner

TUNES = TuningSettings(probe=3.0, search=0.2, plans=3, warm_up=1, passes=4, cache=None)
TUNED_EPOCHS = 20
PLANS = (NATIVE, "ps", "packed_trees", "partitioned_all_reduce")
"""Builders of the plans of a job."""
CONNECT = 3.0
"""Seconds in which ranks must connect for a plan that is tried: each of the plans may cost a job so long."""
OTHER_PLAN, NO_CONNECTION = "other plan", "no connection"
SURVEY, OPENING, PASS, END, AGAIN = "survey", "opening", "pass", "end of tuning", "measuring again"
EXCURSION = "pass of the former plan"
MOMENTS = {SURVEY: 2, OPENING: 2, PASS: 30, END: 1, AGAIN: 1, EXCURSION: 2}
"""Moments of the tuning, and how often each comes in a job, about."""
MOMENT_OF = {OTHER_PLAN: PASS, NO_CONNECTION: OPENING}
"""The moment of faults that cannot come at any."""


class Meets(Protocol):
    """The fault of a job; see ``soak_calls.Injection``."""

    fault: dict[str, Any] | None

    def is_of(self, *kinds: str) -> bool: ...

    def happen(self) -> None: ...

    def note(self) -> None: ...


class Moments:
    """Counts the moments of a job's tuning on this rank, and lets its fault happen at the right one."""

    def __init__(self, injection: Meets) -> None:
        self._injection = injection
        self._counts = Counter[str]()
        self._opening = False

    def come(self, moment: str) -> None:
        """Count a moment; the fault may happen now."""
        self._counts[moment] += 1
        fault = self._injection.fault
        if fault is not None and (fault["moment"], fault["count"]) == (moment, self._counts[moment]):
            self._injection.happen()

    def open(self, own: Callable[..., Any], *arguments: Any) -> Any:
        """In place of the method by which a job opens a plan to try it."""
        self.come(OPENING)
        self._opening = True
        try:
            return own(*arguments)
        finally:
            self._opening = False

    def end_pass(self, own: Callable[..., str], tuner: LiveTuner) -> str:
        """In place of the method that a pass calls at its end."""
        self.come(EXCURSION if tuner._used == tuner._former else PASS)
        return own(tuner)

    def connect(self, own: Callable[..., Any], *arguments: Any) -> Any:
        """In place of the method by which a rank connects to others."""
        fault = self._injection.fault
        due = fault is not None and self._counts[OPENING] >= fault["count"]
        if due and self._opening and self._injection.is_of(NO_CONNECTION):
            self._injection.note()
            raise ExchangeError("the network of this rank is down")
        return own(*arguments)

    def follow(self, own: Callable[..., int], tuner: Tuner) -> int:
        """In place of the method that chooses the plan of a pass."""
        plan, fault = own(tuner), self._injection.fault
        if self._injection.is_of(OTHER_PLAN) and fault is not None and self._counts[PASS] == fault["count"]:
            self._injection.note()
            return (plan + 1) % len(tuner._candidates)
        return plan


@contextmanager
def tuning(rank: int, injection: Meets, seed: int) -> Iterator[None]:
    """The context in which a job tunes itself, and this rank meets its fault if it has one.

    All ranks are on this machine, but count as hosts of their own. When trials have ended, all ranks measure links
    again. With half of the seeds they then find that links have changed, tune again, and use the former plan for two
    passes now and then.

    Links are measured, but briefly, and the rates do not count: a busy machine can make them useless, and the job would
    then try no plan. Plans are those of `PLANS`, in place of a search, which takes a core for a second. With half of
    the seeds the job begins with DDP's plan.
    """
    moments, measure = Moments(injection), proposals.survey_job

    def survey(*arguments: Any, **options: Any) -> JobSurvey:
        return with_rates(measure(*arguments, **options))

    def plans(workload: Any, cluster: ClusterSpec, *_: Any, **__: Any) -> list[dict[str, Any]]:
        seconds = [0.01 if seed // 2 % 2 else 0.0107, 0.01, 0.01, 0.01]
        made = [builders.build(name, workload, cluster).to_dict() for name in PLANS]
        found = zip(made, seconds, PLANS, strict=True)
        return sorted(
            ({"plan": p, "seconds": s, "origin": o, "balanced": None, "busy": 0.0} for p, s, o in found),
            key=lambda each: each["seconds"],
        )

    changes, windows = iter([["a test says so"]] if seed % 2 else []), count()

    def record(self: DriftWatch, window: Any, passes: int | None = None) -> str:
        after_trials = passes is None
        self.slowing = PassTimes(0.0, 0.0, 0.0), PassTimes(0.0, 0.0, 0.0)  # no pass is as fast as that again
        return "a test says so" if after_trials and next(windows) == 1 else ""

    with ExitStack() as patches:
        replaced: list[tuple[Any, str, Any]] = [
            (MeshMeter, "_run_all", _after(lambda: moments.come(SURVEY), MeshMeter._run_all)),
            (LiveTuner, "after_pass", _through(moments.end_pass, LiveTuner.after_pass)),
            (recovery, "LEAST", 4),
            (LiveTuner, "_finish", _after(lambda: moments.come(END), LiveTuner._finish)),
            (job_tuning, "find_links", _after(lambda: moments.come(AGAIN), job_tuning.find_links)),
            (BackgroundOpening, "_run", _through(moments.open, BackgroundOpening._run)),
            (_Connector, "run", _through(moments.connect, _Connector.run)),
            (Tuner, "following", _through(moments.follow, Tuner.following)),
            (proposals, "survey_job", survey),
            (PREDICTOR, "search", plans),
            (PREDICTOR, "predict", lambda workload, cluster, constants, plans, *_: [0.01] * len(plans)),
            *((mesh_meter, name, getattr(mesh_meter, name) / 4) for name in ("_HEAD", "_WINDOW", "_TAIL")),
            (meter, "_namespace", lambda: f"of rank {rank}"),
            (job_tuning, "TRIAL_CONNECT_TIMEOUT", CONNECT),
            (DriftWatch, "record", record),
            # These jobs are short: they wait for predictions, and open plans without rests.
            (PlanPrices, "wait", partialmethod(PlanPrices.wait, 60.0)),
            (opening, "SHARE", 1.0),
            (proposals, "check_rates", lambda *_: next(changes, [])),
        ]
        for owner, name, function in replaced:
            patches.enter_context(mock.patch.object(owner, name, function))
        yield


def with_rates(survey: JobSurvey) -> JobSurvey:
    """A survey with the hosts that were found, and with a rate of 1 Gbit/s of every link."""
    found = survey.cluster.to_dict()
    links = [{"a": node["name"], "b": "switch", "bandwidth": "1 Gbit/s"} for node in found["nodes"]]
    cluster = ClusterSpec.from_dict({**found, "switches": ["switch"], "links": links})
    return replace(survey, cluster=cluster, fault=None)


def _after(call: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a call first."""

    def both(*arguments: Any, **options: Any) -> Any:
        call()
        return function(*arguments, **options)

    return both


def _through(method: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in whose place ``method`` is called, with the function as first argument."""
    return lambda *arguments: method(function, *arguments)

"""Jobs of two ranks that tune themselves."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partialmethod
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jobs
import models
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from overlap_jobs import late_steps
from torch import nn
from torch.nn import functional as F

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy, ClusterSpec, TuningSettings
from lightning_autosync.engine import tracing
from lightning_autosync.engine.connections import _Connector
from lightning_autosync.engine.resources import Resources
from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.errors import ExchangeError
from lightning_autosync.measure.probe import meter
from lightning_autosync.measure.probe.quick import JobSurvey, compare_with_job
from lightning_autosync.plan import Compressor, builders
from lightning_autosync.replay import Constants
from lightning_autosync.search.memory import TuningCache
from lightning_autosync.strategy import resolution
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.replica_comparison import WeightComparison
from lightning_autosync.strategy.tuning import job_tuning, live, memory, opening, preparation, proposals
from lightning_autosync.strategy.tuning.contest import Contest
from lightning_autosync.strategy.tuning.drift import DriftWatch
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.strategy.tuning.live import LiveTuner
from lightning_autosync.strategy.tuning.opening import BackgroundOpening
from lightning_autosync.strategy.tuning.pass_times import AgreedTimes, PassTimes
from lightning_autosync.strategy.tuning.predictor import PREDICTOR
from lightning_autosync.strategy.tuning.prices import PlanPrices
from lightning_autosync.strategy.tuning.proposals import JobLinks, Proposals
from lightning_autosync.strategy.tuning.tuner import Tuner
from lightning_autosync.workload import describe

PAIR = ClusterSpec.uniform(2, bandwidth="1 Gbit/s", name="pair")
SHORT = TuningSettings(probe=0, search=0.5, warm_up=1, passes=8, cache=None)


@contextmanager
def counted_switches(patience: float = 60.0) -> Iterator[list[str]]:
    """The fingerprints of the plans that were switched to, while the context is open.

    Contests last as long as they may, whatever the times, and every second candidate wins. See also `hurrying`.
    """
    switches: list[str] = []
    use, begun = ExactReplica._use, count()
    winners: dict[Contest, bool] = {}

    def decide_late(self: Contest) -> bool | None:
        if self not in winners:
            winners[self] = next(begun) % 2 == 0
        return winners[self] if min(self.passes) >= SHORT.passes else None

    def spy(self: ExactReplica, engine: Any) -> None:
        before = self.engine
        use(self, engine)
        if before is not None and before is not self.engine:
            switches.append(self.plan.fingerprint)

    with (
        mock.patch.object(ExactReplica, "_use", spy),
        mock.patch.object(Contest, "_decide", decide_late),
        hurrying(patience=patience),
    ):
        yield switches


@contextmanager
def hurrying(opened: bool = True, patience: float = 60.0) -> Iterator[None]:
    """The context of a short job: it waits for predictions and, if ``opened``, for plans that are being opened.

    ``patience`` is for how many seconds at most it waits for the latter. With overlap, a rank may read a gradient where
    others do not. They wait for it before they open their part, so it must not wait for them long.
    """
    is_under_way = BackgroundOpening.is_under_way

    def wait(self: BackgroundOpening) -> bool:
        if opened and self._resources is not None:
            futures.wait([self._resources], patience)
        return is_under_way(self)

    with (
        mock.patch.object(PlanPrices, "wait", partialmethod(PlanPrices.wait, 60.0)),
        mock.patch.object(opening, "SHARE", 1.0),
        mock.patch.object(BackgroundOpening, "is_under_way", wait),
    ):
        yield


def compare(model: str, strategy: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """How far a job that tunes itself ends from DDP, and how often it switched."""
    options = {"cluster": PAIR.to_dict(), "tuning": SHORT, **(strategy or {})}
    with counted_switches(1.0 if "overlap" in options else 60.0) as switches:
        found = jobs.compare(model, strategy=options, max_epochs=12, **arguments)
    return {**found, "switches": len(switches)}


@contextmanager
def scripted_switches(every: int) -> Iterator[list[int]]:
    """The plans that were switched to, while the context is open.

    After each ``every`` passes with a plan, another one is opened, drawn at random, and used as soon as it is open.
    """
    drawn = Random(0)

    def following(self: Tuner) -> int:
        if self._opened:
            assert self._trying is not None
            self.present, self._trying, self._opened = self._trying, None, False
        asked = vars(self)["asked"] = vars(self).get("asked", -1) + 1
        if asked % every == every - 1 and self._trying is None:
            self._trying = drawn.choice([index for index in range(len(self._candidates)) if index != self.present])
        return self.present

    with (
        mock.patch.object(Tuner, "following", following),
        mock.patch.object(Tuner, "record"),
        counted_switches() as switches,
    ):
        yield switches


def compare_with_fixed(precision: str | None = None, half: bool = False, **arguments: Any) -> dict[str, Any]:
    """How far a job that switches all the time ends from one with DDP's plan, after at least 300 steps."""
    options = {"max_epochs": 5, **arguments} if precision is None else {"max_epochs": 5, "precision": precision}
    with scripted_switches(every=9) as switches:
        ours = jobs.fit("Mixture", AutoSyncStrategy(cluster=PAIR, tuning=SHORT), jobs._scaler(half), **options)
    fixed = AutoSyncStrategy(plan="all_reduce", cluster=PAIR)
    theirs = jobs.fit("Mixture", fixed, jobs._scaler(half), **options)
    jobs.seed_everything(3)
    start = models.Mixture().to(next(ours.parameters()).dtype)
    return {
        "distance": jobs.distance(ours, theirs),
        "moved": {name: float((one - other).abs().max()) for name, one, other in _pairs(ours, start)},
        "finite": all(bool(tensor.isfinite().all()) for tensor in ours.state_dict().values()),
        "scale": ours.scale,
        "switches": len(switches),
        "plans": len({*switches}),
    }


def compressed_switches(**options: Any) -> dict[str, Any]:
    """How far a job that switches all the time between two plans with the same compressor ends from a fixed one.

    The plans differ only in the number of the messages' priority, so only lost residuals can change the weights.
    """
    kind = Compressor(kind="topk", ratio=0.2)
    plan = builders.all_reduce(describe(models.Plain()), ClusterSpec.uniform(1, 2), topology="star", compressor=kind)
    other = plan.model_copy(update={"groups": tuple(group.model_copy(update={"priority": 1}) for group in plan.groups)})
    plans = [proposals.Alternative(each, name, 1.0) for each, name in ((plan, "one"), (other, "other"))]

    def propose(*_: Any) -> tuple[Proposals, str]:
        return Proposals(plans, "a test says so"), ""

    options = {"cluster": PAIR, "semantics": "compressed", **options}
    with scripted_switches(every=3) as switches, mock.patch.object(preparation, "propose", propose):
        ours = jobs.fit("Plain", AutoSyncStrategy(tuning=SHORT, **options), max_epochs=12)
    theirs = jobs.fit("Plain", AutoSyncStrategy(plan=plan, **options), max_epochs=12)
    exact = jobs.fit("Plain", DDPStrategy(), max_epochs=12)
    return {
        "distance": jobs.distance(ours, theirs),
        "lost": jobs.distance(ours, exact),
        "switches": len(switches),
    }


def checkpoints_in_trials() -> list[tuple[bool, bool]]:
    """For each step of a job that tries an exact plan and a compressed one in turn: which plan is in use, and lossy.

    Returns:
        Whether the plan in use is compressed, and whether a checkpoint would have what compression has lost so far.
    """
    kind = Compressor(kind="topk", ratio=0.2)
    cluster, workload = ClusterSpec.uniform(1, 2), describe(models.Plain())
    lossy = builders.all_reduce(workload, cluster, topology="star", compressor=kind)
    plans = [
        proposals.Alternative(each, name, 1.0)
        for each, name in ((lossy, "lossy"), (builders.all_reduce(workload, cluster), "exact"))
    ]
    found = list[tuple[bool, bool]]()

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            replica = trainer.strategy._replica  # type: ignore[union-attr]
            entry = replica.gather_state()
            found.append((replica.engine.has_residuals, entry is not None and bool(entry["variables"])))

    def propose(*_: Any) -> tuple[Proposals, str]:
        return Proposals(plans, "a test says so"), ""

    with scripted_switches(every=3), mock.patch.object(preparation, "propose", propose):
        strategy = AutoSyncStrategy(tuning=SHORT, cluster=PAIR, semantics="compressed")
        jobs.fit("Plain", strategy, max_epochs=4, callbacks=[Saves()])
    return found


def _pairs(one: nn.Module, other: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for (name, ours), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        yield name, ours, theirs


def repeated(**arguments: Any) -> dict[str, Any]:
    """How far two jobs of the same seed on four ranks end from each other, whose trials have other outcomes.

    In the first one, every second candidate wins; in the other one, none does.
    """
    cluster, told = ClusterSpec.star([2.5e8, 1e8, 1e8, 1e8], name="star"), list[str]()
    found, switched, reports = list[nn.Module](), list[int](), list[Any]()
    try:
        for none_wins in (False, True):
            strategy = AutoSyncStrategy(cluster=cluster, tuning=SHORT)
            with ExitStack() as patches:
                switches = patches.enter_context(counted_switches())
                patches.enter_context(mock.patch.object(job_tuning, "rank_zero_info", told.append))
                if none_wins:
                    patches.enter_context(mock.patch.object(Contest, "_decide", _lose_late))
                found.append(jobs.fit("Plain", strategy, devices=4, max_epochs=24, **arguments))
            switched.append(len(switches))
            reports.append(strategy.report())
    finally:
        torch.use_deterministic_algorithms(False)  # which a Trainer turns on for the process
    return {"distance": jobs.distance(*found), "switches": switched, "told": told, "reports": list(map(str, reports))}


def _lose_late(self: Contest) -> bool | None:
    return False if min(self.passes) >= SHORT.passes else None


def switches_with(**options: Any) -> int:
    with counted_switches() as switches:
        jobs.fit("Plain", AutoSyncStrategy(cluster=PAIR, **options), max_epochs=4)
    return len(switches)


def outcome() -> dict[str, Any]:
    """What one job found."""
    found: dict[str, Any] = {}
    finish = LiveTuner.close

    def spy(self: LiveTuner) -> None:
        found.update(done=self.state, trials=len(self.trials))
        finish(self)

    LiveTuner.close = spy  # type: ignore[method-assign]
    try:
        strategy = AutoSyncStrategy(cluster=PAIR, tuning=replace(SHORT, plans=2))
        with hurrying():
            jobs.fit("Plain", strategy, max_epochs=12)
    finally:
        LiveTuner.close = finish  # type: ignore[method-assign]
    assert strategy.plan is not None
    report = strategy.report()
    assert report is not None
    return {**found, "plan": strategy.plan.fingerprint, "report": report.to_dict()}


@contextmanager
def timed_as_if(waiting: bool) -> Iterator[None]:
    """In this context, passes of plans that wait seem to take half as long as others if ``waiting``, else twice."""
    record = Tuner.record

    def invent(self: Tuner, seconds: float) -> None:
        plan = self._awaited[0]
        record(self, 1.0 if plan is None or self._candidates[plan].waits != waiting else 0.5)

    with mock.patch.object(Tuner, "record", invent):
        yield


@contextmanager
def noted_passes() -> Iterator[list[tuple[bool, bool]]]:
    """Whether the plan of each pass of jobs that tune themselves waits, and whether its backward pass ended so."""
    found, after_pass = list[tuple[bool, bool]](), LiveTuner.after_pass

    def note(self: LiveTuner) -> str:
        waits = self._alternatives[self._used].plan.waits
        reason = after_pass(self)
        found.append((waits, not self.trace.overlapped))
        return reason

    with mock.patch.object(LiveTuner, "after_pass", note):
        yield found


def overlapping_trials() -> dict[str, Any]:
    """How far a job that tries plans with overlap and waiting ends from one that waits, and its `noted_passes`."""
    with counted_switches() as switches, noted_passes() as passes:
        strategy = AutoSyncStrategy(cluster=PAIR, tuning=SHORT, overlap="step")
        ours = jobs.fit("Plain", strategy, max_epochs=12)
    theirs = jobs.fit("Plain", AutoSyncStrategy(cluster=PAIR, tuning="off"), max_epochs=12)
    return {"distance": jobs.distance(ours, theirs), "switches": len(switches), "passes": passes}


def remembered_overlap(folder: str, waiting: bool) -> list[dict[str, Any]]:
    """What jobs with ``overlap="step"`` find where `timed_as_if` says what is faster: whether passes waited at last.

    The second job remembers the plan of the first one, and the third one has it from its user.
    """
    found, plans = list[dict[str, Any]](), list[Any]([None, None])
    tuning = replace(SHORT, plans=2, cache=folder)
    theirs = jobs.fit("Plain", AutoSyncStrategy(cluster=PAIR, tuning="off"), max_epochs=12)
    for number in range(3):
        given = {"plan": plans[0]} if number == 2 else {"tuning": tuning}
        strategy = AutoSyncStrategy(cluster=PAIR, overlap="step", **given)
        with noted_passes() as passes, timed_as_if(waiting), hurrying(), late_steps() as late:
            ours = jobs.fit("Plain", strategy, max_epochs=12)
        report = strategy.report()
        assert report is not None
        plans[0] = strategy.plan
        found.append(
            {
                "distance": jobs.distance(ours, theirs),
                "report": report.to_dict(),
                "told": str(report),
                "waited": [waited for _, waited in passes],
                "late": late[0],
            }
        )
    return found


def taken_predictions() -> dict[str, list[bool]]:
    """Whether passes with ``overlap="step"`` ended their backward pass without a wait: all of them, and those at whose
    end ranks took rank 0's predictions."""
    overlapped, taken, after_pass = list[bool](), list[bool](), LiveTuner.after_pass

    def note(self: LiveTuner) -> str:
        known, reason = self._tuner.priced, after_pass(self)
        overlapped.append(self.trace.overlapped)
        taken.extend([self.trace.overlapped] * (self._tuner.priced and not known))
        return reason

    with mock.patch.object(LiveTuner, "after_pass", note), hurrying():
        jobs.fit("Plain", AutoSyncStrategy(cluster=PAIR, tuning=SHORT, overlap="step"))
    return {"overlapped": overlapped, "taken": taken}


def times_of_gradients(**options: Any) -> dict[str, Any]:
    """The number of gradients with a time in each step by which plans are predicted, and in the last step of a job."""
    predicted, every = list[int](), list[int]()
    start, after_pass = PlanPrices.start, LiveTuner.after_pass

    def note_start(self: PlanPrices, traces: Sequence[StepTrace], slowest: float) -> None:
        predicted.extend(len(trace.arrivals) for trace in traces)
        start(self, traces, slowest)

    def note_pass(self: LiveTuner) -> str:
        reason = after_pass(self)
        every.append(len(self.trace.arrivals))
        return reason

    with (
        mock.patch.object(PlanPrices, "start", note_start),
        mock.patch.object(LiveTuner, "after_pass", note_pass),
        hurrying(patience=1.0),
    ):
        model = jobs.fit("Plain", AutoSyncStrategy(cluster=PAIR, tuning=SHORT, **options))
    return {"predicted": predicted, "last": every[-1], "parameters": len(list(model.parameters()))}


def without_addresses(cluster: dict[str, Any], **options: Any) -> dict[str, Any]:
    """How far a job ends from DDP whose nodes have a further interface without an address; its plans and warnings."""
    warned: list[str] = []
    strategy = AutoSyncStrategy(cluster=ClusterSpec.from_dict(cluster), **options)
    with mock.patch.object(resolution, "rank_zero_warn", warned.append), hurrying():
        ours = jobs.fit("Plain", strategy)
    theirs = jobs.fit("Plain", DDPStrategy())
    assert strategy.plan is not None
    report = strategy.report()
    assert report is not None
    plans = [strategy.plan, *(each.plan for each in report.resolution.alternatives)]
    trees = [tree for plan in plans for group in plan.groups for tree in group.trees or ()]
    return {
        "distance": jobs.distance(ours, theirs),
        "interfaces": sorted({tree.interface for tree in trees}),
        "nodes": len(report.resolution.cluster.nodes),
        "warned": warned,
    }


def fabric(**options: Any) -> dict[str, Any]:
    """Like `compare`, with Fabric and plain backward passes."""
    with counted_switches() as switches:
        ours = _train_with_fabric(AutoSyncFabricStrategy(cluster=PAIR, tuning=SHORT, **options))
    theirs = _train_with_fabric(FabricDDP())
    return {"distance": jobs.distance(ours, theirs), "switches": len(switches)}


def fabric_with_modules_in_any_order() -> dict[str, Any]:
    """The weights of two modules that backward passes reach in another order on each rank, without and with tuning."""
    options: dict[str, Any] = {"steps": 60, "cluster": PAIR, "check_replicas": 0}
    expected = jobs.modules_in_any_order(tuning="off", **options)
    with counted_switches() as switches:
        found = jobs.modules_in_any_order(tuning=SHORT, **options)
    return {"expected": expected, "found": found, "switches": len(switches)}


def _train_with_fabric(strategy: Any) -> nn.Module:
    fabric = jobs.make_fabric(strategy)
    torch.manual_seed(3)
    module = models.Plain()
    wrapped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(12):
        for inputs, labels in fabric.setup_dataloaders(models.loader()):
            F.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    fabric.strategy.teardown()
    return module


class NotesFirstPlan(Callback):
    """Notes the fingerprint of the plan that synchronizes the first step."""

    plan = ""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, AutoSyncStrategy)
        assert trainer.strategy.plan is not None
        self.plan = self.plan or trainer.strategy.plan.fingerprint


@contextmanager
def seen_links(cluster: ClusterSpec, costs: Constants) -> Iterator[None]:
    """In this context, jobs seem to run on these nodes, whose hosts have these costs."""

    def compare(described: ClusterSpec, timeout: float) -> list[str]:
        assert timeout > 0
        return ["a test says so"] * (described.name != cluster.name and dist.get_rank() == 0)

    with (
        mock.patch.object(JobTuning, "_why_untuned", return_value=""),  # as on two hosts
        mock.patch.object(proposals, "survey_job", return_value=JobSurvey(cluster, 0.1, 2, None)),
        mock.patch.object(preparation, "compare_with_job", compare),
        mock.patch.object(proposals, "host_constants", return_value=costs),
        mock.patch.object(preparation, "host_constants", return_value=costs),
    ):
        yield


COSTS = Constants(cores=2)


def remembered(folder: str, described: bool) -> list[dict[str, Any]]:
    """What two jobs report, one after the other, that remember plans in a folder."""
    found = []
    for _ in range(2):
        tuning = replace(SHORT, probe=1.0, plans=2, cache=folder)
        strategy, first = AutoSyncStrategy(cluster=PAIR if described else None, tuning=tuning), NotesFirstPlan()
        with seen_links(PAIR, COSTS), hurrying(), mock.patch.object(DriftWatch, "record", return_value=""):
            jobs.fit("Plain", strategy, max_epochs=12, callbacks=[first])
        report = strategy.report()
        assert report is not None
        found.append({**report.to_dict(), "first": first.plan, "costs": report.constants == COSTS})
    return found


def interrupted(folder: str, **options: Any) -> list[dict[str, Any]]:
    """What two jobs report that remember plans in a folder; the first one ends after a trial whose plan was faster."""
    found, after_pass, ending = list[dict[str, Any]](), LiveTuner.after_pass, EndsWhenTried()

    def note(self: LiveTuner) -> str:
        reason = after_pass(self)
        ending.tried = not found and bool(self.trials)
        return reason

    for _ in range(2):
        tuning, first = replace(SHORT, probe=1.0, search=60.0, plans=2, cache=folder), NotesFirstPlan()
        strategy = AutoSyncStrategy(tuning=tuning, **{"cluster": PAIR, **options})
        with seen_links(PAIR, COSTS), counted_switches(), mock.patch.object(LiveTuner, "after_pass", note):
            jobs.fit("Plain", strategy, max_epochs=24, callbacks=[first, ending])
        report = strategy.report()
        assert report is not None
        dist.barrier()  # rank 0 may still write
        (entry,) = TuningCache(folder).entries()
        assert entry.entry is not None
        kept = {"kept": entry.entry.plan.fingerprint, "unfinished": entry.entry.unfinished}
        plans = [each.plan.fingerprint for each in report.resolution.alternatives]
        found.append({**report.to_dict(), **kept, "first": first.plan, "plans": plans})
    return found


def unopenable(at_first: bool, folder: str | None = None) -> dict[str, Any]:
    """How a job ends in which rank 1 cannot connect for any plan, and what it logs.

    Args:
        at_first: whether the job is to begin with such a plan; otherwise it begins with DDP's, and tries others.
        folder: directory of the memory.
    """
    opening, logged = [False], list[str]()
    connect, order = _Connector.run, proposals.order_plans

    def refuse(self: _Connector, targets: Any) -> Any:
        if opening[0] and dist.get_rank() == 1:
            raise ExchangeError("the network is down")
        return connect(self, targets)

    def spied(method: Any) -> Any:
        def spy(self: ExactReplica, *arguments: Any, **options: Any) -> Any:
            opening[0] = True
            try:
                return method(self, *arguments, **options)
            finally:
                opening[0] = False

        return spy

    def reorder(*arguments: Any) -> Proposals:
        plans = sorted(order(*arguments).plans, key=lambda each: each.native != (not at_first))
        return Proposals(plans, "a test says so")

    tuning = replace(SHORT, cache=folder)
    strategy = AutoSyncStrategy(cluster=PAIR, tuning=tuning, timeout=timedelta(seconds=4))
    with (
        mock.patch.object(_Connector, "run", refuse),
        mock.patch.object(ExactReplica, "_open", spied(ExactReplica._open)),
        mock.patch.object(ExactReplica, "_reserve", spied(ExactReplica._reserve)),
        mock.patch.object(proposals, "order_plans", reorder),
        mock.patch.object(live, "rank_zero_info", logged.append),
        mock.patch.object(job_tuning, "TRIAL_CONNECT_TIMEOUT", 0.5),
        hurrying(),
    ):
        ours = jobs.fit("Plain", strategy, max_epochs=12)
    theirs = jobs.fit("Plain", DDPStrategy(), max_epochs=12)
    report = strategy.report()
    assert report is not None
    return {"distance": jobs.distance(ours, theirs), "logged": logged, "report": report.to_dict()}


class EndsWhenTried(Callback):
    """Ends training when ``tried`` is set, which all ranks do in the same step."""

    tried = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = self.tried


def slowly_opened() -> dict[str, Any]:
    """The steps that a job makes while one of its plans is opened, which takes until there are ten of them.

    The job ends with its first trial.
    """
    reserve, after_pass = ExactReplica._reserve, LiveTuner.after_pass
    made, during, moved = 0, list[bool](), threading.Condition()

    def open_slowly(self: ExactReplica, *arguments: Any) -> Any:
        with moved:
            enough = made + 10
            during.append(moved.wait_for(lambda: made >= enough, timeout=60.0))
        return reserve(self, *arguments)

    def note(self: LiveTuner) -> str:
        nonlocal made
        reason = after_pass(self)
        ending.tried = bool(self.trials)
        with moved:
            made += 1
            moved.notify_all()
        return reason

    ending = EndsWhenTried()

    with (
        mock.patch.object(ExactReplica, "_reserve", open_slowly),
        mock.patch.object(LiveTuner, "after_pass", note),
        hurrying(opened=False),
    ):
        strategy = AutoSyncStrategy(cluster=PAIR, tuning=replace(SHORT, plans=1))
        jobs.fit("Plain", strategy, max_epochs=60, callbacks=[ending])
    report = strategy.report()
    assert report is not None
    return {"during": during, "trials": len(report.trials)}


def broken_closing() -> dict[str, Any]:
    """The error of a job that ends within a trial and whose plans cannot be closed, and what stays open."""
    opened, closed, groups = list[Resources](), list[Resources](), _group_count()
    begin, end, close = Resources.__init__, Resources.close, BackgroundOpening.close

    def note_begin(self: Resources, *arguments: Any, **options: Any) -> None:
        opened.append(self)
        begin(self, *arguments, **options)

    def note_end(self: Resources) -> None:
        closed.append(self)
        end(self)

    def fail(self: BackgroundOpening) -> None:
        close(self)
        raise OSError("a test says so")

    with (
        mock.patch.object(Resources, "__init__", note_begin),
        mock.patch.object(Resources, "close", note_end),
        mock.patch.object(BackgroundOpening, "close", fail),
        mock.patch.object(Contest, "_decide", return_value=None),
        hurrying(),
    ):
        error = ""
        try:
            jobs.fit("Plain", AutoSyncStrategy(cluster=PAIR, tuning=SHORT), max_epochs=12)
        except OSError as cause:
            error = str(cause)
    left = [each for each in opened if each not in closed]
    return {"error": error, "opened": len(opened), "left": len(left), "groups": _group_count() - groups}


def without_memory() -> dict[str, Any]:
    """How a job ends whose rank 1 has no memory left for a further plan, and what it logs."""
    logged = list[str]()
    left = 0 if dist.get_rank() == 1 else None
    with (
        mock.patch.object(memory, "available_memory", return_value=left),
        mock.patch.object(live, "rank_zero_info", logged.append),
        hurrying(),
    ):
        strategy = AutoSyncStrategy(cluster=PAIR, tuning=SHORT)
        ours = jobs.fit("Plain", strategy, max_epochs=6)
    theirs = jobs.fit("Plain", DDPStrategy(), max_epochs=6)
    report = strategy.report()
    assert report is not None
    return {"distance": jobs.distance(ours, theirs), "logged": logged, "trials": len(report.trials)}


def _group_count() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def kept_in_memory() -> list[int]:
    """How many plans have their buffers in memory each time that all but the present one are closed, and at the end.

    Python collects no garbage meanwhile, as in a training loop, which leaves too little of it.
    """
    opened, counts = list[weakref.ref[Resources]](), list[int]()
    begin, close = Resources.__init__, LiveTuner._close_others

    def note(self: Resources, *arguments: Any, **options: Any) -> None:
        opened.append(weakref.ref(self))
        begin(self, *arguments, **options)

    def kept() -> int:
        return sum(each() is not None for each in opened)

    def count_kept(self: LiveTuner) -> None:
        close(self)
        deadline = time.monotonic() + 10.0  # the thread that closes them may still run
        while kept() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append(kept())

    with (
        mock.patch.object(Resources, "__init__", note),
        mock.patch.object(LiveTuner, "_close_others", count_kept),
        scripted_switches(every=4),
    ):
        gc.collect()
        gc.disable()
        try:
            jobs.fit("Plain", AutoSyncStrategy(cluster=PAIR, tuning=SHORT), max_epochs=2)
            return [*counts, kept()]
        finally:
            gc.enable()


def divided() -> str:
    """The error of a job in which rank 1 decides otherwise about a plan."""
    decide = Contest._decide
    own = dist.get_rank() == 1
    Contest._decide = lambda self: own if min(self.passes) >= 4 else None  # type: ignore[method-assign]
    try:
        # One rank opens a plan alone, and may wait for the other one, whose process does not end here.
        with hurrying(opened=False):
            jobs.fit(
                "Plain", AutoSyncStrategy(cluster=PAIR, tuning=SHORT, timeout=timedelta(seconds=40)), max_epochs=12
            )
    except ExchangeError as error:
        return str(error)
    finally:
        Contest._decide = decide  # type: ignore[method-assign]
    return "none"


def other_settings() -> str:
    """The error of a job in which rank 1 does not tune."""
    tuning = SHORT if dist.get_rank() == 0 else "off"
    return jobs.error_of("Plain", cluster=PAIR, tuning=tuning)


SLOW = ClusterSpec.uniform(2, bandwidth="100 Mbit/s", name="slow")


def changing_links(cluster: ClusterSpec | None = PAIR, cache: str | None = None, **options: Any) -> dict[str, Any]:
    """How far a job ends from DDP whose links are found to be slower in the middle, and what it reports."""
    slow = JobLinks(SLOW, Constants(), origin="measured")
    windows = count()

    def record(self: DriftWatch, window: PassTimes, passes: int | None = None) -> str:
        after_trials = passes is None
        return "a test says so" if after_trials and next(windows) == 2 else ""

    tuning = replace(SHORT, probe=1.0, plans=1, cache=cache)
    strategy = AutoSyncStrategy(cluster=cluster, tuning=tuning, **options)
    with (
        mock.patch.object(DriftWatch, "record", record),
        mock.patch.object(job_tuning, "find_links", return_value=slow),
        # On busy cores, predictions by the other process could come after the last step.
        mock.patch.object(PREDICTOR, "predict", lambda workload, cluster, constants, plans, *_: [0.01] * len(plans)),
        timed_as_if(waiting=True),
        hurrying(),
    ):
        ours = jobs.fit("Plain", strategy, max_epochs=12)
    theirs = jobs.fit("Plain", DDPStrategy(), max_epochs=12)
    report = strategy.report()
    assert report is not None
    return {"distance": jobs.distance(ours, theirs), "report": report.to_dict(), "windows": next(windows)}


def recovered_links(folder: str) -> list[dict[str, Any]]:
    """What two jobs report: the links of the first one become slow, and are as before when the second one begins."""
    with seen_links(PAIR, COSTS):
        first = changing_links(cluster=None, cache=folder)["report"]
        (entry,) = TuningCache(folder).entries()
        assert entry.entry is not None
        assert entry.entry.cluster == SLOW
        strategy = AutoSyncStrategy(tuning=replace(SHORT, probe=1.0, cache=folder))
        jobs.fit("Plain", strategy, max_epochs=1)
    second = strategy.report()
    assert second is not None
    return [first, {**second.to_dict(), "cluster": second.resolution.cluster.name}]


def slowing_trials(passes: int) -> list[str]:
    """Why a job measures its links that tries plans, and whose steps take twice as long after so many."""
    takes, take = count(), AgreedTimes.take

    def slowed(self: AgreedTimes) -> PassTimes:
        take(self)
        return PassTimes(0.1 if next(takes) < passes else 0.2, 0.0, 0.05)

    links = JobLinks(PAIR, Constants(), origin="measured")
    with (
        mock.patch.object(AgreedTimes, "take", slowed),
        mock.patch.object(job_tuning, "find_links", return_value=links),
        mock.patch.object(proposals, "compare_with_job", return_value=[]),
        hurrying(),
    ):
        strategy = AutoSyncStrategy(cluster=PAIR, tuning=replace(SHORT, probe=1.0, plans=1))
        jobs.fit("Plain", strategy, max_epochs=12)
    report = strategy.report()
    assert report is not None
    assert report.trials
    return list(report.checks)


def slowed_in_trials() -> dict[str, Any]:
    """When a job measures its links whose steps take three times as long from the 40th on, in a long trial.

    It finds other links, and begins anew with a plan for these.
    """
    take, measure, takes, passes, seen = AgreedTimes.take, JobTuning._measure_again, count(), count(), list[Any]()
    after_pass = LiveTuner.after_pass

    def slowed(self: AgreedTimes) -> PassTimes:
        take(self)
        return PassTimes(0.1 if next(takes) < 40 else 0.3, 0.0, 0.05)

    def counted_pass(self: LiveTuner) -> str:
        next(passes)
        return after_pass(self)

    def noted(self: JobTuning, reason: str, *slowing: Any) -> bool:
        seen.append((next(passes), self.trying, reason))
        return measure(self, reason, *slowing)

    slow = JobLinks(SLOW, Constants(), origin="measured")
    with (
        mock.patch.object(AgreedTimes, "take", slowed),
        mock.patch.object(LiveTuner, "after_pass", counted_pass),
        mock.patch.object(JobTuning, "_measure_again", noted),
        mock.patch.object(Contest, "_decide", return_value=None),  # the trial goes on
        mock.patch.object(job_tuning, "find_links", return_value=slow),
        mock.patch.object(proposals, "compare_with_job", return_value=[]),
        hurrying(),
    ):
        strategy = AutoSyncStrategy(cluster=PAIR, tuning=replace(SHORT, probe=1.0, plans=1))
        ours = jobs.fit("Plain", strategy, max_epochs=30)
    theirs = jobs.fit("Plain", DDPStrategy(), max_epochs=30)
    report = strategy.report()
    assert report is not None
    return {"seen": seen, "distance": jobs.distance(ours, theirs), "links": report.links}


def faster_by_a_trial() -> dict[str, Any]:
    """The trials and checks of a job whose steps take half as long once its first trial has accepted a plan."""
    take, end, ended = AgreedTimes.take, Tuner._end_contest, list[bool]()

    def scripted(self: AgreedTimes) -> PassTimes:
        take(self)
        return PassTimes(0.1 if not ended else 0.05, 0.0, 0.025)

    def decide(self: Contest) -> bool | None:
        return None if min(self.passes) < 10 else not ended

    def noted(self: Tuner, contest: Contest) -> None:
        end(self, contest)
        ended.append(True)

    with (
        mock.patch.object(AgreedTimes, "take", scripted),
        mock.patch.object(Contest, "_decide", decide),
        mock.patch.object(Tuner, "_end_contest", noted),
        mock.patch.object(proposals, "compare_with_job", return_value=[]),
        hurrying(),
    ):
        strategy = AutoSyncStrategy(cluster=PAIR, tuning=replace(SHORT, probe=1.0, plans=2))
        jobs.fit("Plain", strategy, max_epochs=14)
    report = strategy.report()
    assert report is not None
    return {"accepted": [trial.accepted for trial in report.trials], "checks": report.checks}


def calls_of_steps(ended: bool) -> dict[str, Any]:
    """The collective calls in steps with a native plan, and the times that ranks agreed on in these steps.

    Args:
        ended: whether tuning has ended before these steps; otherwise the ranks measure steps for the first trial.
    """
    calls, times, passes, tuners = Counter[str](), list[float](), 0, list[LiveTuner]()
    after_pass, take = LiveTuner.after_pass, AgreedTimes.take

    def counted(name: str) -> Any:
        call = getattr(dist, name)

        def count(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return call(*arguments, **options)

        return mock.patch.object(dist, name, count)

    def note(self: LiveTuner) -> str:
        nonlocal passes
        reason, passes = after_pass(self), passes + 1
        tuners.append(self)
        if passes == 4:  # tuning may have ended two passes before
            calls.clear()
            times.clear()
        return reason

    def noted(self: AgreedTimes) -> PassTimes:
        found = take(self)
        times.append(found.whole)
        return found

    tuning = replace(SHORT, probe=1.0, plans=int(not ended), warm_up=1 if ended else 10**6)
    with ExitStack() as patches:
        for name in ("all_reduce", "all_gather", "broadcast"):
            patches.enter_context(counted(name))
        patches.enter_context(mock.patch.object(LiveTuner, "after_pass", note))
        patches.enter_context(mock.patch.object(AgreedTimes, "take", noted))
        patches.enter_context(mock.patch.object(proposals, "compare_with_job", return_value=[]))
        patches.enter_context(mock.patch.object(proposals, "LEAST_GAIN", math.inf))
        patches.enter_context(mock.patch.object(DriftWatch, "record", return_value=""))  # a busy machine slows steps
        # What the job does after its last step does not count.
        patches.enter_context(mock.patch.object(WeightComparison, "run"))
        strategy = AutoSyncStrategy(cluster=PAIR, tuning=tuning, check_replicas=0)
        jobs.fit("Plain", strategy, max_epochs=12)
    assert strategy.schedule is not None
    messages = len(strategy.schedule.messages)
    return {
        "calls": dict(calls),
        "passes": passes - 4,
        "messages": messages,
        "times": times,
        "ended": tuners[-1]._tuner.finished != "",
    }


class Pauses(Callback):
    """A clock that goes on by a second in each step, and by far more in validation, checkpoints and logging."""

    now, pauses = 0.0, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 1.0

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 4:
            self._pause()

    def on_validation_start(self, *_: Any) -> None:
        self._pause()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._pause()

    def _pause(self) -> None:
        self.now += 100.0
        self.pauses += 1


def pauses(folder: str, **options: Any) -> dict[str, Any]:
    """The seconds of passes after the warm-up of a job, by a clock that only `Pauses` moves, and speedups in trials."""
    tuning = TuningSettings(probe=0, search=0.5, passes=8, plans=1, cache=None)
    clock, seconds, record = Pauses(), list[float](), Tuner.record

    def note(self: Tuner, period: float) -> None:
        seconds.append(period)
        record(self, period)

    saves = ModelCheckpoint(folder, every_n_train_steps=6)
    hands = SimpleNamespace(perf_counter=lambda: clock.now, thread_time=time.thread_time)
    with mock.patch.object(tracing, "time", hands), mock.patch.object(Tuner, "record", note), hurrying():
        strategy = AutoSyncStrategy(cluster=PAIR, tuning=tuning, **options)
        arguments = {"max_epochs": 8, "val_check_interval": 4, "enable_checkpointing": True}
        jobs.fit("Logs", strategy, callbacks=[saves, clock], **arguments)
    report = strategy.report()
    assert report is not None
    speedups = [trial.speedup for trial in report.trials]
    return {"seconds": seconds[tuning.warm_up :], "pauses": clock.pauses, "speedups": speedups}


def slow_search() -> dict[str, Any]:
    """What ranks get of a search that takes longer than they wait for each other."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    settings = AutoSyncStrategy(cluster=PAIR, tuning=SHORT, timeout=1.0)._settings
    links, workload, search = JobLinks(PAIR, Constants()), describe(models.Plain()), PREDICTOR.search

    def search_long(*arguments: Any, **options: Any) -> Any:
        time.sleep(2.5)
        return search(*arguments, **options)

    with mock.patch.object(PREDICTOR, "search", search_long):
        found, fault = proposals.propose(workload, links, settings, group)
    return {"fault": fault, "plans": [] if found is None else [each.plan.fingerprint for each in found.plans]}


def collections() -> int:
    """Number of full garbage collections between the choice of a job's plan and its first step."""
    counts, start, begin = list[int](), JobTuning.start, LiveTuner.__init__

    def note(self: Any, *arguments: Any, method: Any, **options: Any) -> Any:
        counts.append(gc.get_stats()[2]["collections"])
        return method(self, *arguments, **options)

    with (
        mock.patch.object(JobTuning, "start", partialmethod(note, method=start)),
        mock.patch.object(LiveTuner, "__init__", partialmethod(note, method=begin)),
    ):
        jobs.fit("Plain", AutoSyncStrategy(cluster=PAIR, tuning=SHORT), max_epochs=1)
    before, after = counts
    return after - before


def far_rates() -> list[str]:
    """What a comparison finds on two ranks, as if on two hosts, whose links are far faster than described."""
    with mock.patch.object(meter, "_namespace", return_value=f"of rank {dist.get_rank()}"):
        return compare_with_job(ClusterSpec.uniform(2, bandwidth="1 Mbit/s", name="slow"), timeout=10.0, limit=5.0)

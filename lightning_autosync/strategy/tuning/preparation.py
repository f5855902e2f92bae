"""What a job finds out before its first step: its hosts and links, and plans that fit them, or an earlier result."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from socket import gethostname

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_autosync.cluster import ClusterSpec, ring_time
from lightning_autosync.engine.collectives import broadcast_json, gather_json
from lightning_autosync.engine.connections import own_address
from lightning_autosync.measure.probe.hosts import host_constants
from lightning_autosync.measure.probe.quick import compare_with_job
from lightning_autosync.plan import SyncPlan, builders, signature
from lightning_autosync.plan.builders.default import NATIVE, is_native
from lightning_autosync.plan.builders.rows import place_rows
from lightning_autosync.replay import Constants
from lightning_autosync.search.memory import Evidence, TunedPlan, TuningCache, TuningKey
from lightning_autosync.strategy.agreement import agree
from lightning_autosync.strategy.log import rank_zero_info
from lightning_autosync.strategy.resolution import checked_workload
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning.live import Alternative, LiveTuner
from lightning_autosync.strategy.tuning.predictor import PREDICTOR
from lightning_autosync.strategy.tuning.proposals import (
    DESCRIBED,
    JobLinks,
    Proposals,
    compare_links,
    find_links,
    propose,
)
from lightning_autosync.strategy.tuning.settings import DEFAULT_CACHE, TuningSettings
from lightning_autosync.workload import Workload


@dataclass(frozen=True)
class Preparation:
    """Links and plans of a job, found before its first step.

    Attributes:
        links: hosts and links of the job.
        key: key of the job in the memory.
        proposals: plans that fit; None if rates are unknown, or all ranks are on one host.
        remembered: fingerprint of the plan that an earlier job found; None without one.
        expected: seconds of a step in that job; None if its trials had not ended, so that this job goes on with them.
    """

    links: JobLinks
    workload: Workload
    key: TuningKey
    proposals: Proposals | None = None
    remembered: str | None = None
    expected: float | None = None

    @property
    def on_one_host(self) -> bool:
        return len(self.links.cluster.nodes) == 1


def prepare(
    settings: StrategySettings,
    module: nn.Module,
    nodes: int,
    devices: int,
    group: dist.ProcessGroup | None = None,
    also: Container[nn.Parameter] = (),
    links: JobLinks | None = None,
    device: str = "cpu",
    meanwhile: Callable[[], None] = lambda: None,
) -> Preparation:
    """Find hosts, links and plans of a job; collective.

    A plan that an earlier job of the same key has found is proposed without a search, if its links still have the rates
    that this job knew. If that job ended before its trials did, its plan comes first among those of a new search.

    Args:
        settings: settings of the strategy, with ``tuning``.
        group: the ranks; None is the default group.
        also: frozen parameters that plans also cover.
        links: the links, if they are known already; the memory is then not asked.
        device: type of the devices that compute, for example ``cpu`` or ``cuda``.
        meanwhile: called on all ranks while rank 0 searches; collective.

    Raises:
        DocumentError: (or a subclass, on every rank) model, cluster and job do not fit each other.
    """
    tuning = settings.tuning
    assert tuning is not None
    workload = agree(
        lambda: checked_workload(settings, module, nodes, devices, also),
        lambda found: {"the model's parameters": found.fingerprint},
        group,
    )
    hosts = gather_json(f"{gethostname()} {own_address()}", group)
    key = TuningKey.of(workload, hosts, device, settings.semantics, settings.bucket_bytes, settings.overlap)
    entry = _recall(key, settings, group) if links is None else None
    if links is None:
        if entry is not None and not entry.unfinished:
            costs = host_constants() if tuning.probe else Constants()
            return _of_entry(entry, workload, key, settings.cluster is not None, costs)
        if len({*hosts}) > 1 and dist.get_rank(group) == 0:
            PREDICTOR.start()
        links = find_links(settings.cluster, nodes, devices, tuning.probe, settings.timeout)
    if links.fault or len(links.cluster.nodes) == 1:
        PREDICTOR.end()  # it has started for nothing
        return Preparation(links, workload, key)
    if entry is not None and settings.cluster is None:
        earlier = replace(links, cluster=entry.cluster)
        # Unlike processors may round rates differently, so rank 0 compares them for all.
        is_first = dist.get_rank(group) == 0
        words, changed = broadcast_json(compare_links(earlier, links) if is_first else None, group)
        if changed is not None:
            rank_zero_info(f"{_UNUSED}. {words}")
            entry = None
    constants = links.constants.model_copy(update={"accelerated": device != "cpu"})

    def known() -> list[tuple[str, SyncPlan]]:
        return [*([] if entry is None else [_named(entry)]), *_near_plans(key, links.cluster, tuning)]

    proposals, fault = propose(workload, replace(links, constants=constants), settings, group, known, meanwhile)
    found = Preparation(replace(links, fault=fault), workload, key, proposals)
    return found if entry is None or proposals is None else _beginning_with(entry, found, proposals)


def remember(preparation: Preparation, tuner: LiveTuner, cache: str | None) -> None:
    """Keep the plan that a job found, for later jobs of the same key; call it on rank 0. It raises no errors.

    The plan of a job whose trials had ended stays if those of this job have not.
    """
    plan = tuner.present
    known = preparation.expected is not None and preparation.remembered == plan.plan.fingerprint
    if cache is None or known:
        return  # the entry of the earlier job has more evidence
    try:
        measured, compared = tuner.evidence
        evidence = Evidence(
            predicted=plan.predicted or None,
            measured=measured,
            compared=tuple(compared),
            synchronized_steps=tuner.passes,
        )
        entry = TunedPlan(
            key=preparation.key,
            plan=plan.plan,
            origin=plan.name,
            cluster=preparation.links.cluster,
            evidence=evidence,
            written=datetime.now(timezone.utc),
            torch=torch.__version__,
            unfinished=not tuner.ended,
        )
    except ValueError as error:  # training must not end because its plan cannot be remembered
        rank_zero_warn(f"the plan that this job found is not saved for later jobs: {error}")
        return
    memory = _memory(cache)
    if entry.unfinished and (kept := memory.find(entry.key)) is not None and not kept.unfinished:
        return  # that one has more evidence
    memory.store(entry)


def forget(preparation: Preparation, cache: str | None) -> None:
    """Remove the plan of an earlier job that ranks cannot set up, so that the next job searches; call it on rank 0."""
    if cache is not None and preparation.remembered is not None:
        _memory(cache).remove(preparation.key)
        rank_zero_info("AutoSync: the saved plan of an earlier job is deleted; the next job searches for plans again")


_UNUSED = "AutoSync: the saved plan of an earlier job is not used, because hosts or links are not as in that job"
_OF_EARLIER_JOB = ", of an earlier job"
_MOST_NEAR = 3
"""Number of plans of other jobs that a search prices: it has seconds for all plans."""


def _near_plans(key: TuningKey, cluster: ClusterSpec, tuning: TuningSettings) -> list[tuple[str, SyncPlan]]:
    """Names and plans that jobs of the same model have found on other hosts with such links; call it on rank 0.

    Native plans are left out, because each search has such.
    """
    if tuning.cache is None:
        return []
    found = dict[str, tuple[str, SyncPlan]]()
    try:
        for entry in _memory(tuning.cache).nearest(key, cluster):
            if not is_native(_source(entry)):
                found.setdefault(entry.plan.fingerprint, _named(entry))
    except Exception as error:  # a search needs no memory
        rank_zero_warn(f"plans of other jobs take no part in the search: {type(error).__name__}: {error}")
    return list(found.values())[:_MOST_NEAR]


def _named(entry: TunedPlan) -> tuple[str, SyncPlan]:
    """The plan of an earlier job with a name that says so. It waits only where a search lets its plans wait."""
    name = f"{_source(entry)}{_OF_EARLIER_JOB} ({entry.written:%Y-%m-%d})"
    return name, entry.plan.model_copy(update={"waits": False})


def _source(entry: TunedPlan) -> str:
    """The name of a plan without what jobs have added to it."""
    return entry.origin.partition(_OF_EARLIER_JOB)[0].removesuffix(", waiting")


def _beginning_with(entry: TunedPlan, found: Preparation, proposals: Proposals) -> Preparation:
    """The preparation with the plan of an earlier job first, if it is among those of the search."""

    def is_other(plan: SyncPlan) -> bool:
        return (signature(plan), plan.waits) != (signature(entry.plan), entry.plan.waits)

    first, *others = sorted(proposals.plans, key=lambda each: is_other(each.plan))
    if is_other(first.plan):
        rank_zero_info(
            f"AutoSync: the job does not begin with {entry.origin}, the fastest so far in the trials of an earlier "
            "job, because that is not among the plans that may be tried"
        )
        return found
    reason = f"{first.name}, the fastest so far in the trials of an earlier job, which ended before them"
    if first is not proposals.plans[0]:
        reason += f"; prediction alone would choose {proposals.reason}"
    return replace(found, proposals=Proposals([first, *others], reason), remembered=first.plan.fingerprint)


def _memory(cache: str) -> TuningCache:
    return TuningCache(None if cache == DEFAULT_CACHE else cache)


def _recall(key: TuningKey, settings: StrategySettings, group: dist.ProcessGroup | None) -> TunedPlan | None:
    """The entry of an earlier job on rank 0's disk; collective.

    Links that no user describes are compared with its rates, since they may have changed, or may have been slow while
    that job ran. For a job that ended before its trials did, this comes later, because links are measured anyway.
    """
    assert settings.tuning is not None
    cache, found = settings.tuning.cache, None
    if cache is not None and dist.get_rank(group) == 0:
        entry = _memory(cache).find(key)
        described = settings.cluster
        if entry is not None and (described is None or described.fingerprint == entry.cluster.fingerprint):
            found = entry.to_dict()
    found = broadcast_json(found, group)
    if found is None:
        return None
    entry = TunedPlan.from_dict(found, source="the tuning cache of rank 0")
    if settings.cluster is not None or entry.unfinished:
        return entry
    if far := broadcast_json(compare_with_job(entry.cluster, settings.timeout), group):
        rank_zero_info(f"{_UNUSED}: {'; '.join(far)}. The job searches for a new plan")
        return None
    return entry


def _of_entry(
    entry: TunedPlan, workload: Workload, key: TuningKey, described: bool, constants: Constants
) -> Preparation:
    """The plan of an earlier job; DDP's plan may be tried against it, in case that job was disturbed."""
    expected = entry.evidence.measured.seconds
    sizes = {} if key.bucket_bytes is None else {"bucket_bytes": key.bucket_bytes}
    native = place_rows(builders.build(NATIVE, workload, entry.cluster, **sizes), workload, entry.cluster)
    # Links need at least so long for an all-reduce.
    dense = sum(variable.bytes for variable in workload.variables if variable.kind == "dense")
    ddp = Alternative(native, NATIVE, max(expected, ring_time(entry.cluster, dense)), native=True)
    if key.overlap is not None:
        ddp = ddp.waiting()
    if measured := [each.seconds for each in entry.evidence.compared if each.plan == ddp.plan.fingerprint]:
        ddp = replace(ddp, predicted=measured[0])
    plans = [Alternative(entry.plan, entry.origin, expected, native=entry.plan.fingerprint == ddp.plan.fingerprint)]
    if not plans[0].native:
        plans.append(ddp)
    reason = (
        f"{entry.origin}, which an earlier job found on {entry.written:%Y-%m-%d} ({expected:.3g} s a step "
        f"there; 'autosync cache show {key.fingerprint}' says more)"
    )
    # Without a description: that job may have measured its links, or its user has described them.
    origin = DESCRIBED if described else f"link speeds known from an earlier job on {entry.written:%Y-%m-%d}"
    links = JobLinks(entry.cluster, constants, origin=origin)
    return Preparation(links, workload, key, Proposals(plans, reason), entry.plan.fingerprint, expected)

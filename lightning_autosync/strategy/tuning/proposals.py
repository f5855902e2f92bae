"""The links of a running job, and the plans that fit them: measured and searched before the first step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import counted, seconds_text
from lightning_autosync.engine.collectives import broadcast_json
from lightning_autosync.errors import MissingPackageError
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.probe.description import check_places, check_rates, with_seen_rates
from lightning_autosync.measure.probe.hosts import host_constants
from lightning_autosync.measure.probe.quick import compare_with_job, survey_job
from lightning_autosync.plan import Semantics, SyncPlan
from lightning_autosync.plan.builders.default import DDP_BUCKETS, NATIVE, SEARCHED, cores_limit, is_native, native_name
from lightning_autosync.replay import Constants
from lightning_autosync.strategy.choice import (
    CORES_LIMIT,
    GAIN_ON_SHARED_CORES,
    LEAST_GAIN,
    plans_by_formula,
    synchronization_times,
)
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning.live import Alternative
from lightning_autosync.strategy.tuning.predictor import PREDICTOR
from lightning_autosync.strategy.tuning.settings import TuningSettings
from lightning_autosync.workload import Workload

DESCRIBED = "described"
"""Origin of links that the user has described."""


@dataclass(frozen=True)
class JobLinks:
    """Hosts and links of a job.

    Attributes:
        cluster: hosts and links; without rates if they are unknown.
        constants: costs of the hosts, for predictions.
        fault: why rates are unknown; empty if they are known.
        origin: how the cluster is known, for messages.
    """

    cluster: ClusterSpec
    constants: Constants
    fault: str = ""
    origin: str = ""

    @property
    def told(self) -> str:
        """What predictions of plans are made from, in words that follow "predicted"."""
        return f"for cluster '{self.cluster.name}'" if self.origin == DESCRIBED else f"from the {self.origin}"

    def describe(self) -> str:
        """Hosts and rates in one line."""
        nodes = counted(len(self.cluster.nodes), "host")
        return f"{nodes}, {self.origin}; rates unknown: {self.fault}" if self.fault else f"{nodes}, {self.origin}"


@dataclass(frozen=True)
class Proposals:
    """Plans that the search found.

    Attributes:
        plans: the plans that may be tried, the one to begin with first.
        reason: a sentence that gives the reason for that one.
    """

    plans: Sequence[Alternative]
    reason: str


def find_links(
    cluster: ClusterSpec | None,
    nodes: int,
    devices: int,
    probe: float,
    timeout: float,
    constants: Constants | None = None,
) -> JobLinks:
    """Find the hosts of the default process group, and measure them and the links between them; collective.

    Args:
        cluster: the description that the user gave, if any; it is used as it is. A warning tells if ranks run on other
            nodes, or which rates are far from those of the links, if they can be measured in three seconds.
        probe: maximum seconds of the measurement of links; 0 measures nothing, and takes default costs of hosts.
        timeout: seconds that ranks wait for each other.
        constants: costs of the hosts, if they are known already; None measures them.
    """
    if cluster is not None:
        if probe and (found := compare_with_job(cluster, timeout)):
            rank_zero_warn(
                f"cluster '{cluster.name}': {'; '.join(found)}. The plan is chosen for the description: correct it, or "
                "give no cluster, so that the job finds its hosts and measures its links"
            )
        if constants is None:
            constants = host_constants() if probe and cluster.measured else Constants()
        return JobLinks(cluster, constants, "" if cluster.measured else "its rates are not given", DESCRIBED)
    try:
        survey = survey_job(timeout, limit=probe)
    except LaunchError as error:
        uniform = ClusterSpec.uniform(nodes=nodes, devices=devices, name="this job")
        return JobLinks(uniform, constants or Constants(), str(error), "not measured")
    if constants is None:
        predicts = not survey.fault and len(survey.cluster.nodes) > 1
        constants = host_constants() if predicts else Constants()
    origin = f"link speeds measured by this job (in {survey.seconds:.1f} s)"
    return JobLinks(survey.cluster, constants, survey.fault or "", origin)


def compare_links(known: JobLinks, found: JobLinks) -> tuple[str, dict[str, Any] | None]:
    """Compare a later measurement of the links of a job with the earlier one.

    Returns:
        What has changed, in words; and the changed cluster as plain data, None if there is no change to answer.
        Interfaces that are not measured stay as described.
    """
    before, now = known.cluster, found.cluster
    # Ranks do not move while they run. So if the places differ, the description groups ranks in another way, and a
    # comparison of the rates would tell nothing.
    if fault := found.fault or " ".join(check_places(before, now)):
        return fault, None
    several = before.interface_count > 1
    if changes := check_rates(before, now, "before"):
        return " ".join(changes), (with_seen_rates(before, now) if several else now).to_dict()
    which = "Those of the first interface, which alone are measured," if several else "They"
    return f"{which} have not changed.", None


KnownPlans = Callable[[], Sequence[tuple[str, SyncPlan]]]
"""Finds plans by name that were made before."""


def propose(
    workload: Workload,
    links: JobLinks,
    settings: StrategySettings,
    group: dist.ProcessGroup | None,
    known: KnownPlans = tuple,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Proposals | None, str]:
    """Search for plans on rank 0 while the others wait; collective.

    Without numba the search is not possible, and plans are compared by formulas alone. The reason then says so. Where
    steps may overlap, plans whose steps wait are among those that may be tried, behind all others.

    Args:
        known: finds further plans, on rank 0, that the search compares with its own.
        meanwhile: called on all ranks while rank 0 searches; collective.

    Returns:
        The plans; None with the reason if the search failed.
    """
    tuning = settings.tuning
    assert tuning is not None

    def search() -> dict[str, Any]:
        return _search(workload, links, settings, tuning, known)

    found = _first_rank_result(search, settings.timeout, group, meanwhile)
    if "fault" in found:
        rank_zero_warn(f"AutoSync: {found['fault']}")
        return None, found["fault"]
    proposals = order_plans(_marked(list(map(_alternative, found["plans"]))), links, found["overlaps"])
    plans = list(proposals.plans)
    if waiting := [each.waiting() for each in _marked(list(map(_alternative, found["waiting"])))]:
        # DDP waits, so only the plan that waits is DDP's.
        plans = [*(replace(each, native=False) for each in plans), *waiting]
    return Proposals(plans if tuning.plans else plans[:1], f"{proposals.reason}{found['remark']}"), ""


def search_plans(
    workload: Workload,
    links: JobLinks,
    tuning: TuningSettings,
    bucket_bytes: int | None = None,
    overlaps: bool = False,
) -> list[Alternative]:
    """The plans that a job with these links considers, by prediction alone, fastest first; DDP's is among them.

    Args:
        links: hosts and links of the job.
        bucket_bytes: bytes of a fused message; None leaves sizes to builders and search.
        overlaps: whether steps overlap with the next forward pass (``overlap="step"``). Plans are then compared by the
            time of such a step.

    Raises:
        MissingPackageError: the replay's package numba is not installed.
    """
    # Late: numba takes long to import.
    from lightning_autosync.search.selection import rank_plans

    options = _search_options(tuning, bucket_bytes, overlaps=overlaps)
    ranked = rank_plans(workload, links.cluster, constants=links.constants, **options)
    return _marked(
        [Alternative(each.plan, each.origin, each.seconds, balanced=each.balanced, busy=each.busy) for each in ranked]
    )


def _search_options(
    tuning: TuningSettings,
    bucket_bytes: int | None,
    overlaps: bool = False,
    balances: bool = True,
    semantics: Semantics = "exact",
) -> dict[str, Any]:
    return {
        "seconds": tuning.search,
        "keep": 2 * tuning.plans + 1,
        "bucket_bytes": bucket_bytes,
        "compression": semantics != "exact",
        "overlaps": overlaps,
        "balances": balances,
    }


def _search(
    workload: Workload, links: JobLinks, settings: StrategySettings, tuning: TuningSettings, known: KnownPlans
) -> dict[str, Any]:
    """Plans with their predicted times, fastest first, and a remark for the reason, as plain data.

    With overlap, also the plans that may be tried ``waiting``: those of a job without overlap.
    """
    overlaps, earlier = settings.overlap is not None, known()

    def search(overlaps: bool = False, balances: bool = True) -> list[dict[str, Any]]:
        options = _search_options(tuning, settings.bucket_bytes, overlaps, balances, settings.semantics)
        return PREDICTOR.search(workload, links.cluster, links.constants, earlier, **options)

    try:
        plans = search(overlaps=overlaps)
        # No search lets a job begin with a plan that waits, so nothing reads what they take beside a computation.
        waiting = search(balances=False) if overlaps else []
        return {"plans": plans, "waiting": waiting, "remark": "", "overlaps": overlaps}
    except MissingPackageError as error:
        cost = links.constants.shared_host_cost(links.cluster.world_size)
        formulas = plans_by_formula(workload, links.cluster, settings.bucket_bytes, cost)
        found = sorted(formulas, key=lambda each: each.seconds)
        plans = [
            {
                "plan": each.plan.to_dict(),
                "seconds": each.seconds,
                "origin": each.builder,
                "balanced": None,
                "busy": 0.0,
            }
            for each in found
        ]
        remark = f". These times are from formulas. {error}"
        return {"plans": plans, "waiting": plans if overlaps else [], "remark": remark, "overlaps": False}


def _first_rank_result(
    search: Callable[[], dict[str, Any]],
    timeout: float,
    group: dist.ProcessGroup | None,
    meanwhile: Callable[[], None],
) -> dict[str, Any]:
    """What ``search`` returns on rank 0, or a mapping with its ``fault``; collective.

    The search may take longer than ranks wait for each other, as when the simulator's code is compiled. So rank 0 tells
    the others several times within their ``timeout`` (seconds) that it still searches.
    """
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["result"] = search()
        except Exception as error:  # the others wait, and a job can train without a search
            found["result"] = {"fault": f"the search for a plan failed: {type(error).__name__}: {error}"}

    thread = threading.Thread(target=run, name="autosync-search", daemon=True)
    if dist.get_rank(group) == 0:
        thread.start()
    meanwhile()
    while True:
        if thread.ident is not None:
            thread.join(timeout / 4)
        result: dict[str, Any] | None = broadcast_json(found.get("result"), group)
        if result is not None:
            return result


DDP = native_name(DDP_BUCKETS)
"""Name of DDP's plan, if `NATIVE` has other messages than DDP."""


_ALIKE = 1.01
"""Plans whose predicted times have at most this ratio are taken to be equally fast: predictions are no better. The one
that uses least of the cores is then the best, because other programs of the hosts need them, too."""
_GAIN_WITH_OVERLAP = 1.02
"""Predicted speedup over a native all-reduce that a first plan needs with overlap. It is smaller than `LEAST_GAIN`,
because the user asked for overlap, and native all-reduces hide almost nothing behind the next forward pass."""


def _alternative(found: dict[str, Any]) -> Alternative:
    plan = SyncPlan.from_dict(found["plan"], source="rank 0's search")
    return Alternative(plan, found["origin"], found["seconds"], balanced=found["balanced"], busy=found["busy"])


def _marked(plans: Sequence[Alternative]) -> list[Alternative]:
    """The plans, of which DDP's is marked."""
    ddp = DDP if any(each.name == DDP for each in plans) else NATIVE
    return [replace(each, native=each.name == ddp) for each in plans]


def order_plans(ranked: Sequence[Alternative], links: JobLinks, overlaps: bool = False) -> Proposals:
    """The plans with the one to begin with first.

    It is predicted to be (almost) the fastest if only links count, and among such plans the fastest beside a
    computation that lasts as long as gradients need on the links, because the job's own computation is unknown. Of
    plans that are about as fast, it is the one that uses least of the cores. It is a native all-reduce if no other plan
    is predicted to be more than 5% faster on the links (2% with overlap), or if the other one is predicted to be more
    than 5% slower beside that computation.

    Args:
        ranked: plans as from `search_plans`.
        links: the links for which they were predicted.
        overlaps: whether their times are those of steps that overlap with the next forward pass.
    """
    best, ddp = ranked[0], next(each for each in ranked if each.native)
    natives = [each for each in ranked if is_native(each.name)]
    native = natives[0]
    near = [each for each in ranked if each.predicted < LEAST_GAIN * best.predicted]
    # With overlap, the search fits plans to a computation that is assumed, and builders do not.
    unfitted = [each for each in near if each.name != SEARCHED] if overlaps else near
    best = fastest = shortest = next(iter(unfitted), best)
    if all(each.balanced is not None for each in unfitted):
        shortest = min(unfitted, key=_balanced, default=best)
        alike = [each for each in unfitted if _balanced(each) <= _ALIKE * _balanced(shortest)]
        best = min(alike, key=lambda each: each.busy, default=best)
    usual = min(natives, key=_balanced)
    if ddp.balanced is None or ddp.balanced <= LEAST_GAIN * _balanced(usual):
        usual = ddp
    least_gain = _GAIN_WITH_OVERLAP if overlaps else LEAST_GAIN
    faster = native.predicted > least_gain * fastest.predicted
    suits = shortest.balanced is None or shortest.balanced <= LEAST_GAIN * _balanced(usual)
    first = best if faster and suits else usual
    cost = links.constants.shared_host_cost(links.cluster.world_size)
    sized = links.cluster.measured and ddp.name == DDP  # the user left the sizes of messages to the search
    large = sized and not overlaps and cores_limit(links.cluster, cost)
    large = large and native.predicted < GAIN_ON_SHARED_CORES * fastest.predicted
    if large:
        first = next(each for each in ranked if each.name == NATIVE)
    times = (
        f"with overlap and a computation as long as the links need, a step takes {seconds_text(best.predicted)}, and "
        f"{seconds_text(native.predicted)} with a native all-reduce"
        if overlaps
        else synchronization_times(best.predicted, native.predicted)
    )
    times = f"predicted {links.told}: {times}"
    if large:
        reason = f"a native all-reduce in large messages, because {CORES_LIMIT}. The best is {best.name}, {times}"
    elif faster and suits:
        reason = f"{best.name}, {times}"
    elif faster:
        reason = (
            f"{_native_text(first)}, because beside a computation as long as the links need, a step is predicted to "
            f"take {seconds_text(_balanced(usual))}, and {seconds_text(_balanced(best))} with {best.name}. The latter "
            f"is {times}"
        )
    else:
        reason = (
            f"{_native_text(first)}, because no plan is predicted to be more than {least_gain - 1:.0%} faster. The "
            f"best is {best.name}, {times}"
        )
    return Proposals([first, *(each for each in ranked if each is not first)], reason)


def _balanced(plan: Alternative) -> float:
    return math.inf if plan.balanced is None else plan.balanced


def _native_text(plan: Alternative) -> str:
    """A native all-reduce in words that say which buckets it has."""
    if plan.native:
        return "DDP's fused native all-reduce"
    size = plan.name.removeprefix(NATIVE).strip(" ()")
    return f"a native all-reduce in buckets {f'of {size}' if size else 'sized for the links'}"

"""Steps that succeed or fail on all ranks together, and the comparison of ranks at the start of a job."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import version
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_autosync import errors
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.failure_detector import FailureDetector, open_failure_detector
from lightning_autosync.engine.rendezvous import Rendezvous, checked_rendezvous
from lightning_autosync.errors import AutoSyncError, ExchangeError, PlanError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.strategy.settings import StrategySettings

T = TypeVar("T")


def agree(step: Callable[[], T], identify: Callable[[T], dict[str, str]], group: dist.ProcessGroup | None = None) -> T:
    """Run ``step`` on every rank, and return its result if all ranks succeeded with equal results; collective.

    Args:
        step: a step that may fail on some ranks only, such as reading a file; it must not communicate.
        identify: returns digests of the result that must be equal on all ranks, by their name in errors.
        group: the ranks; None is the default group.

    Raises:
        AutoSyncError: (the class raised by ``step``) ``step`` failed on some rank; raised on every rank.
        PlanError: results differ; raised on every rank.
    """
    cause: Exception | None = None
    vote: dict[str, Any]
    try:
        result = step()
        vote = {"identity": identify(result)}
    except Exception as error:
        cause = error
        vote = {"error": str(error), "kind": type(error).__name__}
    votes = gather_json(vote, group)
    try:
        _raise_failure(votes, cause)
        _raise_difference([vote["identity"] for vote in votes])
    except Exception as error:
        told = next((rank for rank, vote in enumerate(votes) if "error" in vote), 0)
        known = cause is None or vote.items() == votes[told].items()
        if dist.get_rank(group) != told and known:
            _print_in_one_line(error)
        raise
    return result


def _print_in_one_line(raised: Exception) -> None:
    """Leave out the traceback of an error, if it ends this process: another rank prints it with the same error."""
    print_error, known = sys.excepthook, weakref.ref(raised)  # the error refers to all frames, and these to the model

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is known():
            error.__traceback__ = trace = None
            error.__cause__ = None
        print_error(kind, error, trace)

    sys.excepthook = hook


def _raise_failure(votes: list[dict[str, Any]], cause: Exception | None) -> None:
    failed = [rank for rank, vote in enumerate(votes) if "error" in vote]
    if not failed:
        return
    if cause is not None and len(failed) == len(votes):
        raise cause  # every rank has its own error, with its traceback
    first = votes[failed[0]]
    where = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    kind = getattr(errors, first["kind"], None)
    if kind is None:
        raise AutoSyncError(f"on {where} only: {first['kind']}: {first['error']}") from cause
    raise kind(f"on {where} only: {first['error']}") from cause


def _raise_difference(identities: list[dict[str, str]]) -> None:
    for rank, identity in enumerate(identities):
        for name, value in identity.items():
            if value != identities[0][name]:
                raise PlanError(
                    f"{name}: rank {rank} has {value}, but rank 0 has {identities[0][name]}; use the same on every rank"
                )


def checked_formation(environment: Any, settings: StrategySettings) -> AbstractContextManager[None]:
    """The context in which to form the process group and call `compare_ranks`; see `checked_rendezvous`.

    Args:
        environment: Lightning's ``ClusterEnvironment``, which already knows the rank of this process.
    """
    return checked_rendezvous(
        Rendezvous(
            environment.main_address,
            environment.main_port,
            environment.global_rank(),
            environment.world_size(),
            settings.timeout,
        )
    )


def compare_ranks(settings: StrategySettings) -> FailureDetector | None:
    """Compare versions and settings of all ranks, and open a failure detector; collective.

    The versions of this package and of the plan's format must be equal, and settings that affect exchanges. Of torch's
    version, only the first two numbers must be equal (2.13 of 2.13.1), because builds differ between machines.

    Returns:
        The failure detector; None for a single rank. Relaxed replicas detect failures by their mesh, and the strategy
        closes this detector when the mesh is open.

    Raises:
        ExchangeError: (on every rank) versions differ.
        PlanError: (on every rank) settings differ.
        DocumentError: (or a subclass, on every rank) a rank could not read its plan or cluster.
    """
    _compare_versions(gather_json(own_versions()))
    agree(lambda: _usable(settings), _rules)
    return open_failure_detector(None, settings.timeout)


def own_versions() -> dict[str, str]:
    """Versions that must be equal on all ranks, by name."""
    return {
        "lightning-autosync": version("lightning-autosync"),
        "the plan's format": SyncPlan.FORMAT,
        "torch": ".".join(torch.__version__.split(".")[:2]),
    }


def _compare_versions(found: list[dict[str, Any]]) -> None:
    for name in found[0]:
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(found):
            ranks.setdefault(str(theirs.get(name)), []).append(rank)
        if len(ranks) > 1:
            told = "; ".join(
                f"{value} on rank{'s' if len(there) > 1 else ''} {', '.join(map(str, there))}"
                for value, there in ranks.items()
            )
            raise ExchangeError(
                f"ranks run different versions of {name}: {told}; install the same version on all nodes"
            )


def _usable(settings: StrategySettings) -> StrategySettings:
    if settings.error is not None:
        raise settings.error
    return settings


def _rules(settings: StrategySettings) -> dict[str, str]:
    """Settings that affect exchanges, by their name in errors."""
    return {
        "consistency of the plan": "synchronous" if settings.scheduled else "relaxed, or with servers",
        "broadcast_buffers": str(settings.broadcast_buffers),
        "initial buffers from rank 0 (broadcast_buffers or forward_sync_buffers)": str(settings.initial_buffers),
        "check_replicas": str(settings.check_replicas),
        "static_graph": str(settings.static_graph),
        "overlap": str(settings.overlap),
        "batch_shares": "none" if settings.batch_shares is None else str(settings.batch_shares),
        "micro_batch": str(settings.micro_batch),
        "plan": "given" if settings.plan is not None else "none",
        "cluster": "none" if settings.cluster is None else settings.cluster.fingerprint,
        "tuning": "off" if settings.tuning is None else str(replace(settings.tuning, cache=None)),
    }

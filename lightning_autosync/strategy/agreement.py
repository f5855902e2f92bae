"""Steps that succeed on every rank or fail on every rank, so that no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_autosync import errors
from lightning_autosync.engine.rendezvous import gather_json
from lightning_autosync.errors import AutoSyncError, PlanError

T = TypeVar("T")


def agree(step: Callable[[], T], identify: Callable[[T], dict[str, str]], group: dist.ProcessGroup | None = None) -> T:
    """Run ``step`` on every rank, and return its result if all ranks succeeded with the same one.

    Args:
        step: what may fail on one rank alone, such as reading a file; it must not communicate.
        identify: what must be equal on all ranks, by the name that an error calls it: digests of the result.
        group: the ranks; None is the default group.

    Raises:
        AutoSyncError: (the class raised by ``step``) on every rank if ``step`` failed on any.
        PlanError: on every rank if the results differ.
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
    _raise_failure(votes, cause)
    _raise_difference([vote["identity"] for vote in votes])
    return result


def _raise_failure(votes: list[dict[str, Any]], cause: Exception | None) -> None:
    failed = [rank for rank, vote in enumerate(votes) if "error" in vote]
    if not failed:
        return
    if cause is not None and len(failed) == len(votes):
        raise cause
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
                    f"{name}: rank {rank} has another than rank 0 ({value}, not {identities[0][name]}); "
                    "every rank must be given the same"
                )

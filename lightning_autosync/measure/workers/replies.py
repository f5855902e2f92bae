"""What ranks answer that raised, and what the one who asked raises of that."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from typing import Any

from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.workers.errors import InputError


def describe(error: BaseException) -> dict[str, Any]:
    """An error that is being handled as plain data: ``type``, ``message``, ``traceback``, and ``input``.

    The last says whether what was wrong is something that the user gave, of which the message says all.
    """
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exc(),
        "input": isinstance(error, DocumentError),
    }


def wrong_input(errors: Mapping[int, Mapping[str, Any]], asked: Collection[int]) -> InputError | None:
    """That what ranks were given is wrong, if all that failed say so; in the order of ranks, equal messages once.

    Args:
        errors: by rank, as `describe` made them, one or more.
        asked: all ranks that were asked. Where some of them did not fail, those that did are named.
    """
    if not all(error["input"] for error in errors.values()):
        return None
    ranks = sorted(errors)
    alike = len(errors) == len(asked)
    said = dict.fromkeys(f"{'' if alike else f'rank {rank}: '}{errors[rank]['message']}" for rank in ranks)
    first = errors[ranks[0]]
    return InputError("; ".join(said), ranks[0], first["traceback"], first["type"], first["message"])

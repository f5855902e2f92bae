"""Functions that work on a rank's part of a value, by the objects that torch hands to ``__torch_function__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_autosync.hybrid.execution.functions import attention, elementwise, metadata, reductions, shapes

Handler = Callable[[Callable[..., Any], tuple[Any, ...], Any], Any]

HANDLERS: dict[Any, Handler] = {
    **metadata.HANDLERS,
    **elementwise.HANDLERS,
    **shapes.HANDLERS,
    **attention.HANDLERS,
    **reductions.HANDLERS,
}
"""A handler gets the function, its arguments and keyword arguments, and returns ``NotImplemented`` where it cannot work
on parts."""

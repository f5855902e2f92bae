"""Handlers of functions that work on a rank's part of a value, by the objects that ``__torch_function__`` gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_autosync.hybrid.execution.functions import attention, elementwise, metadata, shapes

Handler = Callable[[Callable[..., Any], tuple[Any, ...], Any], Any]

HANDLERS: dict[Any, Handler] = {
    **metadata.HANDLERS,
    **elementwise.HANDLERS,
    **shapes.HANDLERS,
    **attention.HANDLERS,
}
"""Handlers by function. A handler gets the function, its arguments and its keyword arguments, and returns
``NotImplemented`` if it cannot work on parts."""

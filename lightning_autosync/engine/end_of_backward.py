"""The end of a backward pass, as those see it who began the pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

_APPLICATIONS = {
    method.__code__ for name, method in vars(BackwardCFunction).items() if name in ("apply", "apply_boxed")
}
"""Code by which autograd runs the ``backward`` of a function that is written in Python; newer torch has both."""


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass is over in which this function is called.

    Autograd's own callbacks belong to the innermost pass. A reentrant checkpoint runs a pass of its own for each block,
    within the user's pass, so a callback that is first queued there would come after that block.

    Args:
        callback: called once, on the thread that runs the pass, after all gradients are accumulated.
    """
    # The function that runs the inner pass belongs to the outer one, as do the nodes that its gradients go to. Only in
    # those is the outer pass the innermost one again.
    function = _outermost_function()
    following = {node for node, _ in function.next_functions if node is not None} if function is not None else set()
    if not following:
        _queue(callback)
        return
    handles: list[RemovableHandle] = []

    def on_return(*_: object) -> None:
        if handles:
            while handles:
                handles.pop().remove()
            _queue(callback)

    handles.extend(node.register_prehook(on_return) for node in following)


def _queue(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)


def _outermost_function() -> Node | None:
    """The function in Python whose ``backward`` runs on this thread; the first that began, if there are several."""
    found: Node | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _APPLICATIONS:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found

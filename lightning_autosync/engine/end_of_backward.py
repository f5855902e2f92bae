"""The end of a backward pass, as those see it who began the pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import itemgetter
from types import FrameType
from weakref import WeakValueDictionary

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

_APPLICATIONS = {
    id(code): code
    for code in (getattr(vars(BackwardCFunction).get(name), "__code__", None) for name in ("apply", "apply_boxed"))
    if code is not None
}
"""Code by which autograd runs the ``backward`` of a function that is written in Python; newer torch has both. They are
known by their ids, because to hash a code object Python reads all of it, for each frame of each pass."""


class _End:
    """What is called at the end of one backward pass, with its places."""

    def __init__(self, task: int) -> None:
        self.callbacks: list[tuple[int, Callable[[], None]]] = []
        self._task = task

    def __call__(self) -> None:
        _ends.pop(self._task, None)  # what is queued from here on is called afterwards
        for _, callback in sorted(self.callbacks, key=itemgetter(0)):
            callback()


_ends: WeakValueDictionary[int, _End] = WeakValueDictionary()
"""The ends of the backward passes that run, by the number that autograd gives a pass. Autograd alone keeps them, so
that one of a pass that fails is forgotten."""


def call_after_backward(callback: Callable[[], None], place: int = 0) -> None:
    """Call ``callback`` when the backward pass is over in which this function is called.

    Autograd's own callbacks belong to the innermost pass. A reentrant checkpoint runs a pass of its own for each block,
    within the user's pass, so a callback that is first queued there would come after that block.

    Args:
        callback: called once, on the thread that runs the pass, after all gradients are accumulated.
        place: of several callbacks of a pass, those with lower numbers are called first. Ranks may ask for them in
            different orders, and wait for each other in them.
    """
    # The function that runs the inner pass belongs to the outer one, as do the nodes that its gradients go to. Only in
    # those is the outer pass the innermost one again.
    function = _outermost_function()
    following = {node for node, _ in function.next_functions if node is not None} if function is not None else set()
    if not following:
        _queue(callback, place)
        return
    handles: list[RemovableHandle] = []

    def on_return(*_: object) -> None:
        if handles:
            while handles:
                handles.pop().remove()
            _queue(callback, place)

    handles.extend(node.register_prehook(on_return) for node in following)


def _queue(callback: Callable[[], None], place: int) -> None:
    task = torch._C._current_graph_task_id()
    end = _ends.get(task)
    if end is None:
        end = _ends[task] = _End(task)
        Variable._execution_engine.queue_callback(end)
    end.callbacks.append((place, callback))


def _outermost_function() -> Node | None:
    """The function in Python whose ``backward`` runs on this thread; the first that began, if there are several."""
    found: Node | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if id(frame.f_code) in _APPLICATIONS:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found

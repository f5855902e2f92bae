"""`Activation`: a value between layers in another layout than code outside of layers expects.

To code outside of layers every value looks as in data parallelism: each rank has its own samples as a whole (the home
layout). A value in another layout is an `Activation`, which reports the shape of the home layout. Functions that are
known to compute the same on parts as on the whole (element-wise ones, reshapes, attention over whole heads, ...) work
on the rank's part. For all others the value is first converted to the home layout. So unknown code may be slow, but its
results are correct.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_autosync.errors import AutoSyncError
from lightning_autosync.hybrid.execution.boxing import change_layout
from lightning_autosync.hybrid.execution.compared_buffers import ComparedBuffers, PassRecord, checksum
from lightning_autosync.hybrid.execution.layouts import Layout, State, home_shape
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.random_streams import RandomStreams


class Surroundings:
    """State shared by all values of one split model.

    Attributes:
        streams: the ranks' random numbers.
        record: what the current pass did, to be compared between ranks.
        buffers: the model's buffers, which ranks compare before a pass.
        home_states: states of the home layout.
        in_pass: whether a forward pass that all ranks make is under way.
    """

    def __init__(self, mesh: LiveMesh, streams: RandomStreams) -> None:
        self.mesh = mesh
        self.streams = streams
        self.record = PassRecord()
        self.buffers = ComparedBuffers(mesh)
        self.home_states: tuple[State, ...] = tuple("batch" for _ in mesh.sizes)
        self.in_pass = False
        self._warned = False
        self._changed: Any = WeakTensorKeyDictionary()
        _guard_autograd_functions()

    def home(self, rows: int | None = 0) -> Layout:
        """The home layout, in which code outside of layers sees values."""
        return Layout(self.home_states, rows)

    def change(self, value: Tensor, source: Layout, states: Sequence[State]) -> Tensor:
        """`convert`, but once for all layers that need the same value in the same layout."""
        goal = tuple(states)
        if goal == source.states:
            return value
        found: Tensor = self._once(value, (source, goal), lambda: self.convert(value, source, goal))
        return found

    def convert(self, value: Tensor, source: Layout, states: Sequence[State]) -> Tensor:
        """`change_layout`, and a note in the record of the pass if ranks send messages for it."""
        # A rank takes its part of a buffer without a message, and again after a change that other ranks may not make.
        if value.requires_grad or source.rows is not None or not source.home:
            self.record.note(tuple(value.shape), source, states)
        return change_layout(value, source, states, self.mesh)

    def alike(self, value: Tensor) -> bool:
        """Whether a plain tensor is the same on all ranks; collective, unless ranks compared it before the pass."""
        place = self.buffers.place(value)
        if place is None:
            found: bool = self._once(value, ("alike",), lambda: self._compare(value))
            return found
        self.record.note("buffer", place)
        known = self.buffers.use(place)
        if known is None:
            return self._compare(value)
        if known and self.buffers.is_changed(place):
            # A rank whose buffer did not change goes on without a message, so this one must, too.
            self.record.note_buffer(int(checksum(value)))
        return known

    def _compare(self, value: Tensor) -> bool:
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        return self.mesh.all_have(zlib.crc32(data, zlib.crc32(repr(value.shape).encode())))

    def autocast(self, value: Tensor) -> Tensor:
        """The value in the dtype of products under autocast, if autocast is enabled."""
        kind = value.device.type
        if not (torch.is_autocast_enabled(kind) and value.dtype is torch.float32):
            return value
        dtype = torch.get_autocast_dtype(kind)
        found: Tensor = self._once(value, (dtype,), lambda: value.to(dtype))
        return found

    def enter(self, layer: str) -> None:
        """Warn, once, of a call of a split layer outside of a pass."""
        # Activation checkpointing calls layers again during backward. A call in a hook is no error, because all ranks
        # may make it, as Lightning's summary of the model does; a rank cannot know what the others do.
        if self.in_pass or self._warned or torch._C._current_graph_task_id() != -1:
            return
        self._warned = True
        warnings.warn(
            f"split layer '{layer}' is called outside of a step: the job hangs unless all ranks make this call, with "
            "inputs of the same shapes; calls by one rank only (`if trainer.is_global_zero`) are not possible",
            stacklevel=2,
        )

    def forget(self) -> None:
        """Clear the cache of converted and compared values, at the end of a pass."""
        self.buffers.end_pass()
        self._changed.clear()

    def _once(self, value: Tensor, what: tuple[object, ...], make: Callable[[], Any]) -> Any:
        # Activation checkpointing runs a part of the forward pass again during backward. It must not reuse cached
        # values of the first run, which belong to that run's autograd graph. Inference tensors count no changes.
        if torch._C._current_graph_task_id() != -1 or value.is_inference():
            return make()
        key = (value._version, torch.is_grad_enabled(), *what)
        known = self._changed.get(value)
        if known is None:
            known = self._changed[value] = {}
        if key not in known:
            known[key] = make()
        return known[key]

    def wrap(self, local: Tensor, layout: Layout) -> Tensor:
        """A rank's part of a value for code outside of layers: a plain tensor at home, otherwise an activation."""
        return local if layout.home else Activation(local, layout, self)


class Activation(Tensor):
    """A rank's part of a value, with the shape of the value in the home layout.

    Attributes:
        local: the rank's part.
        retained: the gradient, in the home layout, after `retain_grad` and a backward pass.
    """

    retained: Tensor | None = None
    local: Tensor
    placement: Layout
    surroundings: Surroundings

    @staticmethod
    def __new__(cls, local: Tensor, placement: Layout, surroundings: Surroundings) -> Activation:
        shape = home_shape(local.shape, placement, surroundings.mesh.sizes)
        made: Activation = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.placement, made.surroundings = local, placement, surroundings
        return made

    def home(self) -> Tensor:
        """[shape] the plain tensor of this rank's own samples; collective."""
        around = self.surroundings
        return around.change(self.local, self.placement, around.home_states)

    def become(self, other: Tensor) -> Activation:
        """Become another value of this shape, as the argument of an in-place function does; returns self.

        Raises:
            AutoSyncError: the other value has another shape.
        """
        if other.shape != self.shape:
            raise AutoSyncError(
                f"a function in place changed the shape of a split value from {tuple(self.shape)} to "
                f"{tuple(other.shape)}; use its form that returns a new tensor"
            )
        if isinstance(other, Activation):
            self.local, self.placement = other.local, other.placement
        else:
            self.local, self.placement = other, self.surroundings.home(self.placement.rows)
        self.local = self.local.to(self.dtype)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Activation(states={self.placement.states}, local={self.local!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from lightning_autosync.hybrid.execution.functions import HANDLERS

        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            args, kwargs = _with_value_first(func, args, kwargs)
            found = handler(func, args, kwargs)
            if found is not NotImplemented:
                _note_numbers(func, (args, dict(kwargs)), found)
                return found
        return run_at_home(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AutoSyncError(
            f"{func}: a split value reached a function below torch's Python interface. Set the output layout of the "
            "layer that makes the value to 'batch' along all dimensions"
        )


def _note_numbers(func: Callable[..., Any], arguments: Any, found: Any) -> None:
    """Note the numbers that a function took to make parts; where it made whole values, ranks may have their own."""
    made = found if type(found) is tuple else (found,)
    value = next((item for item in made if isinstance(item, Activation)), None)
    if value is not None and not value.placement.home:
        value.surroundings.record.note_numbers(func.__name__, tree_leaves(arguments))


def _with_value_first(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A call as handlers expect it: the input by position, and torch's name in place of NumPy's for an axis."""
    if "axis" in kwargs:
        kwargs = {"dim" if name == "axis" else name: value for name, value in kwargs.items()}
    # The input of ``torch.where`` is its second argument.
    name = next((name for name in _INPUT if name in kwargs), None)
    if args or name is None or func is torch.where:
        return args, kwargs
    return (kwargs[name],), {other: value for other, value in kwargs.items() if other != name}


_INPUT = ("input", "x", "a", "x1")
"""Names of the first argument: torch's, and those that it takes from NumPy."""


def run_at_home(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with plain tensors of this rank's own samples."""
    changed = args[0] if args and isinstance(args[0], Activation) else None
    targets = kwargs.get("out")
    if any(isinstance(target, Activation) for target in tree_leaves(targets)):
        found = run_at_home(func, args, {**kwargs, "out": None})
        for target, value in zip(tree_leaves(targets), tree_leaves(found), strict=True):
            target.become(value) if isinstance(target, Activation) else target.copy_(value)
        return targets
    plain_args, plain_kwargs = bring_home((tuple(args), dict(kwargs)))
    if changed is not None and _changes_argument(getattr(func, "__name__", "")):
        # Work on a copy, because the converted tensor may be cached or share memory with the original.
        value = plain_args[0].clone()
        func(value, *plain_args[1:], **plain_kwargs)
        return changed.become(value)
    return func(*plain_args, **plain_kwargs)


def _changes_argument(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if not name.endswith("__"):
        return name.endswith("_")
    # ``__iadd__`` changes its argument, and ``__invert__`` does not.
    return name == "__setitem__" or (name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))


def bring_home(tree: Any) -> Any:
    """Nested containers (lists, tuples, mappings) with activations replaced by plain tensors; collective."""
    leaves, structure = tree_flatten(tree)
    if not any(isinstance(leaf, Activation) for leaf in leaves):
        return tree
    return tree_unflatten([leaf.home() if isinstance(leaf, Activation) else leaf for leaf in leaves], structure)


def _guard_autograd_functions() -> None:
    """Let ``torch.autograd.Function.apply`` get plain tensors, because it does not ask ``__torch_function__``."""
    # ``Function.apply`` calls ``apply`` of this parent, which has none of its own. Here the guard also works for older
    # aliases (``reverse = Reverse.apply``).
    parent: Any = torch.autograd.function._SingleLevelFunction
    if "apply" in vars(parent):
        return

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(cls, "takes_parts", False) and cls.__name__ != _SAVES_INPUTS:
            args, kwargs = bring_home((args, kwargs))
        found = super(parent, cls).apply(*args, **kwargs)
        made = found if isinstance(found, tuple) else (found,)
        if torch.is_grad_enabled() and any(isinstance(item, Activation) for item in made):
            raise AutoSyncError(
                f"{cls.__name__}: its forward pass returned a split value, which gets no gradient; for "
                "torch.utils.checkpoint use use_reentrant=False, otherwise set the output layout of the layer that "
                "makes the value to 'batch' along all dimensions"
            )
        return found

    parent.apply = classmethod(apply)


_SAVES_INPUTS = "_NoopSaveInputs"
"""A function in ``torch.utils.checkpoint`` of some versions; it keeps inputs as they are, to run a block again."""

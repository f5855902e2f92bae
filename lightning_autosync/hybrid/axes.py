"""The axes of samples and features in a tensor, followed through the operations between a model's layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True)
class Axes:
    """The axes of samples and features in a tensor.

    Attributes:
        batch: axis of the samples; None if there is none.
        features: axis along which the tensor is cut if the layer that made it hands on its features in pieces. None if
            the cut would separate elements that an operation needs together.
        units: largest number of equal pieces into which the features can be cut; the number of heads once they have
            an axis of their own.
        parts: number of results that follow each other along the features, each of which is cut by itself.
        mixed: whether elements depend on all features, so that no result of them can be cut by features.
    """

    batch: int | None = None
    features: int | None = None
    units: int = 1
    parts: int = 1
    mixed: bool = False

    def without_features(self) -> Axes:
        """The same axes, but features cannot be cut."""
        return replace(self, features=None, mixed=self.mixed or self.features is not None)

    def moved(self, place: Callable[[int], int | None]) -> Axes:
        """The same with other positions of the axes; ``place`` maps old positions to new ones, None if one is lost."""
        batch, features = (None if axis is None else place(axis) for axis in (self.batch, self.features))
        mixed = self.mixed or (self.features is not None and features is None)
        return replace(self, batch=batch, features=features, mixed=mixed)


Operand = tuple[Axes, tuple[int, ...]]
"""The axes of a tensor, and its shape."""


def is_known(node: fx.Node) -> bool:
    """Whether an operation works on parts of values. All others get whole values of each rank's own samples."""
    name = _name(node)
    return name in _RULES or _is_elementwise(node) or name.endswith(("_pool1d", "_pool2d", "_pool3d"))


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in _SAME


def after(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    """The axes of an operation's result.

    Args:
        node: a call of an ATen operation.
        operands: its tensor arguments, in their order.
        output: shape of the result, or of the first of several results.
    """
    name = _name(node)
    axes, shape = operands[0]
    if name in _RULES:
        return _RULES[name](node, operands, output)
    if _is_elementwise(node):
        return _agreeing(operands, output)
    if is_known(node):
        return axes.moved(lambda axis: axis if axis < 2 else None)
    return Axes(batch=axes.batch if _keeps(axes.batch, shape, output) else None, mixed=True)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).rstrip("_")


def _keeps(axis: int | None, shape: tuple[int, ...], output: tuple[int, ...]) -> bool:
    return axis is not None and axis < len(output) and output[axis] == shape[axis]


def _aligned(operand: Operand, output: tuple[int, ...]) -> Axes:
    """The axes of an operand in the numbering of the result; broadcasting aligns shapes at their ends."""
    axes, shape = operand
    shift = len(output) - len(shape)
    return axes.moved(lambda axis: axis + shift if shape[axis] == output[axis + shift] else None)


def _agreeing(operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    """The axes of the result of an element-wise operation."""
    aligned = [_aligned(operand, output) for operand in operands]
    batch = _only({axes.batch for axes in aligned} - {None})
    features = _only({axes.features for axes in aligned} - {None})
    cut = [axes for axes in aligned if axes.features is not None]
    # An operand without a features axis fits any cut if it has size 1 along the result's features.
    spread = any(
        axes.features is None and _extent(shape, features, output) != 1
        for axes, (_, shape) in zip(aligned, operands, strict=True)
    )
    mixed = any(axes.mixed for axes, _ in operands)
    if features is None or spread or mixed or len({axes.parts for axes in cut}) > 1:
        return Axes(batch, mixed=mixed or bool(cut))
    return Axes(batch, features, math.gcd(*(axes.units for axes in cut)), cut[0].parts)


def _only(found: set[Any]) -> Any:
    """The only element of a set; None if there are none or several."""
    return next(iter(found)) if len(found) == 1 else None


def _extent(shape: tuple[int, ...], axis: int | None, output: tuple[int, ...]) -> int:
    """The size of an operand along an axis of the result to which it is broadcast."""
    return 1 if axis is None or len(shape) < len(output) - axis else shape[axis - len(output)]


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _viewed(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    """A reshape keeps an axis if equal pieces along it are also equal pieces of an axis of the result."""
    axes, shape = operands[0]
    found = axes.moved(lambda axis: _place(axis, shape, output))
    return found if found.features is None else replace(found, units=math.gcd(axes.units, output[found.features]))


def _place(axis: int, shape: tuple[int, ...], output: tuple[int, ...]) -> int | None:
    """The axis of the output that has the outermost part of an axis; None if there is no such axis.

    It is the axis before which the sizes have the same product. An axis of size 1, as that of a single sample, stays
    where it is if it can: before it and after it the products are equal.
    """
    before, product = math.prod(shape[:axis]), 1
    for place, extent in enumerate(output):
        if product == before and (extent != 1 or shape[axis] == 1):
            return place
        product *= extent
    return None


def _permuted(order: Callable[[fx.Node, int], list[int]]) -> Rule:
    def rule(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
        axes, shape = operands[0]
        places = [axis % len(shape) for axis in order(node, len(shape))]
        return axes.moved(places.index)

    return rule


def _transposition(node: fx.Node, rank: int) -> list[int]:
    order = list(range(rank))
    first, second = (_argument(node, 1, "dim0", 0), _argument(node, 2, "dim1", 1))
    order[first], order[second] = order[second], order[first]
    return order


def _unsqueezed(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    axes, _ = operands[0]
    place = _argument(node, 1, "dim") % len(output)
    return axes.moved(lambda axis: axis + (axis >= place))


def _squeezed(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    axes, shape = operands[0]
    given = _argument(node, 1, "dim")
    dims = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    gone = {dim % len(shape) for dim in dims if shape[dim] == 1}
    return _without(axes, gone)


def _without(axes: Axes, gone: set[int]) -> Axes:
    """The axes after some of the tensor's are removed."""
    return axes.moved(lambda axis: None if axis in gone else axis - sum(place < axis for place in gone))


def _expanded(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    axes, shape = operands[0]
    shift = len(output) - len(shape)
    return axes.moved(lambda axis: axis + shift)


def _along(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    """The rule of an operation that needs all elements along an axis and keeps the axis."""
    axes, shape = operands[0]
    dim = _argument(node, 1, "dim", -1)
    return axes.without_features() if axes.features == dim % len(shape) else axes


def _selected(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    axes, shape = operands[0]
    return _without(axes, {_argument(node, 1, "dim", 0) % len(shape)})


def _sliced(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    axes, shape = operands[0]
    return axes if axes.features is None or output[axes.features] == shape[axes.features] else axes.without_features()


def _reduced(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    axes, shape = operands[0]
    given = _argument(node, 1, "dim")
    dims = given if isinstance(given, list | tuple) else range(len(shape)) if given is None else [given]
    gone = {dim % len(shape) for dim in dims}
    if len(output) == len(shape):
        return axes.moved(lambda axis: None if axis in gone else axis)
    return _without(axes, gone)


def _split(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    """If features are split into equal parts, these are results of one projection, and each is cut by itself."""
    axes, shape = operands[0]
    dim = _argument(node, 2, "dim", 0) % len(shape)
    if axes.features != dim:
        return axes
    parts, rest = divmod(shape[dim], output[dim])
    sizes = _argument(node, 1, "split_size")
    uneven = isinstance(sizes, list | tuple) and len(set(sizes)) > 1
    if rest or uneven or axes.parts != 1:
        return axes.without_features()
    return replace(axes, parts=parts, units=math.gcd(axes.units, output[dim]))


def _multiplied(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    """Batched matrix products: features may be cut only along the axes before the last two, as heads are."""
    kept = [_of_factor(axes, len(shape), len(output) - len(shape)) for axes, shape in operands[:3]]
    batch = _only({axes.batch for axes in kept} - {None})
    if len({axes.features for axes in kept}) > 1 or any(axes.mixed for axes in kept):
        return Axes(batch, mixed=True)
    return replace(kept[0], batch=batch, units=math.gcd(*(axes.units for axes in kept)))


def _of_factor(axes: Axes, rank: int, shift: int) -> Axes:
    """A factor's axes in the product: the batch may be any axis but the last, features only before the last two."""
    found = axes.moved(lambda axis: axis + shift if axis < rank - 1 else None)
    return found.without_features() if axes.features == rank - 2 else found


def _attended(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    """Attention of queries, keys and values; it cannot be cut by heads if a mask differs by head."""
    axes = _multiplied(node, operands, output)
    differs = any(_extent(shape, axes.features, output) != 1 for _, shape in operands[3:])
    return axes.without_features() if differs else axes


def _joined(node: fx.Node, operands: Sequence[Operand], output: tuple[int, ...]) -> Axes:
    dim = _argument(node, 1, "dim", 0) % len(output)
    first = operands[0][0]
    if any((axes.batch, axes.features) != (first.batch, first.features) or axes.mixed for axes, _ in operands):
        return Axes(_only({axes.batch for axes, _ in operands}), mixed=True)
    return first.without_features() if first.features == dim else first


Rule = Callable[[fx.Node, Sequence[Operand], tuple[int, ...]], Axes]

_SAME = frozenset(
    (
        *("contiguous", "clone", "alias", "detach", "to", "_to_copy", "type_as", "lift_fresh", "lift_fresh_copy"),
        *("dropout", "feature_dropout", "alpha_dropout", "native_dropout"),
    )
)
"""Element-wise operations that torch does not tag as such."""
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _viewed),
    **dict.fromkeys(("matmul", "bmm"), _multiplied),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _along),
    **dict.fromkeys(("mean", "sum"), _reduced),
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "tensor_split"), _split),
    **dict.fromkeys(("cat", "concat", "concatenate"), _joined),
    "scaled_dot_product_attention": _attended,
    "transpose": _permuted(_transposition),
    "t": _permuted(lambda node, rank: list(reversed(range(rank)))),
    "permute": _permuted(lambda node, rank: list(_argument(node, 1, "dims"))),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "expand": _expanded,
    "select": _selected,
    "slice": _sliced,
}


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a traced tensor, or of the first of several; ``()`` if there is none."""
    if isinstance(value, list | tuple):
        value = next((part for part in value if isinstance(part, Tensor)), None)
    return tuple(int(extent) for extent in value.shape) if isinstance(value, Tensor) else ()

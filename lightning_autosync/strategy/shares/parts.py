"""How the batch of one rank is cut into parts that it computes one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

_PLAIN = (str, bytes, int, float, type(None))

Part = tuple[Any, int, float]
"""A part of a batch, its number of samples, and the factor of its loss."""


class IndivisibleError(Exception):
    """It is not known which part of something in a batch belongs to which sample; the message names it."""


def parts_of(batch: Any, samples: int, size: int, weigh: Callable[[Any], Any] | None) -> list[Part]:
    """Cut a batch into parts; those without terms of the loss are left out, because the mean of none is not a number.

    Args:
        batch: see `cut`.
        samples: number of samples in it.
        size: number of samples of each part; the last one may have fewer.
        weigh: returns the number of terms of the loss of a part; None if these are its samples.

    Returns:
        At least one part. Factors sum to 1, or are 0 if no part has terms.

    Raises:
        IndivisibleError: see `cut`.
    """
    begins = range(0, samples, size)
    parts = [cut(batch, samples, slice(begin, begin + size)) for begin in begins]
    lengths = [min(size, samples - begin) for begin in begins]
    weights = lengths if weigh is None else [float(weigh(part)) for part in parts]
    whole = sum(weights) or 1.0
    every = [(part, own, weight / whole) for part, own, weight in zip(parts, lengths, weights, strict=True)]
    return [part for part in every if part[2]] or every[:1]


def cut(value: Any, samples: int, part: slice) -> Any:
    """A part of a batch: of each tensor, whose first axis has the size ``samples``, and of each list without tensors.

    Lists and tuples that contain tensors are cut tensor by tensor, and so are named tuples and mappings. Other lists
    and tuples need one entry for each sample, of any nested plain values. Types are kept. Values without a first axis
    (numbers, strings, tensors without axes) that are entries of the batch itself are those of every part.

    Args:
        value: a batch of tensors, plain values, mappings, lists and tuples.
        samples: number of samples in it.
        part: which samples to keep.

    Raises:
        IndivisibleError: it has other values, or tensors or lists of another size.
    """
    if isinstance(value, Tensor):
        if value.dim() and len(value) != samples:
            raise IndivisibleError(f"a tensor of shape {tuple(value.shape)}")
        return value[part] if value.dim() else value
    if isinstance(value, MutableMapping):
        kept = copy.copy(value)
        kept.update({name: cut(each, samples, part) for name, each in value.items()})
        return kept
    if isinstance(value, list | tuple):
        if hasattr(value, "_fields"):
            return type(value)(*(cut(each, samples, part) for each in value))
        if not value or any(isinstance(each, Tensor) and each.dim() for each in leaves(value)):
            return type(value)(cut(each, samples, part) for each in value)
        _check_entries(value, samples)
        return type(value)(value[part])
    if isinstance(value, _PLAIN):
        return value
    raise IndivisibleError(f"a value of type {type(value).__name__}")


def _check_entries(value: Sequence[Any], samples: int) -> None:
    """Refuse a list without tensors to cut, if it does not have a plain entry for each sample.

    Raises:
        IndivisibleError: it has other entries, or another number of them.
    """
    for each in leaves(value):
        if not isinstance(each, (*_PLAIN, Tensor)):
            raise IndivisibleError(f"a value of type {type(each).__name__}")
    if len(value) != samples:
        raise IndivisibleError(f"a {type(value).__name__} of {len(value)} entries, none of which is a tensor")


def leaves(value: Any) -> Iterator[Any]:
    """The values in nested mappings, lists and tuples."""
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(each)
    else:
        yield value


def loss_of(output: Any) -> Tensor | None:
    """The loss in the output of a training step."""
    found = output.get("loss") if isinstance(output, Mapping) else output
    return found if isinstance(found, Tensor) else None

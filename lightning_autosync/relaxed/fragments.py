"""Parts of a model that are averaged in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[range]:
    """Contiguous runs of tensors with about equal numbers of elements.

    Args:
        sizes: elements of each tensor.
        fragments: number of runs; fewer come out if there are fewer tensors.

    Returns:
        Positions of tensors; none is empty unless there are no tensors at all.
    """
    fragments = max(1, min(fragments, len(sizes)))
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    bounds = [0]
    for fragment in range(1, fragments):
        target = sum(sizes) * fragment / fragments
        cut = sum(middle < target for middle in middles)
        bounds.append(min(max(cut, bounds[-1] + 1), len(sizes) - fragments + fragment))
    return [range(begin, end) for begin, end in zip(bounds, [*bounds[1:], len(sizes)], strict=True)]


def first_ages(fragments: int, period: int) -> list[int]:
    """How many steps ago each fragment would have been averaged at the start, so that their turns are spread evenly."""
    return [(fragments - 1 - fragment) * period // fragments for fragment in range(fragments)]

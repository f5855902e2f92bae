"""What a rank holds in the course of a step, and the most of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Moment:
    """Something that happens in the forward pass and, the other way round, in the backward pass.

    Attributes:
        kept: bytes of results that are held from here until the backward pass has come back here.
        gradients: bytes of parameters' gradients that the backward pass makes here, and that stay.
        forward: bytes that are held only while this is computed in the forward pass.
        backward: the same in the backward pass.
    """

    kept: float = 0.0
    gradients: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


def peak_bytes(moments: Sequence[Moment]) -> float:
    """The most bytes that are held at once; gradients of the step before are gone.

    Args:
        moments: of a step, in the order of the forward pass.
    """
    kept = list(accumulate((moment.kept for moment in moments), initial=0.0))
    made = list(accumulate((moment.gradients for moment in reversed(moments)), initial=0.0))[::-1]
    forward = (before + moment.kept + moment.forward for before, moment in zip(kept, moments, strict=False))
    # In the backward pass a moment's gradients are there before what it kept is gone.
    backward = (
        before + moment.kept + made[place] + moment.backward
        for place, (before, moment) in enumerate(zip(kept, moments, strict=False))
    )
    return max(made[0], *forward, *backward) if moments else 0.0

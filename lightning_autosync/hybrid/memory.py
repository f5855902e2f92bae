"""What a rank holds in the course of a step, and the most of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class MemoryStage:
    """The memory of one stage of the forward pass and of the same stage of the backward pass.

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


def peak_bytes(stages: Sequence[MemoryStage]) -> float:
    """The most bytes that are held at once; gradients of the step before are gone.

    Args:
        stages: of a step, in the order of the forward pass.
    """
    kept = list(accumulate((stage.kept for stage in stages), initial=0.0))
    made = list(accumulate((stage.gradients for stage in reversed(stages)), initial=0.0))[::-1]
    forward = (before + stage.kept + stage.forward for before, stage in zip(kept, stages, strict=False))
    # In the backward pass a stage's gradients are there before what it kept is gone.
    backward = (
        before + stage.kept + made[place] + stage.backward
        for place, (before, stage) in enumerate(zip(kept, stages, strict=False))
    )
    return max(made[0], *forward, *backward) if stages else 0.0

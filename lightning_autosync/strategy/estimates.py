"""How many steps a training will have where an epoch is dealt out, and no loader knows its length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def estimated_epochs(loop: Any, share: Callable[[], int | None]) -> Iterator[None]:
    """Inside, ``trainer.estimated_stepping_batches`` goes by ``share``.

    Only while optimizers are made: in training, Lightning would end a rank's epoch after so many batches.

    Args:
        loop: the Trainer's fit loop. It may get its data only now, for the estimate asks for it.
        share: batches of an epoch, divided by ranks; None while it is not dealt out.
    """
    own, counted = loop.setup_data, loop.max_batches

    def setup_data() -> None:
        nonlocal counted
        loop.max_batches = counted
        own()
        counted = loop.max_batches
        loop.max_batches = share() or counted

    loop.setup_data = setup_data
    loop.max_batches = share() or counted
    try:
        yield
    finally:
        del loop.setup_data
        loop.max_batches = counted


def planned_progress(trainer: Any, share: int | None, begun: int) -> float:
    """Steps that schedules were told the job will have; infinite if nobody knows.

    Progress may be more where ranks drift, for it follows the furthest; and beyond its end a schedule raises, or makes
    learning rates below 0.

    Args:
        trainer: about to train.
        share: batches of an epoch, divided by ranks; None where it is not dealt out, and the Trainer knows a rank's.
        begun: steps that the model stands for already, which may be fewer than those of the epochs that it has seen:
            another kind of plan counted them.
    """
    varies = any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks)
    batches = share or trainer.num_training_batches
    ends = [math.inf] if trainer.max_steps == -1 else [float(trainer.max_steps)]
    if not varies and trainer.max_epochs != -1 and math.isfinite(batches):
        steps, epochs = math.ceil(batches / trainer.accumulate_grad_batches), trainer.max_epochs
        ends += [steps * epochs, begun + steps * (epochs - trainer.current_epoch)]
    return min(ends)

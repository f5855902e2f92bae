"""Learning-rate schedules, and the number of steps, where ranks take different numbers of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
    """Steps that schedules expect the job to have; infinite if unknown.

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


class ProgressSchedules:
    """Steps the schedulers of interval ``step``, in place of Lightning.

    Lightning would count the steps of this rank, which may be far from those that the model stands for.

    Args:
        trainer: about to train; its other schedulers stay as they are.
        progress: steps that the model held here stands for; never falls.
        end: progress after which they stay as they are.
        made: steps that each has made already; by default, those that ``progress`` stands for.

    Attributes:
        made: steps that each has made so far.
    """

    def __init__(
        self, trainer: Any, progress: Callable[[], int], end: float, made: Sequence[int] | None = None
    ) -> None:
        self._module = trainer.lightning_module
        self._progress, self._end = progress, end
        # With manual optimization it is the user who steps them.
        configurations = trainer.lr_scheduler_configs if self._module.automatic_optimization else ()
        self._configurations = [each for each in configurations if each.interval == "step"]
        # Counted here, for a scheduler that goes on from elsewhere may have made more steps.
        self.made = [progress() // each.frequency for each in self._configurations] if made is None else [*made]
        loop = trainer.fit_loop.epoch_loop
        loop.update_lr_schedulers = partial(self._update, partial(type(loop).update_lr_schedulers, loop))

    def follow(self) -> None:
        """Step the schedulers as often as the progress requires, which may differ from this rank's own steps."""
        reached = min(self._progress(), self._end)
        for place, each in enumerate(self._configurations):
            while self.made[place] < reached // each.frequency:
                self.made[place] += 1
                self._module.lr_scheduler_step(each.scheduler, None)

    def _update(self, own: Callable[..., None], interval: str, update_plateau_schedulers: bool) -> None:
        """In place of a method of Lightning's epoch loop, which it calls after each batch and each epoch."""
        if interval == "step":
            self.follow()
        else:
            own(interval=interval, update_plateau_schedulers=update_plateau_schedulers)

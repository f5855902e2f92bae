"""Learning-rate schedules and step counts for ranks that take different numbers of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def estimated_epochs(loop: Any, share: Callable[[], int | None]) -> Iterator[None]:
    """A context in which ``trainer.estimated_stepping_batches`` is computed from ``share``.

    Use it only while optimizers are made: in training, Lightning would end a rank's epoch after this many batches.

    Args:
        loop: the Trainer's fit loop. It may set up its data within the context, because the estimate needs it.
        share: returns the batches per epoch and rank, on average; None if data is not dealt out.
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
    """Number of steps for which schedules are made; infinite if unknown.

    Progress follows the furthest rank, so it may exceed this number. Beyond its end, a schedule may raise, or give
    learning rates below 0.

    Args:
        trainer: a Trainer that is about to train.
        share: batches per epoch and rank, on average; None if data is not dealt out, and the Trainer knows the number.
        begun: steps that the model already represents. They may be fewer than in the epochs that it has seen, if
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
    """Steps the schedulers with interval ``step``, instead of Lightning.

    Lightning would count the steps of this rank, which may differ much from those that the model represents.

    Args:
        trainer: a Trainer that is about to train; its other schedulers are not affected.
        progress: returns the number of steps that this rank's model represents; it never falls.
        end: progress after which schedulers make no more steps.
        made: number of steps that each scheduler has already made; by default, those of ``progress``.

    Attributes:
        made: number of steps that each scheduler has made.
    """

    def __init__(
        self, trainer: Any, progress: Callable[[], int], end: float, made: Sequence[int] | None = None
    ) -> None:
        self._module = trainer.lightning_module
        self._progress, self._end = progress, end
        # With manual optimization, the user steps the schedulers.
        configurations = trainer.lr_scheduler_configs if self._module.automatic_optimization else ()
        self._configurations = [each for each in configurations if each.interval == "step"]
        # Counted here, because a scheduler that resumes from a checkpoint may have made more steps.
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
        """Replaces ``update_lr_schedulers`` of Lightning's epoch loop, which runs after each batch and each epoch."""
        if interval == "step":
            self.follow()
        else:
            own(interval=interval, update_plateau_schedulers=update_plateau_schedulers)

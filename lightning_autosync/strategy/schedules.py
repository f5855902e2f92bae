"""Learning-rate schedules that follow the progress of the job, where ranks take different numbers of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


class ProgressSchedules:
    """Steps the schedulers that advance every so many steps; Lightning itself no longer does.

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
        """Catch up: what is at hand may stand for more steps than this rank has taken, or for fewer."""
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

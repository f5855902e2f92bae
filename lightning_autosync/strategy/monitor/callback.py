"""The common base of the callbacks that log how a job synchronizes."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_autosync.errors import DocumentError

PREFIX = "autosync/"
"""Beginning of the names of all metrics."""
PLAN = "autosync_plan"
"""Name of the hyperparameter with the plan's fingerprint."""


class MonitorMixin:
    """Logs how gradients are synchronized, through the Trainer's loggers::

        trainer = Trainer(strategy="autosync", num_nodes=4, callbacks=[SyncMonitor()])

    The metrics are those of rank 0, over the synchronized steps since the last entry:

    - ``autosync/step_time``: seconds from the end of one synchronization to the end of the next (median). Ranks
      synchronize together, so it is the same on all of them.
    - ``autosync/wait``: seconds of a step in which the rank waited for gradients after its backward pass (median), with
      ``overlap="step"`` also in the next forward pass.
    - ``autosync/bytes``: bytes that the rank sent in a step by its plan, without headers. A native all-reduce counts
      as a ring. Left out if only touched rows of a table travel, because their number is unknown.
    - ``autosync/overlap``: share of the time of communication in which the rank did not wait (median), because it was
      hidden behind computation.
    - ``autosync/share_of_bound``: least possible step time of any exact plan on these links with this computation,
      divided by the step time. Left out on one node, if the rates of links are unknown, or if the plan is not exact.
    - ``autosync/plan_changes``: number of times that the job has taken another plan.
    - ``autosync/overlapped_steps``: with ``overlap="step"``, share of the steps whose backward pass ended without a
      wait.
    - ``autosync/batch_share``: with batch shares, share of a global batch that the rank computes.
    - ``autosync/tuning``: 1 while the job tries other plans or may yet do so, otherwise 0. A change is logged at once.

    Of relaxed plans there are the first three, as means over the rank's own steps, without barriers of all ranks:
    seconds from the end of one step to the end of the next, seconds in which it waited for averages or servers, and
    bytes that its process handed to the kernel.

    At the end of training, the fingerprint of the plan is logged as the hyperparameter ``autosync_plan``. The callback
    makes no collective calls. Other strategies than ``autosync``, split models, and models on accelerators under a plan
    that is not relaxed have none of these metrics: one warning says so.

    Args:
        every_n_steps: number of optimizer steps between two entries. Default: 50.

    Raises:
        DocumentError: an argument is wrong, or the Trainer has no logger.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise DocumentError(f"SyncMonitor: every_n_steps: {every_n_steps!r} is not a whole number of at least 1")
        self._every = every_n_steps
        self._last = 0
        self._active = self._tunes = False

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.loggers:
            raise DocumentError("SyncMonitor: the Trainer has no logger; allowed: a Trainer with logger=...")
        self._last, self._tunes = trainer.global_step, False
        # Loggers write on rank 0 only.
        self._active = trainer.is_global_zero and self._begin(trainer.strategy)

    def _begin(self, strategy: Any) -> bool:
        """Let the strategy measure steps; returns whether it can."""
        measure = getattr(strategy, "measure_steps", None)
        if measure is not None and measure():
            return True
        rank_zero_warn(
            f"SyncMonitor logs nothing under {type(strategy).__name__} here: it needs strategy 'autosync', and a model "
            "that is not split; with a plan that synchronizes gradients in every step also a model on the CPU"
        )
        return False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not self._active:
            return
        found: dict[str, float] = {}
        if (tunes := trainer.strategy.tunes) != self._tunes:
            self._tunes, found["tuning"] = tunes, float(tunes)
        if trainer.global_step - self._last >= self._every:
            self._last = trainer.global_step
            if (figures := trainer.strategy.step_figures()) is not None:
                found |= figures.metrics()
        if found:
            metrics = {f"{PREFIX}{name}": value for name, value in found.items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if not self._active:
            return
        self._active = False
        report = trainer.strategy.report()  # None under relaxed plans; otherwise a candidate may be in use for a moment
        plan = trainer.strategy.plan.fingerprint if report is None else report.plan
        # At the end only, because some loggers refuse to change a hyperparameter.
        for logger in trainer.loggers:
            logger.log_hyperparams({PLAN: plan})
            logger.save()

"""What Lightning does in step inside the training loop, which replicas that do not march in step cannot answer."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Consistency

SIGNAL_CHECK = "_broadcast_sigterm_tensor"
"""Method of the epoch loop (from Lightning 2.6 on) that broadcasts before every batch whether rank 0 got a SIGTERM."""


def leave_lockstep(trainer: Any) -> None:
    """Let each rank look at its own signals only, as Lightning does at the end of each batch in any case."""
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, SIGNAL_CHECK):
        setattr(loop, SIGNAL_CHECK, _nothing)


def check_trainer(trainer: Any, consistency: Consistency, scaler: Any) -> None:
    """Refuse what would deadlock, or train another way than it says.

    Raises:
        PlanError: the trainer has a setting that needs all ranks at the same step, or gradients on all ranks.
    """
    mode = consistency.mode
    scales = scaler is not None and scaler.is_enabled()
    if mode not in ("partial_reduce", "periodic") and scales:
        raise PlanError(f"precision: under '{mode}' servers step the optimizer, which a loss scaler cannot follow")
    if mode == "synchronous":
        if trainer.gradient_clip_val:
            raise PlanError(
                f"gradient_clip_val: {trainer.gradient_clip_val}: with `served` each rank would clip its own gradient, "
                "not their mean"
            )
        return
    for callback in trainer.callbacks:
        if type(callback).__name__ == "Timer" and str(getattr(callback, "_interval", "")).endswith("step"):
            raise PlanError(f"max_time: it asks all ranks in every step, and under '{mode}' they are at different ones")
        if getattr(callback, "_train_time_interval", None):
            raise PlanError(
                f"ModelCheckpoint(train_time_interval): it asks all ranks in every step, and under '{mode}' they are "
                "at different ones; allowed: every_n_epochs"
            )


def check_shared_epoch(trainer: Any) -> None:
    """Refuse what counts the batches of an epoch, of which each rank now has another number.

    Raises:
        PlanError: validation or checkpoints inside an epoch.
    """
    interval = trainer.val_check_interval
    if not (isinstance(interval, float) and interval == 1.0):
        raise PlanError(
            f"val_check_interval: {interval}: ranks take as many batches of an epoch as they are fast enough for, so "
            "validation comes at its end; allowed: 1.0"
        )
    if any(getattr(callback, "_every_n_train_steps", 0) for callback in trainer.checkpoint_callbacks):
        raise PlanError(
            "ModelCheckpoint(every_n_train_steps): ranks take as many steps as they are fast enough for, so "
            "checkpoints come at the end of an epoch; allowed: every_n_epochs"
        )


def check_one_loader(trainer: Any) -> None:
    """Refuse several loaders, whose samples would be dealt out as if they were one's.

    Raises:
        PlanError: there are several.
    """
    loaders = trainer.train_dataloader
    if isinstance(loaders, dict | list | tuple) and len(loaders) > 1:
        raise PlanError(f"train_dataloader: {len(loaders)} loaders at once cannot be dealt out; give one")


def schedulers_by_steps(configurations: Any) -> list[tuple[Any, int]]:
    """Learning-rate schedulers that advance every so many steps, and that number; not those that need a metric."""
    return [
        (each.scheduler, each.frequency)
        for each in configurations
        if each.interval == "step"
        and hasattr(each.scheduler, "last_epoch")
        and not isinstance(each.scheduler, ReduceLROnPlateau)
    ]


def _nothing() -> None:
    pass

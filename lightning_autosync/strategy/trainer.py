"""What the strategy changes in a Trainer (callbacks, signals), and checks of the Trainer's settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Consistency
from lightning_autosync.strategy.base import Replica


class _Callback:
    """A callback that works with the Trainer of either framework."""

    def __getattr__(self, name: str) -> Any:
        # Both frameworks call every hook of their own Callback class, so hooks that are not defined here do nothing.
        if name.startswith(("on_", "setup", "teardown")):
            return _ignore
        raise AttributeError(name)

    @property
    def state_key(self) -> str:
        return type(self).__qualname__

    @property
    def _legacy_state_key(self) -> type:
        # Lightning reads it when a Trainer that already has this callback resumes from a checkpoint.
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the callback has no state."""


class EpochBarrier(_Callback):
    """A barrier of relaxed replicas at the end of every epoch, before anything else happens there.

    Every rank begins an epoch, even without a batch, and all ranks leave it with the same model. Logging, checkpoints
    and the user's own hooks at the end of an epoch may then make collective calls.
    """

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.resume()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.strategy.drain()


class ErrorReport(_Callback):
    """Tells the other ranks about an error on this one, before other callbacks, such as those that save checkpoints.

    Those may make collective calls, in which the other ranks would otherwise wait without knowing of the error. If all
    ranks have the same error, these calls still work; see `FailureDetector.fail`.
    """

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        trainer.strategy.announce_failure(exception)


class EndOfTraining(_Callback):
    """Ends training on all ranks before other hooks, which may prepare rank 0's model for export, for example.

    Where the last batch is known to be the last, it tells the other ranks before hooks make collective calls, such as
    those that save checkpoints. A rank with more batches then gets an error, and does not wait for them.
    """

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        fits = trainer.state.fn == "fit" and not trainer.sanity_checking
        if fits and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self.on_train_epoch_end(trainer, module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch + 1 == trainer.max_epochs:
            trainer.strategy.end_batches()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.strategy.end_training()


_CLIPS = "clip_grad_by_norm"
"""Method of the frameworks' precision plugins."""


class _ClippingReplica:
    """Takes the place of a plugin's ``clip_grad_by_norm``: the replica clips, or the plugin if that returns None."""

    def __init__(self, plugin: Any, replica: Replica) -> None:
        self.replaced = vars(plugin).get(_CLIPS)
        self._plugin, self._replica, self._clip = plugin, replica, getattr(plugin, _CLIPS)

    def __call__(self, optimizer: Optimizer, clip_val: float) -> None:
        if self._replica.clip_by_norm(list(self._plugin.main_params(optimizer)), float(clip_val)) is None:
            self._clip(optimizer, clip_val)


def clip_by_replica(plugin: Any, replica: Replica | None) -> None:
    """Let a precision plugin clip by norm as the replica does (see `Replica.clips_norms`), or as before.

    Unless the replica must clip, a plugin that clips in its own way keeps doing so.
    """
    present = vars(plugin).get(_CLIPS)
    if isinstance(present, _ClippingReplica):
        del vars(plugin)[_CLIPS]
        if present.replaced is not None:
            vars(plugin)[_CLIPS] = present.replaced
    if replica is None or replica.clips_norms == "never":
        return
    if replica.clips_norms == "must" or (_CLIPS not in vars(plugin) and frameworks_own(plugin, _CLIPS)):
        vars(plugin)[_CLIPS] = _ClippingReplica(plugin, replica)


def frameworks_own(plugin: Any, method: str) -> bool:
    """Whether a method of a precision plugin is the framework's."""
    whose = getattr(type(plugin), method).__module__.partition(".")[0]
    return whose in _FRAMEWORKS


def put_first(trainer: Any, callback: _Callback) -> None:
    """Put a callback before all others, unless the trainer already has one of its class."""
    if not any(isinstance(other, type(callback)) for other in trainer.callbacks):
        trainer.callbacks.insert(0, callback)


def _ignore(*_: Any, **__: Any) -> None:
    pass


_FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Packages with a Trainer, or with the precision plugins of Fabric."""

SIGNAL_CHECK = "_broadcast_sigterm_tensor"
"""Method of the epoch loop (since Lightning 2.6) that broadcasts before every batch whether rank 0 got a SIGTERM."""


def skip_signal_broadcast(trainer: Any) -> None:
    """Skip Lightning's broadcast of signals before each batch; each rank still checks its own after the batch.

    The failure detector or the mesh tells the other ranks when a rank ends after a signal.
    """
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, SIGNAL_CHECK):
        setattr(loop, SIGNAL_CHECK, _ignore)


def handle_sigterm_locally(trainer: Any, told: Callable[[], None]) -> None:
    """Let a SIGTERM end this rank after its batch, as in Lightning, but without a collective call.

    Lightning's own handler makes a collective call at whatever point the signal arrives. The backend would match it
    with an unrelated call of another rank.

    Args:
        trainer: a Trainer that has not registered its handlers yet.
        told: called when the signal arrives.
    """
    connector = trainer._signal_connector

    def notice(signum: int, _: object) -> None:
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True
        told()

    connector._sigterm_notifier_fn = notice


def check_trainer(trainer: Any, consistency: Consistency, scaler: Any) -> None:
    """Refuse settings of the Trainer that would deadlock, or would not do what they promise.

    Raises:
        PlanError: the trainer has a setting that needs all ranks at the same step, or gradients on all ranks.
    """
    mode = consistency.mode
    scales = scaler is not None and scaler.is_enabled()
    if mode not in ("partial_reduce", "periodic") and scales:
        raise PlanError(
            f"precision: mode '{mode}' does not support a loss scaler, because servers make the optimizer's steps; "
            "use bf16 or 32-bit precision"
        )
    if mode == "synchronous":
        if trainer.gradient_clip_val:
            raise PlanError(
                f"gradient_clip_val: {trainer.gradient_clip_val}: with `served` each rank would clip its own gradient "
                "instead of the mean; disable clipping, or use a plan without `served`"
            )
        return
    if any(each.reduce_on_plateau and each.interval == "step" for each in trainer.lr_scheduler_configs):
        raise PlanError(
            "lr_scheduler: ReduceLROnPlateau with interval 'step' needs all ranks at the same step, but under mode "
            f"'{mode}' they are not; allowed: interval 'epoch'"
        )
    for callback in trainer.callbacks:
        if "WeightAveraging" in kinds(callback):  # not every version of the frameworks has this class
            raise PlanError(
                f"callbacks: {type(callback).__name__} averages each rank's own weights, so under mode '{mode}' ranks "
                "would end with different models; remove it, or use a plan that synchronizes gradients"
            )
        if type(callback).__name__ == "Timer" and str(getattr(callback, "_interval", "")).endswith("step"):
            raise PlanError(
                f"max_time: it asks all ranks in every step, but under mode '{mode}' they are at different steps; use "
                "max_epochs"
            )
        if getattr(callback, "_train_time_interval", None):
            raise PlanError(
                f"ModelCheckpoint(train_time_interval): it asks all ranks in every step, but under mode '{mode}' they "
                "are at different steps; use every_n_epochs"
            )


def kinds(callback: Any) -> set[str]:
    """The names of the frameworks' classes that a callback is an instance of."""
    return {kind.__name__ for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] in _FRAMEWORKS}


def check_finders(trainer: Any, mode: str) -> None:
    """Refuse callbacks that run a training of their own, with other callbacks, before ``fit`` begins to train.

    Raises:
        PlanError: the Trainer has such a callback, as the one that `Tuner` adds.
    """
    for callback in trainer.callbacks:
        if "LearningRateFinder" in kinds(callback):
            raise PlanError(
                f"callbacks: {type(callback).__name__} trains before the job does, and does not wait for other ranks. "
                f"Under mode '{mode}', remove it, and find the learning rate with a plan that synchronizes gradients"
            )


def check_closure(optimizer: Optimizer, mode: str) -> None:
    """Refuse an optimizer whose ``step`` needs a closure, which computes gradients several times within a step.

    Raises:
        PlanError: ``step`` has a closure without a default, as that of LBFGS.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"optimizer: {type(optimizer).__name__}.step needs a closure, but under mode '{mode}' optimizers step "
            "without one, once the gradients are there; use another optimizer, or a plan that synchronizes gradients"
        )


def check_module(module: nn.Module) -> None:
    """Refuse modules that communicate in every forward pass.

    Raises:
        PlanError: the model has a SyncBatchNorm.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise PlanError(
                f"model: '{name}' is a SyncBatchNorm, which needs all ranks in every step; relaxed plans need plain "
                "BatchNorm (sync_batchnorm=False)"
            )


def check_shared_epoch(trainer: Any) -> None:
    """Refuse settings that count batches or steps of a rank, because ranks have different numbers of them.

    Raises:
        PlanError: validation or checkpoints inside an epoch, or a limit on a rank's own batches or steps.
    """
    why = "faster ranks take more batches of an epoch"
    interval = trainer.val_check_interval
    if not (isinstance(interval, float) and interval == 1.0):
        raise PlanError(f"val_check_interval: {interval}: {why}, so validation runs at its end only; allowed: 1.0")
    if any(getattr(callback, "_every_n_train_steps", 0) for callback in trainer.checkpoint_callbacks):
        raise PlanError(
            f"ModelCheckpoint(every_n_train_steps): {why}, so checkpoints are written at its end only; use "
            "every_n_epochs"
        )
    limit = trainer.limit_train_batches
    if not (isinstance(limit, float) and limit == 1.0):
        raise PlanError(
            f"limit_train_batches: {limit} (also set by overfit_batches and fast_dev_run): {why}; allowed: 1.0, with "
            "a smaller data set (torch.utils.data.Subset)"
        )
    if trainer.max_steps != -1:
        raise PlanError(
            f"max_steps: {trainer.max_steps}: {why}, so ranks reach a number of steps at different times; use "
            "max_epochs"
        )
    if trainer.min_steps:
        raise PlanError(
            f"min_steps: {trainer.min_steps}: {why}, so ranks reach a number of steps at different times; use "
            "min_epochs"
        )


def given_loader(trainer: Any) -> object:
    """What the user gave to ``fit``: the loader, or the module whose hook makes it later."""
    return trainer.fit_loop._data_source.instance


def check_one_loader(trainer: Any) -> None:
    """Refuse several loaders, whose samples would be dealt out as if they belonged to one.

    Raises:
        PlanError: there are several loaders.
    """
    loaders = trainer.fit_loop._combined_loader.flattened
    if len(loaders) > 1:
        raise PlanError(f"train_dataloader: {len(loaders)} loaders at once are not supported; use one")


def check_rejoin(trainer: Any) -> None:
    """Refuse a return to a job with barriers within an epoch, because this rank would have missed one.

    Raises:
        PlanError: ranks wait for each other within an epoch.
    """
    within = trainer.enable_validation and (
        trainer.val_check_batch is None
        or trainer.val_check_batch < trainer.num_training_batches
        or trainer.check_val_every_n_epoch is None
        or getattr(trainer, "_val_check_time_interval", None) is not None
    )
    for callback in trainer.callbacks:
        every, interval = (getattr(callback, name, None) for name in ("_every_n_train_steps", "_train_time_interval"))
        within = within or bool(every or interval)
    if within:
        raise PlanError(
            "this rank cannot rejoin: it missed validation or checkpoints within the epoch, at which ranks wait for "
            "each other; run both at the end of epochs only (val_check_interval=1.0, no every_n_train_steps)"
        )

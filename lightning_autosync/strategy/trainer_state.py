"""The state of rank 0's Trainer, for a rank that comes back after it was lost; and the count of the job's steps."""

from __future__ import annotations

import io
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.strategy.schedules import ProgressSchedules, planned_progress

_SERVER = 0
"""The rank that is asked; averages end without it in any case."""
_REQUEST, _RESPONSE = "trainer_state?", "trainer_state"
_SAVED = ("_last_checkpoint_saved", "_last_global_step_saved")
"""What Lightning's ModelCheckpoint decides by, beside what its ``state_dict`` has."""


class TrainerStateServer:
    """Answers ranks that came back with the state of rank 0's Trainer, on the mesh's thread.

    It answers during epochs only, with the state at their begin: between two epochs callbacks and schedules change.

    Args:
        mesh: of all ranks.
        describe: returns the state at hand as bytes; called on the training's own thread.
    """

    def __init__(self, mesh: Mesh, describe: Callable[[], bytes]) -> None:
        self._mesh, self._describe = mesh, describe
        self._lock = threading.Lock()
        self._response: _Response | None = None
        self._waiting: dict[int, dict[str, Any]] = {}
        self._unsubscribe = mesh.subscribe(_REQUEST, self._take)

    def begin_epoch(self, drain: int) -> None:
        """An epoch begins, after the drain of that number."""
        try:
            response = _Response(drain, "", self._describe())
        except Exception as cause:  # states of the user's own callbacks; this rank has no need of them
            response = _Response(drain, f"{type(cause).__name__}: {cause}", b"")
        with self._lock:
            self._response = response
            waiting, self._waiting = self._waiting, {}
            for rank, request in waiting.items():
                self._respond(rank, request)

    def end_epoch(self) -> None:
        """The epoch is over."""
        with self._lock:
            self._response = None

    def close(self) -> None:
        """Answer nobody any more; may be called again."""
        self._unsubscribe()

    def _take(self, mail: Mail) -> None:
        with self._lock:
            self._respond(mail.sender, mail.header)

    def _respond(self, rank: int, request: dict[str, Any]) -> None:
        response = self._response
        # Others may have begun an epoch, and given a model away, before this rank has left the drain before it.
        if response is None or response.drain < request["drain"]:
            self._waiting[rank] = request
            return
        header = {"name": request["name"], "fault": response.fault}
        with suppress(ExchangeError):  # it was lost again, or this rank is about to leave
            self._mesh.send(rank, _RESPONSE, header, [memoryview(bytearray(response.content))])


class _Response(NamedTuple):
    drain: int
    fault: str
    content: bytes


def request_trainer_state(mesh: Mesh, drain: int, timeout: float) -> dict[str, Any]:
    """The state of rank 0's Trainer, once it is in an epoch after the drain of that number.

    Raises:
        ExchangeError: rank 0 does not answer, or callbacks or schedules keep what cannot be sent.
    """
    name = secrets.token_hex(8)
    mesh.send(_SERVER, _REQUEST, {"name": name, "drain": drain})
    mail = mesh.receive(_RESPONSE, sender=_SERVER, timeout=timeout)
    while mail.header["name"] != name:  # meant for a predecessor, which was lost before it got this
        mail = mesh.receive(_RESPONSE, sender=_SERVER, timeout=timeout)
    fault = mail.header["fault"]
    if not fault:
        try:
            return dict(torch.load(io.BytesIO(mail.payload), map_location="cpu", weights_only=True))
        except Exception as cause:
            fault = str(cause).splitlines()[0]
    raise ExchangeError(
        f"this rank cannot come back: the states of callbacks and schedulers must be plain values and tensors ({fault})"
    )


class TrainerProgress:
    """Lets a Trainer's schedules and its count of steps follow the progress of the job.

    This rank's own steps would be other ones on each rank, and so would the names of checkpoints.

    Args:
        trainer: about to train.
        share: batches of an epoch, divided by ranks, where the data is dealt out; else None.
        progress: returns the steps that the model at hand stands for.
        state: of `request_trainer_state`, where this rank came back to the job.

    Raises:
        PlanError: this rank was not started with what the others were started with.
    """

    def __init__(
        self, trainer: Any, share: int | None, progress: Callable[[], int], state: Mapping[str, Any] | None = None
    ) -> None:
        self._trainer, self._share, self._progress = trainer, share, progress
        self._skipped, made = 0, None
        if state is None:
            self._end = planned_progress(trainer, share, progress())
            # Steps counted under another plan, or in an earlier training.
            self._offset = trainer.global_step - progress()
        else:
            self._skipped = apply_trainer_state(trainer, state, {"share": share, "progress": progress()})
            made, self._end, self._offset = state["made"], state["end"], state["begun"]
            count_steps(trainer, self._offset + progress())
        self._schedules = ProgressSchedules(trainer, progress, self._end, made)

    def follow(self) -> None:
        """Catch up with the progress of the model at hand."""
        count_steps(self._trainer, self._offset + self._progress())
        self._schedules.follow()

    def describe(self) -> bytes:
        """The Trainer's state for ranks that come back; see `describe_trainer_state`."""
        facts = {"share": self._share, "progress": self._progress(), "made": self._schedules.made}
        return describe_trainer_state(self._trainer, {**facts, "end": self._end, "begun": self._offset})

    def skip_missed_batches(self) -> None:
        """In the first epoch after this rank came back, leave out as many batches as the others have made."""
        if self._skipped:
            skip_batches(self._trainer, self._skipped)
            self._skipped = 0


def describe_trainer_state(trainer: Any, facts: Mapping[str, Any]) -> bytes:
    """What `apply_trainer_state` needs: plain values and tensors, readable with ``torch.load(weights_only=True)``.

    Args:
        trainer: in training.
        facts: `share` (batches of an epoch, divided by ranks, where it is dealt out), `progress` (steps that the model
            stands for), and whatever else is told.
    """
    callbacks = {callback.state_key: (callback.state_dict(), _saved(callback)) for callback in trainer.callbacks}
    content = {
        **facts,
        "epoch": trainer.current_epoch,
        "callbacks": {key: state for key, state in callbacks.items() if any(state)},
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "hyperparameters": [_hyperparameters(group) for group in _groups(trainer)],
        "reloaded": [getattr(*place) for place in _reloads(trainer)],
        "validates": trainer.fit_loop.epoch_loop.val_loop._combined_loader is not None,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def apply_trainer_state(trainer: Any, state: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
    """Let ``trainer``, which is about to begin its first epoch, go on from the state of rank 0's.

    Args:
        trainer: this rank's.
        state: of `request_trainer_state`.
        facts: as there.

    Returns:
        Batches of this epoch that are not this rank's any more, for the others have made as many.

    Raises:
        PlanError: this rank was not started with what the others were started with.
    """
    groups, schedulers = _groups(trainer), [each.scheduler for each in trainer.lr_scheduler_configs]
    _check_alike("train_dataloader: batches of an epoch, by ranks", facts["share"], state["share"])
    _check_alike("optimizer: parameter groups", len(groups), len(state["hyperparameters"]))
    _check_alike("lr_schedulers", len(schedulers), len(state["schedulers"]))
    for callback in trainer.callbacks:
        kept, saved = state["callbacks"].get(callback.state_key, ({}, {}))
        if "dirpath" in kept and hasattr(callback, "dirpath"):
            callback.dirpath = kept["dirpath"]  # a checkpoint's, which a new run would place anew
        if kept:
            callback.load_state_dict(kept)
        for name, value in saved.items():
            setattr(callback, name, value)
    for scheduler, kept in zip(schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(kept)
    for group, values in zip(groups, state["hyperparameters"], strict=True):
        group.update(values)
    for progress in (trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_progress.total):
        progress.ready = progress.started = progress.processed = progress.completed = state["epoch"]
    _set_up_validation(trainer, state["validates"])
    for (loop, name), epoch in zip(_reloads(trainer), state["reloaded"], strict=True):
        setattr(loop, name, epoch)
    _check_samplers(trainer)
    if facts["share"] is not None:
        return 0
    made = (facts["progress"] - state["progress"]) * trainer.accumulate_grad_batches
    return int(max(0, min(made, trainer.num_training_batches - 1)))


def count_steps(trainer: Any, steps: int) -> None:
    """Let ``trainer.global_step`` be ``steps``, and loggers count on from there; never back."""
    loop = trainer.fit_loop.epoch_loop
    # A batch at hand may have made its step and not be counted by loggers yet.
    loop._batches_that_stepped += max(0, steps - loop.global_step)
    automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
    for count in (automatic, loop.manual_optimization.optim_step_progress.total):
        count.ready = count.completed = steps


def skip_batches(trainer: Any, batches: int) -> None:
    """Let the epoch, whose first batch begins, end so many batches earlier."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + batches)


def _check_samplers(trainer: Any) -> None:
    """Check the user's own samplers: they may have been made while this process was alone in its process group."""
    expected = trainer.strategy.distributed_sampler_kwargs
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        for loader in getattr(loop._combined_loader, "flattened", ()):
            for sampler in (
                getattr(loader, "sampler", None),
                getattr(getattr(loader, "batch_sampler", None), "sampler", None),
            ):
                own = {name: getattr(sampler, name, value) for name, value in expected.items()}
                if own != expected:
                    raise PlanError(
                        f"dataloader: its sampler is for {own}, this rank is {expected}; give a sampler of your own "
                        "both, for a rank that comes back is alone in its process group at first"
                    )


def _set_up_validation(trainer: Any, done: bool) -> None:
    """Set up validation now, alone, if the others have ``done`` so; else it is set up together with them."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if not done:
        loop._combined_loader = None
    elif loop._combined_loader is None:
        trainer.validating = True
        loop.setup_data()
        trainer.training = True


def _reloads(trainer: Any) -> list[tuple[Any, str]]:
    """The attributes in which Lightning keeps the epochs at which it last reloaded data loaders."""
    loop = trainer.fit_loop
    return [(loop, "_last_train_dl_reload_epoch"), (loop.epoch_loop.val_loop, "_last_val_dl_reload_epoch")]


def _saved(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name) for name in _SAVED if hasattr(callback, name)}


def _groups(trainer: Any) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _check_alike(what: str, own: int | None, others: int | None) -> None:
    if own != others:
        raise PlanError(f"{what}: this rank has {own}, the job that it comes back to {others}; start it with the same")

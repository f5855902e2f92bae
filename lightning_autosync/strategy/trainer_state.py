"""The state of rank 0's Trainer, for a rank that returns after it was lost, and the count of the job's steps."""

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
"""The rank that answers. Relaxed training cannot continue without rank 0 anyway."""
_REQUEST, _RESPONSE = "trainer_state?", "trainer_state"
_SAVED = ("_last_checkpoint_saved", "_last_global_step_saved")
"""Attributes of Lightning's ModelCheckpoint that affect its decisions, but are not in its ``state_dict``."""


class TrainerStateServer:
    """Sends the state of rank 0's Trainer to ranks that return, on the mesh's thread.

    It answers only between two barriers of all ranks, with the state after the first, because callbacks and schedules
    change during a barrier.

    Args:
        mesh: the mesh of all ranks.
        describe: returns the current state as bytes; called on the training thread.
    """

    def __init__(self, mesh: Mesh, describe: Callable[[], bytes]) -> None:
        self._mesh, self._describe = mesh, describe
        self._lock = threading.Lock()
        self._response: _Response | None = None
        self._waiting: dict[int, dict[str, Any]] = {}
        self._unsubscribe = mesh.subscribe(_REQUEST, self._take)

    def resume(self, drain: int) -> None:
        """Answer again, after the drain with number ``drain``."""
        try:
            response = _Response(drain, "", self._describe())
        except Exception as cause:  # a fault in a user's callback must not end this rank, which does not need the state
            response = _Response(drain, f"{type(cause).__name__}: {cause}", b"")
        with self._lock:
            self._response = response
            waiting, self._waiting = self._waiting, {}
            for rank, request in waiting.items():
                self._respond(rank, request)

    def pause(self) -> None:
        """Stop answering; requests wait until `resume`."""
        with self._lock:
            self._response = None

    def close(self) -> None:
        """Stop answering; a second call has no effect."""
        self._unsubscribe()

    def _take(self, mail: Mail) -> None:
        with self._lock:
            self._respond(mail.sender, mail.header)

    def _respond(self, rank: int, request: dict[str, Any]) -> None:
        response = self._response
        # Another rank may have begun the next epoch, and donated its model, before this rank has left the drain.
        if response is None or response.drain < request["drain"]:
            self._waiting[rank] = request
            return
        header = {"name": request["name"], "fault": response.fault}
        with suppress(ExchangeError):  # the rank was lost again, or this rank is about to leave
            self._mesh.send(rank, _RESPONSE, header, [memoryview(bytearray(response.content))])


class _Response(NamedTuple):
    drain: int
    fault: str
    content: bytes


def request_trainer_state(mesh: Mesh, drain: int, timeout: float) -> dict[str, Any]:
    """Wait for the state of rank 0's Trainer in an epoch after the drain with number ``drain``.

    Raises:
        ExchangeError: rank 0 does not answer, or callbacks or schedules have state that cannot be sent.
    """
    name = secrets.token_hex(8)
    mesh.send(_SERVER, _REQUEST, {"name": name, "drain": drain})
    mail = mesh.receive(_RESPONSE, sender=_SERVER, timeout=timeout)
    while mail.header["name"] != name:  # an answer to an earlier process of this rank, which was lost
        mail = mesh.receive(_RESPONSE, sender=_SERVER, timeout=timeout)
    fault = mail.header["fault"]
    if not fault:
        try:
            return dict(torch.load(io.BytesIO(mail.payload), map_location="cpu", weights_only=True))
        except Exception as cause:
            fault = str(cause).splitlines()[0]
    raise ExchangeError(
        "this rank cannot rejoin: the states of callbacks and schedulers may contain only plain values and tensors "
        f"({fault})"
    )


class TrainerProgress:
    """Lets a Trainer's schedules and step count follow the progress of the job.

    The number of a rank's own steps differs between ranks, and so would the names of checkpoints.

    Args:
        trainer: a Trainer that is about to train.
        share: batches per epoch and rank, on average; None if data is not dealt out.
        progress: returns the number of steps that the current model represents.
        state: the result of `request_trainer_state` if this rank returned to the job, otherwise None.

    Raises:
        PlanError: this rank was started with other settings than the others.
    """

    def __init__(
        self, trainer: Any, share: int | None, progress: Callable[[], int], state: Mapping[str, Any] | None = None
    ) -> None:
        self._trainer, self._share, self._progress = trainer, share, progress
        self._skipped, made = 0, None
        if state is None:
            self._end = planned_progress(trainer, share, progress())
            # Steps from another plan or an earlier training, which progress does not include.
            self._offset = trainer.global_step - progress()
        else:
            self._skipped = apply_trainer_state(trainer, state, {"share": share, "progress": progress()})
            made, self._end, self._offset = state["made"], state["end"], state["begun"]
            count_steps(trainer, self._offset + progress())
        self._schedules = ProgressSchedules(trainer, progress, self._end, made)

    def follow(self) -> None:
        """Update step count and schedules to the progress of the current model."""
        count_steps(self._trainer, self._offset + self._progress())
        self._schedules.follow()

    def describe(self) -> bytes:
        """The Trainer's state for ranks that return; see `describe_trainer_state`."""
        facts = {"share": self._share, "progress": self._progress(), "made": self._schedules.made}
        return describe_trainer_state(self._trainer, {**facts, "end": self._end, "begun": self._offset})

    def skip_missed_batches(self) -> None:
        """In the first epoch after this rank returned, skip as many batches as the others have made."""
        if self._skipped:
            skip_batches(self._trainer, self._skipped)
            self._skipped = 0


def describe_trainer_state(trainer: Any, facts: Mapping[str, Any]) -> bytes:
    """The state for `apply_trainer_state`: plain values and tensors, readable with ``torch.load(weights_only=True)``.

    Args:
        trainer: a Trainer in training.
        facts: ``share`` (batches per epoch and rank, on average; None if data is not dealt out), ``progress`` (steps
            that the model represents), and other values to send.
    """
    callbacks = {callback.state_key: (callback.state_dict(), _saved(callback)) for callback in trainer.callbacks}
    content = {
        **facts,
        "epoch": trainer.current_epoch,
        "callbacks": {key: state for key, state in callbacks.items() if any(state)},
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "hyperparameters": [{key: group[key] for key in group if key != "params"} for group in _groups(trainer)],
        "reloaded": [getattr(*place) for place in _reloads(trainer)],
        "validates": trainer.fit_loop.epoch_loop.val_loop._combined_loader is not None,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def apply_trainer_state(trainer: Any, state: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
    """Let ``trainer``, which is about to begin its first epoch, continue from the state of rank 0's Trainer.

    Args:
        trainer: this rank's Trainer.
        state: the result of `request_trainer_state`.
        facts: this rank's ``share`` and ``progress``; see `describe_trainer_state`.

    Returns:
        Number of batches of this epoch to skip, because the other ranks have already made as many.

    Raises:
        PlanError: this rank was started with other settings than the others.
    """
    groups, schedulers = _groups(trainer), [each.scheduler for each in trainer.lr_scheduler_configs]
    _check_alike("train_dataloader: batches of an epoch, by ranks", facts["share"], state["share"])
    _check_alike("optimizer: parameter groups", len(groups), len(state["hyperparameters"]))
    _check_alike("lr_schedulers", len(schedulers), len(state["schedulers"]))
    for callback in trainer.callbacks:
        kept, saved = state["callbacks"].get(callback.state_key, ({}, {}))
        if "dirpath" in kept and hasattr(callback, "dirpath"):
            callback.dirpath = kept["dirpath"]  # otherwise this process would choose a new folder for checkpoints
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
    """Set ``trainer.global_step`` to ``steps``; the loggers' count follows, but never falls."""
    loop = trainer.fit_loop.epoch_loop
    # The current batch may have made its step, which loggers do not count yet, so only the difference is added.
    loop._batches_that_stepped += max(0, steps - loop.global_step)
    automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
    for count in (automatic, loop.manual_optimization.optim_step_progress.total):
        count.ready = count.completed = steps


def skip_batches(trainer: Any, batches: int) -> None:
    """Let the epoch, whose first batch begins now, end ``batches`` batches earlier."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + batches)


def _check_samplers(trainer: Any) -> None:
    """Check the user's own samplers, which may have been made while this process was alone in its process group."""
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
                        f"dataloader: its sampler has {own}, but this rank is {expected}; set both in your own "
                        "sampler, because a rank that rejoins is at first alone in its process group"
                    )


def _set_up_validation(trainer: Any, done: bool) -> None:
    """Set up validation now if the other ranks have ``done`` so; otherwise all ranks set it up together later."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if not done:
        loop._combined_loader = None
    elif loop._combined_loader is None:
        trainer.validating = True
        loop.setup_data()
        trainer.training = True


def _reloads(trainer: Any) -> list[tuple[Any, str]]:
    """Attributes in which Lightning keeps the epochs of the last reloads of data loaders, as pairs (object, name)."""
    loop = trainer.fit_loop
    return [(loop, "_last_train_dl_reload_epoch"), (loop.epoch_loop.val_loop, "_last_val_dl_reload_epoch")]


def _saved(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name) for name in _SAVED if hasattr(callback, name)}


def _groups(trainer: Any) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _check_alike(what: str, own: int | None, others: int | None) -> None:
    if own != others:
        raise PlanError(
            f"{what}: this rank has {own}, but the job that it rejoins has {others}; start this rank like the other "
            "ranks"
        )

"""Where a Trainer is in its training: told by rank 0, taken up by a rank that came back after it was lost."""

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

_TELLER = 0
"""The rank that is asked; averages end without it in any case."""
_ASKED, _TOLD = "position?", "position"
_SAVED = ("_last_checkpoint_saved", "_last_global_step_saved")
"""What Lightning's ModelCheckpoint decides by, beside what its ``state_dict`` has."""


class PositionDesk:
    """Rank 0 tells whoever came back where training is.

    During a pass only, with what held at its begin: between two passes callbacks and schedules change.

    Args:
        mesh: of all ranks.
        describe: the position at hand, as bytes; called on the training's own thread.
    """

    def __init__(self, mesh: Mesh, describe: Callable[[], bytes]) -> None:
        self._mesh, self._describe = mesh, describe
        self._lock = threading.Lock()
        self._answer: _Answer | None = None
        self._waiting: dict[int, dict[str, Any]] = {}
        self._unsubscribe = mesh.subscribe(_ASKED, self._asked)

    def open(self, meeting: int) -> None:
        """A pass begins, after the meeting of that number."""
        try:
            answer = _Answer(meeting, "", self._describe())
        except Exception as cause:  # states of the user's own callbacks; this rank has no need of them
            answer = _Answer(meeting, f"{type(cause).__name__}: {cause}", b"")
        with self._lock:
            self._answer = answer
            waiting, self._waiting = self._waiting, {}
            for rank, question in waiting.items():
                self._hear(rank, question)

    def shut(self) -> None:
        """A pass is over."""
        with self._lock:
            self._answer = None

    def close(self) -> None:
        """Tell nobody any more; may be called again."""
        self._unsubscribe()

    def _asked(self, mail: Mail) -> None:
        with self._lock:
            self._hear(mail.sender, mail.header)

    def _hear(self, rank: int, question: dict[str, Any]) -> None:
        answer = self._answer
        # Others may have begun a pass, and given a model away, before this rank has left the meeting before it.
        if answer is None or answer.meeting < question["meeting"]:
            self._waiting[rank] = question
            return
        header = {"name": question["name"], "fault": answer.fault}
        with suppress(ExchangeError):  # it was lost again, or this rank is about to leave
            self._mesh.send(rank, _TOLD, header, [memoryview(bytearray(answer.content))])


class _Answer(NamedTuple):
    meeting: int
    fault: str
    content: bytes


def ask_position(mesh: Mesh, meeting: int, timeout: float) -> dict[str, Any]:
    """Rank 0's position, once it is in a pass after the meeting of that number.

    Raises:
        ExchangeError: rank 0 does not answer, or callbacks or schedules keep what cannot be sent.
    """
    name = secrets.token_hex(8)
    mesh.send(_TELLER, _ASKED, {"name": name, "meeting": meeting})
    mail = mesh.receive(_TOLD, sender=_TELLER, timeout=timeout)
    while mail.header["name"] != name:  # of a predecessor, which was lost before it was told
        mail = mesh.receive(_TOLD, sender=_TELLER, timeout=timeout)
    fault = mail.header["fault"]
    if not fault:
        try:
            return dict(torch.load(io.BytesIO(mail.payload), map_location="cpu", weights_only=True))
        except Exception as cause:
            fault = str(cause).splitlines()[0]
    raise ExchangeError(
        f"this rank cannot come back: the states of callbacks and schedulers must be plain values and tensors ({fault})"
    )


def describe_position(trainer: Any, facts: Mapping[str, Any]) -> bytes:
    """What `take_position` needs: plain values and tensors, readable with ``torch.load(weights_only=True)``.

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


def take_position(trainer: Any, position: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
    """Let ``trainer``, which is about to begin its first pass, go on from rank 0's position.

    Args:
        trainer: this rank's.
        position: of `ask_position`.
        facts: as there.

    Returns:
        Batches of this pass that are not this rank's any more, for the others have made as many.

    Raises:
        PlanError: this rank was not started with what the others were started with.
    """
    groups, schedulers = _groups(trainer), [each.scheduler for each in trainer.lr_scheduler_configs]
    _check_alike("train_dataloader: batches of an epoch, by ranks", facts["share"], position["share"])
    _check_alike("optimizer: parameter groups", len(groups), len(position["hyperparameters"]))
    _check_alike("lr_schedulers", len(schedulers), len(position["schedulers"]))
    for callback in trainer.callbacks:
        state, saved = position["callbacks"].get(callback.state_key, ({}, {}))
        if "dirpath" in state and hasattr(callback, "dirpath"):
            callback.dirpath = state["dirpath"]  # a checkpoint's, which a new run would place anew
        if state:
            callback.load_state_dict(state)
        for name, value in saved.items():
            setattr(callback, name, value)
    for scheduler, state in zip(schedulers, position["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    for group, values in zip(groups, position["hyperparameters"], strict=True):
        group.update(values)
    for progress in (trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_progress.total):
        progress.ready = progress.started = progress.processed = progress.completed = position["epoch"]
    _set_up_validation(trainer, position["validates"])
    for (loop, name), epoch in zip(_reloads(trainer), position["reloaded"], strict=True):
        setattr(loop, name, epoch)
    _check_samplers(trainer)
    if facts["share"] is not None:
        return 0
    made = (facts["progress"] - position["progress"]) * trainer.accumulate_grad_batches
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
    """Let the pass, of which the first batch begins, end so many batches earlier."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + batches)


def check_return(trainer: Any) -> None:
    """Refuse to come back where ranks meet within an epoch, of which meetings this rank would have missed some.

    Raises:
        PlanError: they do.
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
            "this rank cannot come back: ranks meet within an epoch, for validation or checkpoints, of which it would "
            "have missed some; allowed: both at the end of epochs (val_check_interval=1.0, no every_n_train_steps)"
        )


def _check_samplers(trainer: Any) -> None:
    """Samplers of the user's own may have taken this process, alone in its process group at first, for the only one."""
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
    """Now, alone, if the others have ``done`` so, and else together with them."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if not done:
        loop._combined_loader = None
    elif loop._combined_loader is None:
        trainer.validating = True
        loop.setup_data()
        trainer.training = True


def _reloads(trainer: Any) -> list[tuple[Any, str]]:
    """Where Lightning keeps the epochs at which it last made loaders anew."""
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

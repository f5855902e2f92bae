"""Callbacks that the strategy puts in front of the user's."""

from __future__ import annotations

from typing import Any


class _Callback:
    """A callback for the Trainer of either framework."""

    def __getattr__(self, name: str) -> Any:
        # Both frameworks call every hook of their own Callback class, of which only two matter here.
        if name.startswith(("on_", "setup", "teardown")):
            return _ignore
        raise AttributeError(name)

    @property
    def state_key(self) -> str:
        return type(self).__qualname__

    @property
    def _legacy_state_key(self) -> type:
        # Asked for where a Trainer that has been trained with this callback resumes from a checkpoint.
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""


class EpochMeetings(_Callback):
    """Where replicas that do not march in step meet: at the end of every epoch, before anything else happens there.

    Every rank begins a pass, even one that gets no batch of it, and all leave it with one model; so whatever follows
    (logging, checkpoints, the user's own hooks) may ask all ranks.
    """

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.begin_pass()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.strategy.end_pass()


class ErrorReport(_Callback):
    """Tells the other ranks of an error on this one, before callbacks that save what can be saved ask them."""

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        trainer.strategy.tell_others(exception)


def put_first(trainer: Any, callback: _Callback) -> None:
    """Let a callback come before all others; nothing if the trainer has one of its kind."""
    if not any(isinstance(other, type(callback)) for other in trainer.callbacks):
        trainer.callbacks.insert(0, callback)


def _ignore(*_: Any, **__: Any) -> None:
    pass

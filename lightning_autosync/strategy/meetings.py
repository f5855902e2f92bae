"""Where replicas that do not march in step meet: at the end of every epoch, before anything else happens there."""

from __future__ import annotations

from typing import Any


class EpochMeetings:
    """A callback for the Trainer of either framework, put in front of the user's by the strategy.

    Every rank begins a pass, even one that gets no batch of it, and all leave it with one model; so whatever follows
    (logging, checkpoints, the user's own hooks) may ask all ranks.
    """

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

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.begin_pass()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.strategy.end_pass()


def _ignore(*_: Any, **__: Any) -> None:
    pass

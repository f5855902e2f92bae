"""Which backward passes synchronize gradients: those that do under DDP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_autosync.engine import Engine
from lightning_autosync.engine.accumulator_hooks import AccumulatorHooks
from lightning_autosync.engine.waiting import count_batch
from lightning_autosync.errors import ExchangeError
from lightning_autosync.strategy.base import Replica


class SynchronizedPasses(Replica):
    """A replica with an engine. It says which backward passes the engine synchronizes; others stay on their rank.

    These are the passes that the strategy makes (`Replica.backward`), and the first pass after a forward pass of the
    wrapper. In a ``training_step`` only `Replica.backward` counts, unless the user calls the wrapper there.
    """

    _engine: Engine | None = None
    _has_synchronized = False
    _refusal = ""
    """The message with which passes are refused, because they would not be synchronized; empty if they are not."""

    def __init__(self) -> None:
        self._guards = AccumulatorHooks()

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module that is trained."""

    @property
    def engine(self) -> Engine | None:
        """The engine; None after `close`."""
        return self._engine

    @property
    def enabled(self) -> bool:
        """Whether backward passes synchronize gradients; otherwise they only accumulate them."""
        return self._engine is not None and self._engine.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if self._engine is not None:
            self._engine.enabled = enabled

    @property
    def awaits_backward(self) -> bool:
        """Whether a synchronized backward pass has begun, or may follow the last forward pass."""
        return self._engine is not None and (self._engine.expects or self._engine.in_pass)

    def begin_batch(self) -> None:
        count_batch()

    def training_step(self, batch: Any) -> AbstractContextManager[None]:
        return self._training_step()

    @contextmanager
    def _training_step(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._expect(False)

    def after_forward(self) -> None:
        if self.enabled:
            self._expect(True)

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        return nullcontext() if self._has_synchronized else self._first_step()

    @contextmanager
    def _first_step(self) -> Iterator[None]:
        yield  # a closure may make the first pass
        by_hand = not getattr(self.module, "automatic_optimization", True)
        if by_hand and not self._has_synchronized:
            self._has_synchronized = True
            rank_zero_warn(
                "AutoSync: an optimizer makes a step, but no backward pass has synchronized gradients yet. As under "
                "DDP, manual optimization needs self.manual_backward(loss): a plain loss.backward() stays on its rank"
            )

    @contextmanager
    def _synchronizing(self, engine: Engine) -> Iterator[None]:
        """The context of a backward pass in which this rank takes part, whatever parameters it reaches."""
        engine.deferred, engine.expects, enabled, ended = True, True, engine.enabled, False
        try:
            yield
            ended = True
            self._has_synchronized |= enabled
            engine.end_backward()
        except BaseException as error:
            # Otherwise no other rank takes part, or this rank has sent nothing and may begin the pass again.
            if enabled and (ended or engine.in_pass):
                (self._engine or engine).interrupt(error)
            raise
        finally:
            engine.deferred = False
            self._expect(False)

    @contextmanager
    def _opening_anew(self) -> Iterator[None]:
        """A context that follows a change, or opens another engine. After an error in it, all later passes raise."""
        try:
            yield
        except BaseException as error:
            self._refusal = (
                "gradients are no longer synchronized, because synchronization could not be opened for parameters or "
                f"links that had changed ({type(error).__name__}: {error}): resume from a checkpoint"
            )
            for parameter in self.module.parameters():
                if parameter.requires_grad:  # a pass of an output that was computed before makes no forward pass
                    self._guards.add(parameter, self._refuse_passes, self._refuse_passes)
            raise

    def replace(self) -> None:
        """Stop synchronizing, because another replica follows for this module; later passes of this one raise."""
        self.close()
        self._refusal = (
            "gradients would not be synchronized, because the module was set up again after this wrapper was made: "
            "use what the last setup returned"
        )

    def _refuse_passes(self, *_: object) -> None:
        if self._refusal:
            raise ExchangeError(self._refusal)

    def _begin_by_hand(self) -> None:
        """Note the begin of a pass that `backward` does not make; those after it are left to this rank."""
        self._has_synchronized = True
        self._expect(False)

    def _expect(self, expects: bool) -> None:
        if self._engine is not None:
            self._engine.expects = expects

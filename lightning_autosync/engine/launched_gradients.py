"""`LaunchedGradients`: gradients of a pass that are clipped or unscaled before they have come.

Functions that do so before the optimizer's step need norms of all gradients. The roots of the sums tell these early
(see `gradient_norms`). What the functions do to a gradient is noted in its `Due`, and done when it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_autosync.engine.due_parameter import Due, Owner, due_of
from lightning_autosync.engine.engine import Engine
from lightning_autosync.engine.norms import clip_by_norms
from lightning_autosync.engine.step_stream import keep

_UNSCALED = (torch.float32, torch.float64, torch.bfloat16)
"""Types of parameters whose gradients may be unscaled when they have come."""


class LaunchOwner(Owner, Protocol):
    """What completes the messages of a pass.

    Attributes:
        waiting: makes the context in which a reader waits for sums and makes the optimizer's step.
    """

    waiting: Callable[[], AbstractContextManager[None]]

    def settle(self) -> None:
        """Complete all messages under way."""

    def fail(self, what: str, error: BaseException) -> None:
        """Let all later readers fail, because parameters that are due will get no value."""


class LaunchedGradients:
    """The gradients of the messages that were under way when a pass ended.

    Args:
        engine: the engine of these messages. Another plan may take over as soon as this rank has all sums, while other
            ranks still wait for theirs.
        members: the parameters of each message that train, by the message's index.
        owner: completes the messages.
    """

    def __init__(self, engine: Engine, members: Mapping[int, list[nn.Parameter]], owner: LaunchOwner) -> None:
        self._engine, self._members, self._owner = engine, members, owner
        self._ended = False

    def end(self) -> None:
        """Note that all gradients of the pass are exchanged again, so that those of these messages mean nothing."""
        self._ended = True

    def clip_by_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, error_if_nonfinite: bool
    ) -> Tensor | None:
        """See `StepOverlap.clip_by_norm`."""
        norms = self._norms(parameters)
        if norms is None:
            return None
        total, factor = clip_by_norms(parameters, norms, max_norm, error_if_nonfinite)
        for parameter in norms:
            _known_due(parameter).factor = factor
        return total

    def unscale_later(self, parameters: Sequence[nn.Parameter], inverse: Tensor) -> set[nn.Parameter]:
        """See `StepOverlap.unscale_later`."""
        wanted = {*parameters}
        if any(each not in wanted for members in self._members.values() for each in members):
            return set()
        # Devices other than CPUs have not been tried.
        if any(each.dtype not in _UNSCALED or each.device.type != "cpu" for each in parameters):
            return set()
        norms = self._norms(parameters)
        if norms is None:
            return set()
        if not nn.utils.get_total_norm(list(norms.values())).isfinite():
            self._owner.settle()  # before the scaler reads the gradients: this is no reader that a user could change
            return set()
        inverse = inverse.cpu()
        for parameter in norms:
            _known_due(parameter).inverse = inverse
        return set(norms)

    def _norms(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor] | None:
        """The norms of gradients that are due, by parameter; the others of ``parameters`` have come then."""
        first, *others = self._members
        # Its sum tells whether some rank's parameters have changed. All ranks read its gradients themselves, so it does
        # not matter whether a function has changed them.
        self._owner.complete(first)
        wanted = {*parameters}
        asked = {index: [each for each in self._members[index] if each in wanted] for index in others}
        early = [index for index, members in asked.items() if members and self._engine.has_roots(index)]
        if self._ended or not early:
            return None
        for index in asked.keys() - set(early):
            if asked[index]:
                self._owner.complete(index)
        self._engine.send_sums_first(early)
        # Gradients that have come may have been changed.
        dues = [due_of(parameter) for index in early for parameter in asked[index]]
        refuses = any(due is None or due.clipped_or_stepped for due in dues)
        try:
            with self._owner.waiting():
                norms = self._engine.norms(early, refuses)
        except Exception as error:
            self._owner.fail("the norms of gradients could not be exchanged", error)
            raise
        if norms is None:
            return None
        found = {}
        for index, of_message in zip(early, norms, strict=True):
            members = self._engine.members(index)
            known = dict(zip(members, of_message.to(members[0].device), strict=True))
            for each in asked[index]:
                inverse = _known_due(each).inverse
                norm = known[each] if inverse is None else known[each] * inverse
                found[each] = norm.to(each.dtype)
        return found


def change_gradients(due: Sequence[tuple[nn.Parameter, Due]]) -> None:
    """Do to gradients that have come what was noted while they were due; each change in one call for all of them.

    Args:
        due: parameters, and what was due for each.
    """
    unscaled: dict[tuple[int, torch.dtype], tuple[Tensor, list[Tensor]]] = {}
    multiplied: dict[int, tuple[Tensor, list[Tensor]]] = {}
    limited: dict[float, list[nn.Parameter]] = {}
    for parameter, what in due:
        if (gradient := parameter.grad) is None:
            continue
        if what.inverse is not None:
            unscaled.setdefault((id(what.inverse), gradient.dtype), (what.inverse, []))[1].append(gradient)
        if what.factor is not None:
            multiplied.setdefault(id(what.factor), (what.factor, []))[1].append(gradient)
        if what.limit is not None:
            limited.setdefault(what.limit, []).append(parameter)
    for inverse, gradients in unscaled.values():
        # By the function of the scaler, so that the bits are its own. The gradients are known to be finite.
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros_like(inverse), inverse)
    for factor, gradients in multiplied.values():
        keep(factor)
        torch._foreach_mul_(gradients, factor)
    for limit, parameters in limited.items():
        nn.utils.clip_grad_value_(parameters, limit)


def _known_due(parameter: nn.Parameter) -> Due:
    due = due_of(parameter)
    assert due is not None  # no rank refused
    return due

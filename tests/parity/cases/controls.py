"""Pairs that differ, so that tests can see that differences are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parity.case import Family
from parity.parts import Task

if TYPE_CHECKING:
    from parity.side import Side

family = Family("controls", plans=("default",))


@family()
def gradients_that_one_side_halves(side: Side) -> None:
    class Halves(Task):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                parameter.grad *= 1.0 if side.is_ddp else 0.5

    side.fit(Halves(), max_epochs=1)


@family()
def a_weight_that_is_off_by_little(side: Side) -> None:
    module = Task()
    side.fit(module, max_epochs=1)
    module.net[0].bias.data += 0.0 if side.is_ddp else 1e-5
    side.note_module(module)


@family()
def a_note_that_one_side_has(side: Side) -> None:
    side.note("both", 1)
    if not side.is_ddp:
        side.note("one", 1)


@family()
def an_error_on_one_side(side: Side) -> None:
    if not side.is_ddp:
        raise ValueError("only here")
    side.note("both", 1)


@family()
def an_assertion_that_fails_on_both_sides(side: Side) -> None:
    raise AssertionError("not as it should be")


@family()
def an_error_that_was_not_foreseen(side: Side) -> None:
    raise ValueError("a mistake in the case")


@family()
def nothing_noted(side: Side) -> None:
    pass

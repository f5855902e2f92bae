"""Changes that a script makes itself to parameters which servers keep. Servers never learn of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from lightning_autosync.engine.replicas import bit_sum
from lightning_autosync.errors import PlanError

EVERY = 100
"""Steps between comparisons, so that these cost little."""


class OwnChanges:
    """Tells whether parameters changed between two exchanges with the servers.

    It compares after the start, after each barrier, and after each barrier's first step and every 100th one from there.

    Args:
        parameters: the parameters that servers keep, by name.
        mode: the plan's mode, for errors.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mode: str) -> None:
        self._parameters, self._mode = parameters, mode
        self._sums: dict[str, int] = {}
        self._steps = 0

    def met(self) -> None:
        """Note the parameters after the start or a barrier."""
        self._steps, self._sums = 0, self._current()

    def stepped(self) -> None:
        """Note the parameters after a step, if the next comparison is due."""
        self._sums = self._current() if self._steps % EVERY == 0 else {}
        self._steps += 1

    def check(self) -> None:
        """Compare before an exchange, if the parameters were noted after the last one.

        Raises:
            PlanError: a parameter has changed.
        """
        current = self._current() if self._sums else {}
        self.refuse(name for name, number in self._sums.items() if current[name] != number)

    def refuse(self, changed: Iterable[str]) -> None:
        """Raise an error if there is a changed parameter.

        Raises:
            PlanError: ``changed`` is not empty.
        """
        if first := min(changed, default=""):
            raise PlanError(
                f"model: parameter '{first}' was changed by other code than the optimizer's step. Under mode "
                f"'{self._mode}' servers keep the parameters, so changes that a script makes itself (weight clipping, "
                "projections, hooks after the step) would be lost. Allowed: change weights before fit(), or use a plan "
                "of mode 'partial_reduce' or 'periodic', or a synchronous plan without `served`"
            )

    def _current(self) -> dict[str, int]:
        return {name: int(bit_sum(parameter.detach())) for name, parameter in self._parameters.items()}

"""An optimizer's state on its way to a worker that comes back: its tensors as they are, and no pickle."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lightning_autosync.relaxed.server.wire import Packed, Unpacked, can_travel, pack, unpack


class Inheritance(NamedTuple):
    """The optimizer's state of a live worker, for one whose own optimizer is not known yet.

    A payload: `Inheritance.packed` of the one becomes `Inheritance.found` of the other.
    """

    donor: int
    state: Unpacked

    @classmethod
    def found(cls, donor: int, payload: memoryview) -> Inheritance | None:
        """What came from ``donor``; None if it had nothing to give."""
        state = unpack(payload)
        return cls(donor, state) if state.values else None

    def packed(self) -> Packed:
        """To be handed on as it came."""
        return pack(self.state.tensors, self.state.values)

    def give_to(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Let ``optimizer`` go on from here; hyperparameters stay its own.

        It keeps the state that it has, with a warning, if it is of another kind or if the donor's could not be sent.
        """
        values = self.state.values
        refused = values.get("refused", "")
        if values["kind"] != _kind(optimizer):
            refused = f"it is {values['kind']}, and this worker's is {_kind(optimizer)}"
        if refused:
            warnings.warn(
                f"a worker that came back begins with an optimizer of no history; that of rank {self.donor}: {refused}",
                stacklevel=2,
            )
            return
        places = {id(parameter): str(place) for place, parameter in enumerate(parameters)}
        states = _by_parameter(self.state)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        mine = {index: states.get(places.get(id(parameter), ""), {}) for index, parameter in enumerate(own)}
        # Torch's own loading puts each tensor in the device and type that the optimizer wants.
        optimizer.load_state_dict({"state": mine, "param_groups": optimizer.state_dict()["param_groups"]})


def pack_optimizer(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Packed:
    """Running averages, step counts and whatever else an optimizer keeps for these parameters; copies.

    If there is anything among it but tensors and numbers, the payload says that instead.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for place, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            key = f"{place}.{name}"
            if isinstance(value, Tensor) and can_travel(value):
                tensors[key] = value.detach().to("cpu", copy=True)
            elif value is None or isinstance(value, bool | int | float):
                numbers[key] = value
            else:
                what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                return pack({}, {"kind": _kind(optimizer), "refused": f"its '{name}' is {what}, which cannot be sent"})
    return pack(tensors, {"kind": _kind(optimizer), "numbers": numbers})


def _by_parameter(state: Unpacked) -> dict[str, dict[str, Any]]:
    """For each parameter's place what belongs to it, in memory of its own."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, tensor in state.tensors.items():
        place, _, name = key.partition(".")
        found[place][name] = tensor.clone()
    for key, number in state.values["numbers"].items():
        place, _, name = key.partition(".")
        found[place][name] = number
    return found


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"

"""Optimizers on servers: those that can run on slices of parameters, and their state in checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.plan.servers import Shard
from lightning_autosync.relaxed.server.shards import assign, elements

ELEMENTWISE: dict[str, type[Optimizer]] = {
    rule.__name__: rule
    for rule in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.ASGD,
        torch.optim.Rprop,
        torch.optim.SparseAdam,
    )
}
"""Optimizers whose update of an element depends on the gradient and state of that element only, by name."""

SPARSE = ("SGD", "Adagrad", "SparseAdam")
"""Elementwise optimizers that accept sparse gradients."""

_LOCAL = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Implementation settings for the worker's own device, which servers ignore."""

Hyperparameters = list[dict[str, Any]]
"""One mapping of plain values for each parameter group."""


@dataclass(frozen=True)
class OptimizerRule:
    """An elementwise torch optimizer as plain data.

    Attributes:
        name: name of its class in `torch.optim`.
        defaults: arguments of its constructor.
        groups: hyperparameters of each parameter group.
        members: index of the parameter group, by trained variable.
    """

    name: str
    defaults: dict[str, Any]
    groups: Hyperparameters
    members: dict[str, int]

    @classmethod
    def of(cls, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> OptimizerRule:
        """The rule of a worker's optimizer, given the names of its parameters.

        Raises:
            PlanError: it is not an elementwise optimizer of torch, or it has a parameter without a name.
        """
        name = type(optimizer).__name__
        if ELEMENTWISE.get(name) is not type(optimizer):
            raise PlanError(
                f"optimizer: {type(optimizer).__module__}.{name} cannot update slices of parameters; a parameter "
                f"server needs one of torch.optim's {', '.join(ELEMENTWISE)}"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise PlanError("optimizer: differentiable=True needs updates in this process, but servers make them")
        members = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise PlanError(
                        f"optimizer: param_groups[{number}] contains a parameter of shape {list(parameter.shape)} "
                        "that is not synchronized"
                    )
                members[names[parameter]] = number
        defaults = {key: _plain(value) for key, value in optimizer.defaults.items() if key not in _LOCAL}
        return cls(name, defaults, hyperparameters(optimizer), members)

    @property
    def adds_up(self) -> bool:
        """Whether steps by parts of a gradient move a parameter as far as one step by their sum: plain SGD."""
        return self.name == "SGD" and not any(group["momentum"] or group["weight_decay"] for group in self.groups)

    def build(self, parameters: Mapping[int, Iterable[nn.Parameter]]) -> Optimizer:
        """An optimizer over a server's slices, given by parameter group; groups may be empty."""
        rule = ELEMENTWISE[self.name]
        accepted = inspect.signature(rule).parameters
        arguments = {key: _value(value) for key, value in self.defaults.items() if key in accepted}
        groups = [
            {**{key: _value(value) for key, value in group.items()}, "params": list(parameters.get(number, ()))}
            for number, group in enumerate(self.groups)
        ]
        return rule(groups, **arguments)

    def check_sparse(self, variable: str) -> None:
        """Raise ``PlanError`` if the optimizer does not accept sparse gradients of ``variable``."""
        if variable not in self.members:
            return
        group = self.groups[self.members[variable]]
        if self.name not in SPARSE or group.get("momentum") or group.get("weight_decay"):
            raise PlanError(
                f"optimizer: {self.name} with momentum {group.get('momentum', 0)} and weight_decay "
                f"{group.get('weight_decay', 0)} does not accept the sparse gradients of '{variable}'; allowed: "
                f"{', '.join(SPARSE)} with neither, or kind 'row_sparse' with dense gradients"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OptimizerRule:
        if data["name"] not in ELEMENTWISE:
            raise PlanError(f"optimizer: '{data['name']}' is not one of {', '.join(ELEMENTWISE)}")
        return cls(data["name"], dict(data["defaults"]), list(data["groups"]), dict(data["members"]))


def hyperparameters(optimizer: Optimizer) -> Hyperparameters:
    """The current hyperparameters of the optimizer, which schedulers change between steps, as JSON values."""
    kept = [key for key in optimizer.defaults if key not in _LOCAL]
    return [{key: _plain(group[key]) for key in kept} for group in optimizer.param_groups]


def adopt(optimizer: Optimizer, values: Hyperparameters) -> None:
    """Set the hyperparameters of a server's optimizer to a worker's."""
    for group, given in zip(optimizer.param_groups, values, strict=True):
        group.update((key, _value(value)) for key, value in given.items())


def check_settings(values: Hyperparameters, known: Hyperparameters) -> None:
    """Check a worker's hyperparameters against those with which a server began.

    Raises:
        ExchangeError: the number of groups, a group's names, or the type of a value is another one.
    """
    if len(values) != len(known):
        raise ExchangeError(f"settings: got {len(values)} parameter groups; expected {len(known)}")
    for number, (given, group) in enumerate(zip(values, known, strict=True)):
        if given.keys() != group.keys():
            raise ExchangeError(f"settings[{number}]: got {sorted(given)}; expected {sorted(group)}")
        for key, value in given.items():
            if not _is_like(value, group[key]):
                raise ExchangeError(f"settings[{number}].{key}: {value!r} does not have the type of {group[key]!r}")


def _is_like(value: Any, known: Any) -> bool:
    """Whether a value is of the same kind; an integer may take the place of a float, and the other way round."""
    if isinstance(known, list | tuple):
        alike = isinstance(value, list | tuple) and len(value) == len(known)
        return alike and all(map(_is_like, value, known))
    if _is_number(known):
        return _is_number(value)
    return type(value) is type(known)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


StateKey = tuple[str, int, str]
"""Variable, first element of the piece, and name of the state."""

Whole = dict[str, dict[str, Tensor]]
"""State by variable and name: tensors of the variable's shape, or scalars."""


_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""State that torch's optimizers keep once per parameter. The shape does not show it: parameters may be scalars too."""


def join(pieces: Mapping[StateKey, Tensor], shards: Iterable[Shard], shapes: Mapping[str, torch.Size]) -> Whole:
    """Join the state of all pieces to that of whole variables."""
    by_piece: dict[tuple[str, int], dict[str, Tensor]] = {}
    for (variable, start, key), tensor in pieces.items():
        by_piece.setdefault((variable, start), {})[key] = tensor
    whole: Whole = {}
    for shard in shards:
        for piece in shard.pieces:
            variable = piece.variable
            for key, tensor in by_piece.get((variable, piece.start), {}).items():
                states = whole.setdefault(variable, {})
                if key in _SCALARS:
                    # All pieces count steps alike.
                    states[key] = tensor.clone()
                    continue
                if key not in states:
                    states[key] = torch.empty(shapes[variable], dtype=tensor.dtype)
                assign(states[key], shard.axis, piece, tensor.reshape(-1))
    return whole


def split(whole: Mapping[str, Mapping[str, Tensor]], shards: Iterable[Shard]) -> dict[StateKey, Tensor]:
    """Cut the state of whole variables into that of the pieces of ``shards``."""
    pieces = {}
    for shard in shards:
        for piece in shard.pieces:
            for key, tensor in whole.get(piece.variable, {}).items():
                part = elements(tensor, shard.axis, piece).reshape(-1) if key not in _SCALARS else tensor
                pieces[piece.variable, piece.start, key] = part
    return pieces


def check(whole: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, torch.Size]) -> None:
    """Raise ``PlanError`` if a state does not fit variables of these shapes."""
    for variable, states in whole.items():
        if variable not in shapes:
            raise PlanError(f"checkpoint: it has optimizer state of '{variable}', but the model has no such parameter")
        for key, tensor in states.items():
            if key not in _SCALARS and tensor.shape != shapes[variable]:
                raise PlanError(
                    f"checkpoint: optimizer state '{key}' of '{variable}' has shape {list(tensor.shape)}, but the "
                    f"parameter has {list(shapes[variable])}"
                )

"""Tensors of a model and state of an optimizer, in the form in which workers exchange them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.payload import Packed, Unpacked, can_travel, pack, unpack


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a worker's model. Buffers are looked up each time, because modules may replace them.

    Attributes:
        parameters: trainable parameters, which are averaged.
    """

    module: nn.Module
    parameters: tuple[Tensor, ...]

    @classmethod
    def of(cls, module: nn.Module) -> ModelTensors:
        """The tensors of a module; shared ones count once."""
        return cls(module, tuple(parameter for parameter in module.parameters() if parameter.requires_grad))

    @property
    def frozen(self) -> tuple[Tensor, ...]:
        """Floating-point or complex parameters that are not trained. Code may change them in place, as a moving average
        of trained ones; those that differ between workers are averaged at barriers.
        """
        trained = set(self.parameters)
        others = (parameter for parameter in self.module.parameters() if parameter not in trained)
        return tuple(parameter for parameter in others if has_mean(parameter) and can_travel(parameter))

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Persistent floating-point or complex buffers, which are averaged at barriers; counters have no average."""
        return tuple(buffer for buffer in persistent_buffers(self.module).values() if has_mean(buffer))

    @property
    def all(self) -> tuple[Tensor, ...]:
        """All parameters and persistent buffers, frozen ones and counters included; a starting worker copies them."""
        return (*self.module.parameters(), *persistent_buffers(self.module).values())


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The current persistent buffers, by their first persistent name, even if ``state_dict()`` is without them."""
    modules = dict(module.named_modules(remove_duplicate=False))
    names: dict[Tensor, str] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        path, _, own = name.rpartition(".")
        if own not in modules[path]._non_persistent_buffers_set:
            names.setdefault(buffer, name)
    return {name: buffer for buffer, name in names.items()}


class UntrainedTensors(Mapping[str, Tensor]):
    """Persistent buffers and frozen parameters, by name. Buffers are looked up at each access, because modules may
    replace them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        named = module.named_parameters()
        self._frozen = {name: one for name, one in named if not one.requires_grad and can_travel(one)}
        self._names = (*persistent_buffers(module), *self._frozen)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._frozen[name] if name in self._frozen else self._module.get_buffer(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class FlatView:
    """Packs tensors into one flat CPU buffer, in float32 (float64 if one of them has it), and unpacks them.

    Args:
        tensors: the tensors. For a tensor that this worker lacks, its number of elements, which are packed as zeros.
    """

    def __init__(self, tensors: Sequence[Tensor | int]) -> None:
        self._tensors = [tensor if isinstance(tensor, int) else _real(tensor) for tensor in tensors]
        self.sizes = [tensor if isinstance(tensor, int) else tensor.numel() for tensor in self._tensors]
        self.dtype = flat_type(tensor for tensor in self._tensors if isinstance(tensor, Tensor))

    def pack(self) -> Tensor:
        """A new flat copy, [elements]."""
        flat = torch.empty(sum(self.sizes), dtype=self.dtype, device="cpu")
        for tensor, part in zip(self._tensors, flat.split(self.sizes), strict=True):
            if isinstance(tensor, int):
                part.zero_()
            else:
                part.copy_(tensor.reshape(-1))
        return flat

    def unpack(self, flat: Tensor) -> None:
        """Copy ``flat``, [elements], into the tensors."""
        for tensor, part in zip(self._tensors, flat.split(self.sizes), strict=True):
            if isinstance(tensor, Tensor):
                tensor.copy_(part.view(tensor.shape))


def flat_type(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype in which tensors are exchanged. It is never half precision, which would round the sums."""
    double = (torch.float64, torch.complex128)
    return torch.float64 if any(tensor.dtype in double for tensor in tensors) else torch.float32


def optimizer_averages(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[str]:
    """Sorted names of an optimizer's running averages (momentum, second moments).

    These are the floating-point or complex tensors in a parameter's state that have its shape.
    """
    names: set[str] = set()
    for parameter in parameters:
        names.update(
            name for name, value in optimizer.state.get(parameter, {}).items() if _is_average(name, value, parameter)
        )
    return sorted(names)


def optimizer_slots(optimizer: Optimizer, parameters: Sequence[Tensor], averages: Sequence[str]) -> list[Tensor | int]:
    """An optimizer's running averages with these names, in the same order on all workers.

    A parameter that has had no gradient on this worker has no averages; its number of elements takes their place.
    """
    slots: list[Tensor | int] = []
    for name in averages:
        for parameter in parameters:
            value = optimizer.state.get(parameter, {}).get(name)
            elements = _real(parameter).numel()
            slots.append(value if _is_average(name, value, parameter) else elements)
    return slots


def model_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies of tensors on the CPU."""
    return [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]


def take_bytes(tensors: Sequence[Tensor], payload: memoryview, donor: int) -> None:
    """Load the values that :func:`model_bytes` packed on rank ``donor`` into ``tensors``.

    Raises:
        ExchangeError: the donor's model has another size.
    """
    expected = sum(tensor.nbytes for tensor in tensors)
    if payload.nbytes != expected:
        raise ExchangeError(
            f"rank {donor} sent a model of {payload.nbytes} bytes, but this rank's has {expected}: all workers must "
            "train the same model"
        )
    offset = 0
    for tensor in tensors:
        part = payload[offset : offset + tensor.nbytes]
        offset += tensor.nbytes
        if part.nbytes:
            values = torch.frombuffer(bytearray(part), dtype=torch.uint8).view(tensor.dtype)
            tensor.detach().copy_(values.view(tensor.shape))


def _real(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


def _is_average(name: str, value: object, parameter: Tensor) -> bool:
    return name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape and has_mean(value)


def has_mean(tensor: Tensor) -> bool:
    """Whether a tensor can be averaged: it is floating-point or complex."""
    return tensor.is_floating_point() or tensor.dtype in (torch.complex64, torch.complex128)


class DonatedOptimizer(NamedTuple):
    """The state of a live worker's optimizer, which a returning worker keeps until its own optimizer is known.

    `packed` makes a payload, from which `found` restores the state.
    """

    donor: int
    state: Unpacked

    @classmethod
    def found(cls, donor: int, payload: memoryview) -> DonatedOptimizer | None:
        """The state in a payload from rank ``donor``; None if it is empty."""
        state = unpack(payload)
        return cls(donor, state) if state.values else None

    def packed(self) -> Packed:
        """The state as a payload."""
        return pack(self.state.tensors, self.state.values)

    def give_to(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Load the state into ``optimizer``, which keeps its own hyperparameters.

        If ``optimizer`` is of another class, or the donor could not send its state, this only warns.
        """
        values = self.state.values
        refused = values.get("refused", "")
        if values["kind"] != _kind(optimizer):
            refused = f"it is {values['kind']}, but this worker's is {_kind(optimizer)}"
        if refused:
            warnings.warn(
                f"this worker rejoined without optimizer state, because it cannot use that of rank {self.donor}: "
                f"{refused}",
                stacklevel=2,
            )
            return
        places = {id(parameter): str(place) for place, parameter in enumerate(parameters)}
        states = _by_parameter(self.state)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        mine = {index: states.get(places.get(id(parameter), ""), {}) for index, parameter in enumerate(own)}
        # `load_state_dict` moves each tensor to the device and dtype that the optimizer needs.
        optimizer.load_state_dict({"state": mine, "param_groups": optimizer.state_dict()["param_groups"]})


def pack_optimizer(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Packed:
    """A copy of the optimizer's state of these parameters (running averages, step counts), as a payload.

    If the state has anything other than tensors and numbers, the payload has the reason of the refusal instead.
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
    """Copies of the state by parameter, whose key is its position as a string."""
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

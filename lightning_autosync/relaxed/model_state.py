"""A model's tensors and an optimizer's state as workers exchange them."""

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
    """What a worker's model consists of. Buffers are looked up each time, for modules may replace theirs.

    Attributes:
        module: the model.
        parameters: trained ones, which are averaged.
    """

    module: nn.Module
    parameters: tuple[Tensor, ...]

    @classmethod
    def of(cls, module: nn.Module) -> ModelTensors:
        """The tensors of a module; one that appears twice counts once."""
        return cls(module, tuple(parameter for parameter in module.parameters() if parameter.requires_grad))

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Floating-point buffers of checkpoints, which are averaged at barriers; counters have no average."""
        kept = persistent_buffers(self.module).values()
        return tuple(buffer for buffer in kept if buffer.is_floating_point() or buffer.is_complex())

    @property
    def all(self) -> tuple[Tensor, ...]:
        """Parameters and buffers, frozen ones and counters too, which a worker takes over when it starts."""
        return (*self.module.parameters(), *persistent_buffers(self.module).values())


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of checkpoints as they are now, by their first name."""
    parameters = {id(parameter) for parameter in module.parameters()}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in parameters:
            found.setdefault(id(value), (name, value))
    return dict(found.values())


class PersistentBuffers(Mapping[str, Tensor]):
    """`persistent_buffers` looked up at each access, since modules may replace buffers; the names stay."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        kept = persistent_buffers(module)
        self._names = tuple(name for name, _ in module.named_buffers() if name in kept)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._module.get_buffer(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class FlatView:
    """Tensors side by side in one flat buffer in main memory, in single precision (double, if one of them is).

    Args:
        tensors: what to pack; in place of one that is missing on this worker, a number of elements, packed as zeros.
    """

    def __init__(self, tensors: Sequence[Tensor | int]) -> None:
        self._tensors = [tensor if isinstance(tensor, int) else _real(tensor) for tensor in tensors]
        self.sizes = [tensor if isinstance(tensor, int) else tensor.numel() for tensor in self._tensors]
        self.dtype = flat_type(tensor for tensor in self._tensors if isinstance(tensor, Tensor))

    def pack(self) -> Tensor:
        """A fresh flat copy, [elements]."""
        flat = torch.empty(sum(self.sizes), dtype=self.dtype)
        for tensor, part in zip(self._tensors, flat.split(self.sizes), strict=True):
            if isinstance(tensor, int):
                part.zero_()
            else:
                part.copy_(tensor.reshape(-1))
        return flat

    def unpack(self, flat: Tensor) -> None:
        """Give the tensors the values of ``flat``, [elements]."""
        for tensor, part in zip(self._tensors, flat.split(self.sizes), strict=True):
            if isinstance(tensor, Tensor):
                tensor.copy_(part.view(tensor.shape))


def flat_type(tensors: Iterable[Tensor]) -> torch.dtype:
    """The type in which tensors are exchanged: half precision would round the sums."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def optimizer_averages(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[str]:
    """Names of an optimizer's running averages (momentum, second moments), ascending.

    They are the floating-point tensors of a parameter's state that have its shape.
    """
    names: set[str] = set()
    for parameter in parameters:
        names.update(
            name for name, value in optimizer.state.get(parameter, {}).items() if _is_average(name, value, parameter)
        )
    return sorted(names)


def optimizer_slots(optimizer: Optimizer, parameters: Sequence[Tensor], averages: Sequence[str]) -> list[Tensor | int]:
    """An optimizer's running averages of these names, in an order that is the same on all workers.

    A parameter that has not had a gradient here has none yet; its number of elements stands in.
    """
    slots: list[Tensor | int] = []
    for name in averages:
        for parameter in parameters:
            value = optimizer.state.get(parameter, {}).get(name)
            elements = _real(parameter).numel()
            slots.append(value if _is_average(name, value, parameter) else elements)
    return slots


def model_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies of tensors in main memory."""
    return [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]


def take_bytes(tensors: Sequence[Tensor], payload: memoryview, donor: int) -> None:
    """Give tensors the values that :func:`model_bytes` had on ``donor``.

    Raises:
        ExchangeError: the model there has another size.
    """
    expected = sum(tensor.nbytes for tensor in tensors)
    if payload.nbytes != expected:
        raise ExchangeError(
            f"rank {donor} sent a model of {payload.nbytes} bytes, and the one here has {expected}: "
            "all workers must train the same model"
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
    return (
        name != "step"
        and isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dtype.is_floating_point
    )


class DonatedOptimizer(NamedTuple):
    """The optimizer's state of a live worker, kept for a worker that came back until its own optimizer is known.

    A payload: `DonatedOptimizer.packed` of the one becomes `DonatedOptimizer.found` of the other.
    """

    donor: int
    state: Unpacked

    @classmethod
    def found(cls, donor: int, payload: memoryview) -> DonatedOptimizer | None:
        """The state in a payload from ``donor``; None if it is empty."""
        state = unpack(payload)
        return cls(donor, state) if state.values else None

    def packed(self) -> Packed:
        """The state as a payload again."""
        return pack(self.state.tensors, self.state.values)

    def give_to(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Load the state into ``optimizer``, which keeps its own hyperparameters.

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
    """By the place of each parameter, its part of the state, in memory of its own."""
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

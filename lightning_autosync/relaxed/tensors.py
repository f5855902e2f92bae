"""A model's tensors as workers exchange them: flat, in one type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.errors import ExchangeError


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
    """As `persistent_buffers`, always those that the module has now; the names stay."""

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
    """Copies of tensors in main memory, fit to be sent as they are."""
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

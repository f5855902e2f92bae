"""Small collectives over a process group: JSON values of all ranks or of rank 0, tensors and buffers of rank 0."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.engine.held import HeldTensors
from lightning_autosync.errors import ExchangeError, OpeningError, PlanError
from lightning_autosync.workload import shared_buffers

_Form = tuple[str, list[int], str]
"""Name, shape and dtype of a buffer."""
CHUNK = 256 * 1024 * 1024
"""Approximate bytes per broadcast."""
OWN_GROUP = "autosync"
"""Description of process groups that only this package uses, also on other threads."""
_BLOCK, _HEADER = 4096, 8
"""Bytes of JSON that travel at once, and of the number in front that tells how many there are in all."""

_MISSING = re.compile(r"wait timeout .*/(\d+)$")
"""gloo's error if a rank does not join a group; its last number is that rank."""
_separate: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The groups of `separate_group`, by default group."""

# torch 2.13 renamed these functions.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group's collectives need their tensors."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    # Of the calling thread, the current device may be another one: that of each new thread is the first.
    bound: torch.device | None = getattr(group or dist.group.WORLD, "bound_device_id", None)
    return bound or torch.device("cuda", torch.cuda.current_device())


def new_group(
    timeout: timedelta, ranks: Sequence[int] | None = None, description: str | None = None
) -> dist.ProcessGroup:
    """Make a process group, as `torch.distributed.new_group` does; collective over all ranks.

    Args:
        timeout: how long ranks wait for each other.
        ranks: its ranks; None is all.
        description: what to call it.

    Raises:
        ExchangeError: a rank did not come in time, or the connection to the job's store broke; it names the rank.
    """
    try:
        return dist.new_group(None if ranks is None else list(ranks), timeout, group_desc=description)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        missing = _MISSING.search(str(error))
        if missing is None:
            fault = "the connection to the job's store, on the host of rank 0, broke"
        else:
            place = int(missing[1])
            fault = f"rank {ranks[place] if ranks is not None and place < len(ranks) else place} did not come in time"
        raise ExchangeError(f"a process group could not be made: {fault} ({error})") from None


def separate_group(timeout: float) -> dist.ProcessGroup:
    """All ranks, for operations that ranks make at different places between those of the default group; collective.

    Later calls, also of other trainings in this process, return the same group.

    Args:
        timeout: seconds to wait for other ranks.
    """
    assert dist.group.WORLD is not None
    if dist.group.WORLD not in _separate:
        _separate[dist.group.WORLD] = new_group(timedelta(seconds=timeout), description=OWN_GROUP)
    return _separate[dist.group.WORLD]


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``, in rank order; values are plain JSON data of any size. Collective.

    All ranks send theirs to the first one, which sends all of them back. Where hosts are distant, gloo's all-gather
    takes several times as long, because it goes around all ranks.
    """
    payload, size = json.dumps(value).encode(), _BLOCK
    while True:
        found = [_content(block) for block in _gather_blocks(_block(payload, size, group_device(group)), group)]
        longest = max((length for length, _ in found), default=0)
        values = longest if longest > size else [json.loads(content) for _, content in found]
        values = broadcast_json(values, group)
        if isinstance(values, list):
            return values
        size = values


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The ``value`` of the group's first rank, on all ranks; plain JSON data of any size. Collective."""
    payload = json.dumps(value).encode() if dist.get_rank(group) == 0 else b""
    block = _block(payload, _BLOCK, group_device(group))
    broadcast_tensors([block], group)
    length, content = _content(block)
    if length > _BLOCK:
        rest = torch.zeros(length - _BLOCK, dtype=torch.uint8, device=block.device)
        if payload:
            rest.copy_(torch.frombuffer(bytearray(payload[_BLOCK:]), dtype=torch.uint8))
        broadcast_tensors([rest], group)
        content += rest.cpu().numpy().tobytes()
    return json.loads(content)


def _block(payload: bytes, size: int, device: torch.device) -> Tensor:
    """The length of a payload and its first ``size`` bytes: [_HEADER + size] bytes, whatever its length."""
    content = len(payload).to_bytes(_HEADER, "little") + payload[:size].ljust(size, b"\0")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _content(block: Tensor) -> tuple[int, bytes]:
    """The length of a payload, and as much of it as its block has."""
    content = block.cpu().numpy().tobytes()
    length = int.from_bytes(content[:_HEADER], "little")
    return length, content[_HEADER : _HEADER + length]


def _gather_blocks(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The blocks of all ranks on the first one; no blocks on the others."""
    blocks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))] if dist.get_rank(group) == 0 else []
    dist.gather(own, blocks or None, dst=_first_of(group), group=group)
    return blocks


def _first_of(group: dist.ProcessGroup | None) -> int:
    """The number in the job of the group's first rank."""
    return dist.get_global_rank(group, 0) if group is not None else 0


def require_success(fault: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank if some rank has a fault; collective, and over on no rank before all ranks have begun it.

    Raises:
        OpeningError: the fault of the first rank that has one.
    """
    for rank, other in enumerate(gather_json(fault, group)):
        if other:
            raise OpeningError(f"rank {rank}: {other}")


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite ``tensors`` of any dtypes with those of the group's first rank; collective.

    Shapes, dtypes and order must be the same on all ranks.
    """
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in chunk])
        dist.broadcast(flat, src=_first_of(group), group=group)
        if dist.get_rank(group) != 0:
            _scatter(flat, chunk)


class BufferBroadcast:
    """Broadcasts the buffers of rank 0, as DDP does: before the first forward pass after a synchronized one.

    Between broadcasts, buffers such as running statistics may differ between ranks. Rank 0 also sends whether its
    buffers still have the names, shapes and dtypes that the ranks agreed on: a broadcast of tensors of different sizes
    would mix them up or abort the process. A model that starts without buffers is not checked.

    Args:
        module: a module whose buffers have the same names, shapes and dtypes on all ranks (see
            `lightning_autosync.engine.replicas.require_equal_structures`).
        group: the ranks; None is the default group.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._module = module
        self._group = group
        self._due = True
        self._held = HeldTensors(module, "_buffers")
        self._buffers = list(shared_buffers(module))
        self._agreed = _forms(self._buffers)

    @property
    def due(self) -> bool:
        """Whether the next forward pass begins with a broadcast."""
        return self._due and (bool(self._agreed) or bool(self._present()))

    def before_forward(self, synchronizes: bool) -> None:
        """Call before each forward pass, of training and evaluation alike.

        Args:
            synchronizes: whether a synchronized backward pass may follow.

        Raises:
            PlanError: on some ranks only, buffers were added or removed, or changed their shape or dtype.
        """
        if self._due:
            # `data` hides the write from autograd's version check. That is safe: a graph that saved running statistics
            # never reads them in training mode.
            self._follow([(name, buffer.data) for name, buffer in self._present()])
        self._due = synchronizes

    def _present(self) -> list[tuple[str, Tensor]]:
        """The buffers, which modules may replace or add; the module is only searched if one did."""
        if not self._held.follows_all or not self._held.same():
            self._held.remember()
            self._buffers = list(shared_buffers(self._module))
        return self._buffers

    def _follow(self, found: list[tuple[str, Tensor]]) -> None:
        forms, tensors = _forms(found), [tensor for _, tensor in found]
        # Reading the note on an accelerator would block until the broadcast is done, so buffers there are not checked.
        if self._agreed and all(tensor.device.type == "cpu" for tensor in tensors):
            changed = forms != self._agreed
            note = torch.tensor([changed], dtype=torch.int64, device="cpu")
            # A rank whose buffers changed takes part with tensors of the agreed shapes: the sizes must match.
            broadcast_tensors([note, *(map(_empty, self._agreed) if changed else tensors)], self._group)
            if not changed and not note:
                return
            own = {dist.get_rank(self._group): forms, 0: self._agreed}
            _refuse_differences(dict(enumerate(gather_json(forms, self._group))) if note else own)
        self._agreed = forms
        broadcast_tensors(tensors, self._group)


def _forms(buffers: Iterable[tuple[str, Tensor]]) -> list[_Form]:
    return [(name, [*buffer.shape], str(buffer.dtype)) for name, buffer in buffers]


def _empty(form: _Form) -> Tensor:
    """A tensor of a buffer's shape and dtype, to broadcast in its place."""
    _, shape, dtype = form
    return torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="cpu")


def _refuse_differences(forms: Mapping[int, Sequence[_Form]]) -> None:
    """Raise if buffers differ between ranks; ``forms`` maps ranks, rank 0 among them, to the forms of their buffers."""
    first = {name: rest for name, *rest in forms[0]}
    for rank, theirs in forms.items():
        own = {name: rest for name, *rest in theirs}
        for name in [*first, *own]:
            if own.get(name) != first.get(name):
                said = " and ".join(
                    f"{_describe(one.get(name))} on rank {who}" for who, one in ((rank, own), (0, first))
                )
                raise PlanError(
                    f"model: buffer '{name}' is {said}. Buffers are broadcast before forward passes and must match: "
                    "change the model at the same step on all ranks, or set broadcast_buffers=False"
                )


def _describe(form: Sequence[Any] | None) -> str:
    return "missing" if form is None else f"{form[1]} of shape {form[0]}"


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Chunks of tensors of one device; dtypes with large items come first, so that each part is aligned."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        chunk: list[Tensor] = []
        size = 0
        for tensor in sorted(members, key=lambda member: -member.element_size()):
            chunk.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= CHUNK:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    with torch.no_grad():
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

"""Checks that replicas are equal: comparisons of weights, and changes of the set of parameters."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_autosync.documents import digest
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.gradients import real_view
from lightning_autosync.engine.held import HeldTensors
from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.workload import shared_buffers, shared_parameters

Facts = dict[str, dict[str, Any]]
"""Properties that must be equal on all ranks, by parameter name."""

_WIDTH = 1024
"""Columns of the grid in which the bits of a tensor are summed."""
_NAMED = 5
"""Largest number of parameters that an error names."""
_FROZEN_EVERY = 10
"""Frozen parameters are compared in one check of so many."""
_ROUNDING = 8
"""Largest mean difference by rounding, per pass, in units of the precision in which optimizers compute.

Ranks have the same gradients, so that only their optimizers' own rounding parts them. It does not grow by itself.
"""
_FLIPS = 4
"""Elements of low precision that rounding may move to the next value at any time; it seldom moves any."""
_NONE: Mapping[str, Tensor] = MappingProxyType({})
_FORM = operator.attrgetter("shape", "dtype")
_DTYPE = operator.attrgetter("dtype")
_FORM_EVERY = 32
"""`ParameterTracker.changed` compares shapes, which rarely change, once per so many calls."""


class ReplicaCheck:
    """Compares the weights of all ranks at regular intervals; collective.

    A check reads each weight twice and sends 16 bytes per parameter. It warns about weights that differ by rounding
    only, as they may on different types of processors. Larger differences are an error.

    Args:
        every: synchronized backward passes between checks; 0 checks only when `run` is called.
        group: the ranks; None is the default group.
    """

    def __init__(self, every: int, group: dist.ProcessGroup | None = None) -> None:
        self._every = every
        self._group = group
        self._passes = 0
        self._equal_after: dict[str, int] = {}
        self._alike_after: dict[str, int] = {}
        self._warned: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next call of `count` checks the weights."""
        return self._every > 0 and self._passes > 0 and self._passes % self._every == 0

    def count(self, parameters: Mapping[str, Tensor], frozen: Mapping[str, Tensor] = _NONE) -> None:
        """Count a synchronized backward pass, before the optimizer's step, and check the weights if a check is due.

        Args:
            parameters: parameters by name; the same names on all ranks.
            frozen: parameters to check only in the first check and in each tenth one after it, because reading large
                tables takes long where a step touches a few of their rows.

        Raises:
            ExchangeError: weights differ (raised on every rank).
        """
        if self.is_due:
            rare = self._passes // self._every % _FROZEN_EVERY == 1
            self.run({**parameters, **frozen} if rare else parameters)
        self._passes += 1

    def run(self, parameters: Mapping[str, Tensor]) -> None:
        """Check the weights now.

        Raises:
            ExchangeError: weights differ (raised on every rank); the error names parameters, ranks and passes.
        """
        if not parameters:
            return
        sums = torch.stack([bit_sum(parameter.detach()) for parameter in parameters.values()])
        # The maximum of the negated sums is the negated minimum, so one all-reduce gives both.
        extremes = torch.cat([sums, -sums])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        largest, smallest = extremes[: len(sums)], -extremes[len(sums) :]
        places = (largest != smallest).nonzero().view(-1).tolist()
        names = list(parameters)
        suspects = {names[place]: parameters[names[place]].detach() for place in places}
        if suspects:
            self._report(suspects)
        self._alike_after.update(dict.fromkeys(names, self._passes))
        self._equal_after.update((name, self._passes) for name in names if name not in suspects)

    def _report(self, suspects: Mapping[str, Tensor]) -> None:
        """Raise or warn about parameters whose bits differ between ranks."""
        self._refuse_forms(suspects)
        gaps = gather_json([_gap(tensor, self._group) for tensor in suspects.values()], self._group)
        limits = [
            _limits(tensor.dtype, self._passes - self._equal_after.get(name, 0)) for name, tensor in suspects.items()
        ]
        found = {
            name: [rank for rank, theirs in enumerate(gaps) if _is_beyond(theirs[place], limits[place])]
            for place, name in enumerate(suspects)
        }
        found = {name: ranks for name, ranks in found.items() if ranks}
        if not found:
            self._warn(suspects, max(largest for theirs in gaps for largest, _ in theirs))
            return
        ranks, others = self._deviating([suspects[name] for name in found])
        far = {rank for theirs in found.values() for rank in theirs}
        if others == 0:
            ranks = [rank for rank in ranks if rank in far]  # other ranks differ by rounding only
        *ranks, others = self._in_job(*ranks, others)
        raise ExchangeError(
            f"replicas differ: the weights of {_listed(found)} on rank {', '.join(map(str, ranks))} differ from those "
            f"on rank {others}. They were {self._last_alike(found)} synchronized backward passes and differ after "
            f"{self._passes}. Something changed weights, gradients or an optimizer on some ranks only; "
            "check_replicas=0 turns this check off"
        )

    def _refuse_forms(self, suspects: Mapping[str, Tensor]) -> None:
        """Raise if parameters differ in shape or dtype, because ranks could then not exchange them."""
        own = [f"{tensor.dtype} of shape {list(tensor.shape)}" for tensor in suspects.values()]
        forms = gather_json(own, self._group)
        for place, name in enumerate(suspects):
            for rank, theirs in enumerate(forms):
                if theirs[place] != forms[0][place]:
                    odd, first = self._in_job(rank, 0)
                    raise ExchangeError(
                        f"replicas differ: parameter '{name}' is {theirs[place]} on rank {odd} and {forms[0][place]} "
                        f"on rank {first} after {self._passes} synchronized backward passes; convert the model on all "
                        "ranks alike"
                    )

    def _warn(self, suspects: Mapping[str, Tensor], gap: float) -> None:
        """Warn of weights that differ by rounding, and again each time that the largest difference has doubled."""
        if self._warned is not None and gap <= 2 * self._warned:
            return
        self._warned = gap
        ranks, others = self._deviating(list(suspects.values()))
        *ranks, others = self._in_job(*ranks, others)
        since = min(self._equal_after.get(name, 0) for name in suspects)
        rank_zero_warn(
            f"AutoSync: the weights of {len(suspects)} parameters differ between ranks by rounding errors, as on "
            f"different kinds of processors: {_listed(suspects)} on rank {', '.join(map(str, ranks))} and rank "
            f"{others} differ by at most {gap:.1g} of the largest weight. They were equal after {since} synchronized "
            f"backward passes and differ after {self._passes}. The next warning comes when the difference has doubled"
        )

    def _last_alike(self, names: Iterable[str]) -> str:
        """Up to when parameters were known to be alike, as part of a sentence."""
        equal, alike = (min(after.get(name, 0) for name in names) for after in (self._equal_after, self._alike_after))
        return f"equal after {equal}" if alike == equal else f"equal up to rounding after {alike}"

    def _in_job(self, *ranks: int) -> list[int]:
        """The numbers in the job of the group's ranks."""
        group = self._group
        return list(ranks) if group is None else [dist.get_global_rank(group, rank) for rank in ranks]

    def _deviating(self, tensors: Sequence[Tensor]) -> tuple[list[int], int]:
        """The ranks of the group whose weights differ from the majority's, and the first rank of the majority.

        Among sets of ranks of equal size, the set with the lowest rank counts as the majority.
        """
        sums = [tuple(theirs) for theirs in gather_json([int(bit_sum(tensor)) for tensor in tensors], self._group)]
        common = max(sums, key=sums.count)  # `max` returns the first of equally frequent sums
        return [rank for rank, theirs in enumerate(sums) if theirs != common], sums.index(common)


def warn_of_shortened(names: Iterable[str]) -> None:
    """Warn of tables with ``max_norm``, whose weights are not compared."""
    if first := min(names, default=""):
        rank_zero_warn(
            f"AutoSync: '{first}' is an embedding with max_norm: each rank rescales the rows that it reads, so "
            "replicas differ, as with DDP. The weights of such embeddings are not compared"
        )


def bit_sum(tensor: Tensor) -> Tensor:
    """A number that depends on the bits and the position of each element.

    Positions enter by row and column of a grid, so no temporary tensor of the size of ``tensor`` is needed.
    """
    real = real_view(tensor)
    bits = real.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]).reshape(-1)
    whole = bits.numel() // _WIDTH * _WIDTH
    grid, rest = bits[:whole].view(-1, _WIDTH), bits[whole:].long()
    rows, columns = grid.sum(1, dtype=torch.int64), grid.sum(0, dtype=torch.int64)
    total: Tensor = sum((part * _places(part)).sum() for part in (rows, columns, rest))  # type: ignore[assignment]
    return total


def _places(part: Tensor) -> Tensor:
    """A weight for each position. Odd weights lose no bit, and sums that overflow do so equally on all ranks."""
    return torch.arange(len(part), device=part.device) * 2654435762 + 1


def _gap(tensor: Tensor, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """The largest and the mean difference from the tensor of the group's first rank.

    They are relative to that tensor's largest and mean absolute element. The mean leaves out as much as `_FLIPS`
    elements can contribute, which would be much in a small tensor.
    """
    own = real_view(tensor).contiguous()
    eps = torch.finfo(own.dtype).eps if own.is_floating_point() else 0.0
    first = own.clone()
    # As bytes, because backends lack some types that frozen weights may have.
    source = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast(first.view(-1).view(torch.uint8), src=source, group=group)
    own, first = own.double(), first.double()
    distance = torch.where((own == first) | (own.isnan() & first.isnan()), 0.0, (own - first).abs())
    distance, scale = distance.nan_to_num(math.inf), first.abs().nan_to_num(0.0, posinf=0.0)
    largest, total = float(scale.max()), float(scale.sum())
    excess = max(0.0, float(distance.sum()) - _FLIPS * eps * largest)
    # JSON has no infinity.
    return min(float(distance.max()) / max(largest, 1e-30), 1e30), min(excess / max(total, 1e-30), 1e30)


def _limits(dtype: torch.dtype, passes: int) -> tuple[float, float]:
    """The largest and the mean difference that rounding may make in so many passes; see `_gap`."""
    real = dtype.to_real()
    if not real.is_floating_point:
        return 0.0, 0.0
    # Weights of lower precision are the rounded results of single precision, which differ more rarely, not by less.
    precision = min(torch.finfo(real).eps, torch.finfo(torch.float32).eps)
    return math.sqrt(torch.finfo(real).eps), _ROUNDING * precision * max(passes, 1)


def _is_beyond(gap: Sequence[float], limit: Sequence[float]) -> bool:
    return not (gap[0] <= limit[0] and gap[1] <= limit[1])


def _listed(names: Iterable[str]) -> str:
    given = list(names)
    more = f" and {len(given) - _NAMED} more" if len(given) > _NAMED else ""
    return ", ".join(f"'{name}'" for name in given[:_NAMED]) + more


class ParameterTracker:
    """Remembers the parameters of a module and detects changes.

    `changed` runs in every step and takes about ten microseconds for a hundred parameters: it compares remembered
    entries of the modules' dictionaries. It compares shapes, which autograd does not let change, only once in a while.

    Args:
        module: the module whose parameters are tracked, in all submodules, except those that DDP is told to ignore.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._accepted: dict[str, nn.Parameter] = {}
        self._replacements: dict[str, int] = {}
        self._looks = 0
        self._digests: dict[Hashable, int] = {}
        self._held = HeldTensors(module, "_parameters")  # TorchScript modules, which it leaves out, cannot change
        self.accept()

    def changed(self) -> bool:
        """Whether parameters were added, removed, replaced, frozen or unfrozen, or changed their shape or dtype."""
        if self._same():
            return False
        found = dict(shared_parameters(self._module))
        alike = (
            self._identical(found)
            and _trainable(self._parameters) == self._trainable
            and list(map(_FORM, self._parameters)) == self._forms
        )
        if alike:
            self._remember_places()  # only submodules without parameters were added or removed
            return False
        return True

    def replaced(self) -> list[str]:
        """Names of the parameters that were added, removed or replaced."""
        found = dict(shared_parameters(self._module))
        names = [*self._accepted, *(name for name in found if name not in self._accepted)]
        return [name for name in names if found.get(name) is not self._accepted.get(name)]

    def reformed(self) -> list[str]:
        """Names of the parameters that changed their shape or dtype."""
        forms = dict(zip(map(id, self._parameters), self._forms, strict=True))
        return [name for name, parameter in self._accepted.items() if _FORM(parameter) != forms[id(parameter)]]

    def accept(self) -> None:
        """Take the current parameters as the reference for later comparisons."""
        found = dict(shared_parameters(self._module))
        if not self._identical(found):
            for name in self.replaced():
                self._replacements[name] = self._replacements.get(name, -1) + 1
            self._digests.clear()
        self._accepted = found
        self._remember_places()

    def facts(self) -> Facts:
        """Properties of the current parameters, as plain data."""
        replaced = set(self.replaced())
        return {
            name: {
                "shape": list(parameter.shape),
                "dtype": str(parameter.dtype),
                "strides": list(parameter.stride()),
                "requires_grad": parameter.requires_grad,
                "replacements": self._replacements.get(name, -1) + (name in replaced),
            }
            for name, parameter in shared_parameters(self._module)
        }

    def digest(self) -> int:
        """A 63-bit digest of `facts`."""
        found = dict(shared_parameters(self._module))
        if not self._identical(found):
            return _digest(self.facts())
        # Cached, because a script that freezes parameters in turn returns to the same few combinations.
        state = tuple((parameter.requires_grad, *_FORM(parameter)) for parameter in found.values())
        if state not in self._digests:
            self._digests[state] = _digest(self.facts())
        return self._digests[state]

    def _same(self) -> bool:
        """Whether nothing has changed since `accept`. `map` keeps these loops out of the interpreter."""
        self._looks += 1
        return (
            self._held.same()
            and _trainable(self._parameters) == self._trainable
            and list(map(_DTYPE, self._parameters)) == self._dtypes
            and (self._looks % _FORM_EVERY != 0 or list(map(_FORM, self._parameters)) == self._forms)
        )

    def _identical(self, found: dict[str, nn.Parameter]) -> bool:
        return found.keys() == self._accepted.keys() and all(
            found[name] is parameter for name, parameter in self._accepted.items()
        )

    def _remember_places(self) -> None:
        self._held.remember()
        self._parameters = [parameter for _, parameter in shared_parameters(self._module)]
        self._trainable = _trainable(self._parameters)
        self._dtypes = list(map(_DTYPE, self._parameters))
        self._forms = list(map(_FORM, self._parameters))


def require_equal_structures(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compare names, shapes, dtypes, ``requires_grad`` and strides of parameters and buffers over ranks; collective.

    Strides count because gradients are sent in memory order.

    Raises:
        PlanError: (on every rank) ranks have different ones; names the first.
    """
    own = _structure(shared_parameters(module), strides=True), _structure(shared_buffers(module), strides=False)
    if len(set(gather_json(digest([list(facts.items()) for facts in own]), group))) == 1:
        return
    for facts, kind in zip(own, ("parameter", "buffer"), strict=True):
        if found := difference(gather_json(facts, group)):
            raise PlanError(f"model: {found.replace('parameter', kind, 1)}; build the same model on every rank")
    raise PlanError("model: ranks register their parameters or buffers in different orders; use one order")


def _structure(tensors: Iterable[tuple[str, Tensor]], strides: bool) -> Facts:
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "requires_grad": tensor.requires_grad,
            **({"strides": list(tensor.stride())} if strides else {}),
        }
        for name, tensor in tensors
    }


def difference(facts: Sequence[Facts]) -> str:
    """A description of the first difference between ranks; empty if there is none.

    Args:
        facts: the facts of every rank, in rank order.
    """
    for rank, theirs in enumerate(facts):
        for name in [*facts[0], *(name for name in theirs if name not in facts[0])]:
            if name not in theirs or name not in facts[0]:
                has, lacks = (0, rank) if name in facts[0] else (rank, 0)
                return f"parameter '{name}' exists on rank {has}, but not on rank {lacks}"
            for what, value in theirs[name].items():
                if value != facts[0][name][what]:
                    return _describe(name, what, rank, value, facts[0][name][what])
    return ""


def _describe(name: str, what: str, rank: int, value: Any, first: Any) -> str:
    if what == "replacements":
        who, other = (rank, 0) if value > first else (0, rank)
        return f"parameter '{name}' was replaced by another tensor on rank {who}, but not on rank {other}"
    return f"parameter '{name}': {what} is {value} on rank {rank}, and {first} on rank 0"


def _trainable(parameters: list[nn.Parameter]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def _digest(facts: Facts) -> int:
    text = json.dumps(facts, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

"""Whether replicas are still equal: now and then, digests of all weights are compared between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.layout import real_view
from lightning_autosync.errors import ExchangeError

_WIDTH = 1024
"""Elements of a row in which a tensor's bits are summed."""
_NAMED = 5
"""Parameters that an error names."""


class ReplicaCheck:
    """Compares the weights of all ranks every so many steps; collective.

    A check reads each weight twice and sends 16 bytes a parameter. Weights that differ by no more than rounding, as
    they may on processors of different kinds, are a warning; others are an error.

    Args:
        every: synchronized backward passes from one check to the next; 0 checks only when `run` is called.
        group: the ranks; None is the default group.
    """

    def __init__(self, every: int, group: dist.ProcessGroup | None = None) -> None:
        self._every = every
        self._group = group
        self._passes = 0
        self._equal_after = 0
        self._warned = False

    def count(self, parameters: Mapping[str, Tensor]) -> None:
        """A synchronized backward pass took place, and no step yet: check the weights if that is due.

        Args:
            parameters: by name; the same names on all ranks.

        Raises:
            ExchangeError: on every rank, if weights differ.
        """
        if self._every and self._passes and self._passes % self._every == 0:
            self.run(parameters)
        self._passes += 1

    def run(self, parameters: Mapping[str, Tensor]) -> None:
        """Check the weights now.

        Raises:
            ExchangeError: on every rank, if weights differ; it names parameters, ranks, and since when.
        """
        if not parameters:
            return
        sums = torch.stack([_bit_sum(parameter.detach()) for parameter in parameters.values()])
        extremes = torch.cat([sums, -sums])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        largest, smallest = extremes[: len(sums)], -extremes[len(sums) :]
        places = (largest != smallest).nonzero().view(-1).tolist()
        if places:
            names = list(parameters)
            self._tell({names[place]: parameters[names[place]].detach() for place in places})
        self._equal_after = self._passes

    def _tell(self, suspects: Mapping[str, Tensor]) -> None:
        """Raise or warn of parameters of which ranks have other bits."""
        gaps = gather_json([_gap(tensor, self._group) for tensor in suspects.values()], self._group)
        limits = [math.sqrt(torch.finfo(tensor.dtype).eps) for tensor in suspects.values()]
        found = {
            name: [rank for rank, theirs in enumerate(gaps) if not theirs[place] <= limits[place]]
            for place, name in enumerate(suspects)
        }
        found = {name: ranks for name, ranks in found.items() if ranks}
        if not found:
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"AutoSync: weights of {len(suspects)} parameters differ between ranks by rounding (at most "
                    f"{max(max(theirs) for theirs in gaps):.1g} of the largest weight), as on unlike processors"
                )
            return
        ranks, others = self._odd_ones([suspects[name] for name in found])
        far = {rank for theirs in found.values() for rank in theirs}
        if others == 0:
            ranks = [rank for rank in ranks if rank in far]  # the rest differs by rounding
        shown = ", ".join(f"'{name}'" for name in list(found)[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise ExchangeError(
            f"replicas differ: the weights of {shown}{more} on rank {', '.join(map(str, ranks))} are not those of "
            f"rank {others}. They were equal after {self._equal_after} synchronized backward passes and differ after "
            f"{self._passes}. Something changed weights, gradients or an optimizer on some ranks only; "
            "check_replicas=0 turns this check off"
        )

    def _odd_ones(self, tensors: Sequence[Tensor]) -> tuple[list[int], int]:
        """The ranks whose weights are not those that most ranks have, and the first rank that has these.

        Where as many ranks have others, the most are those who agree with the lowest rank.
        """
        sums = [tuple(theirs) for theirs in gather_json([int(_bit_sum(tensor)) for tensor in tensors], self._group)]
        most = max(sums, key=sums.count)  # the first of equally many is that of the lower rank
        return [rank for rank, theirs in enumerate(sums) if theirs != most], sums.index(most)


def _bit_sum(tensor: Tensor) -> Tensor:
    """A number that depends on the bits of each element, and on where the element stands."""
    real = real_view(tensor)
    bits = real.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]).reshape(-1)
    whole = bits.numel() // _WIDTH * _WIDTH
    grid, rest = bits[:whole].view(-1, _WIDTH), bits[whole:].long()
    rows, columns = grid.sum(1, dtype=torch.int64), grid.sum(0, dtype=torch.int64)
    total: Tensor = sum((part * _places(part)).sum() for part in (rows, columns, rest))  # type: ignore[assignment]
    return total


def _places(part: Tensor) -> Tensor:
    """A weight for each place, odd so that no bit is lost; products may overflow, on all ranks alike."""
    return torch.arange(len(part), device=part.device) * 2654435762 + 1


def _gap(tensor: Tensor, group: dist.ProcessGroup | None) -> float:
    """The largest distance of an element from that of the group's first rank, in units of its largest one."""
    own = real_view(tensor).contiguous()
    first = own.clone()
    dist.broadcast(first, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    own, first = own.double(), first.double()
    distance = torch.where((own == first) | (own.isnan() & first.isnan()), 0.0, (own - first).abs())
    largest = float(first.abs().nan_to_num(0.0).max())
    gap = float(distance.nan_to_num(math.inf).max()) / max(largest, 1e-30)
    return min(gap, 1e30)  # JSON has no infinity

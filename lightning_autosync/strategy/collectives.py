"""The collective calls of a strategy, as Lightning and users make them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.strategy.base import Replica
from lightning_autosync.strategy.shares.batch_shares import BatchShares

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class CollectiveCalls(_Base):
    """Makes each collective call of Lightning's strategy in the context that the replica or the shares need."""

    _replica: Replica | None
    _shares: BatchShares | None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._shares is not None:
            tensor = self._shares.weigh(tensor, reduce_op)
        with self._collective("sync_dist=True (a reduction over ranks)", each_step=True):
            return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Not marked `each_step`: Lightning's checkpoints call this between steps only when one is due. The number of
        # ranks is the process group's, which may have lost some.
        with self._collective("a decision of all ranks"):
            count = super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
            return bool(count == dist.get_world_size()) if all else bool(count)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._collective("all_gather", each_step=True):
            if self._shares is not None:
                self._shares.check_gather(tensor, group)
            return super().all_gather(tensor, group, sync_grads)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._collective("a barrier"):
            super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        with self._collective("a broadcast"):
            return super().broadcast(*args, **kwargs)

    def _collective(self, what: str, each_step: bool = False) -> AbstractContextManager[None]:
        """The context of a collective call; see `Replica.collective`."""
        if self._shares is not None:  # with exact replicas, which need no other context
            return self._shares.collective(what)
        return nullcontext() if self._replica is None else self._replica.collective(what, each_step)

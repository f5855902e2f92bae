"""Outer updates of periodic averaging, on flat tensors: they compute the next model from an average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_autosync.plan import Consistency


class OuterUpdate(ABC):
    """The outer update of one fragment of the model.

    All replicas make the same updates, so their states stay equal.

    Args:
        sizes: number of elements of each tensor in the fragment; their sum is called elements below.
        dtype: dtype in which the fragment is averaged.

    Attributes:
        state: tensors [elements] that are kept between rounds, by name.
    """

    KEPT: tuple[str, ...] = ()
    """Names of the tensors in ``state``."""
    ANCHOR: str | None = "anchor"
    """Name of the tensor in ``state`` that is the common model after a round; None if there is none."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.state = {name: torch.zeros(sum(sizes), dtype=dtype, device="cpu") for name in self.KEPT}

    def begin(self, model: Tensor) -> None:
        """Begin training, with ``model`` [elements] on all replicas."""
        self.settle(model)

    def settle(self, model: Tensor) -> None:
        """Note that plain averaging gave all replicas ``model`` [elements]."""
        if self.ANCHOR in self.state:
            self.state[self.ANCHOR].copy_(model)

    @abstractmethod
    def update(self, local: Tensor, mean: Tensor, replicas: int, rates: Sequence[float]) -> Tensor:
        """This replica's next model.

        Args:
            local: [elements], this replica's model after its local steps.
            mean: [elements], mean of all replicas' models.
            replicas: number of averaged replicas.
            rates: learning rate of the local steps, of each tensor.

        Returns:
            [elements].
        """


class Averaging(OuterUpdate):
    """Local SGD (Stich, 2019): every replica continues from the mean."""

    def update(self, local: Tensor, mean: Tensor, replicas: int, rates: Sequence[float]) -> Tensor:
        return mean


class ElasticAveraging(OuterUpdate):
    """EASGD (Zhang, Choromanska and LeCun, 2015), synchronous form, equations 2 and 3.

    Each replica moves towards a centre, and the centre towards each replica, by ``alpha`` times their distance.
    """

    KEPT = ("centre",)
    ANCHOR = None

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, alpha: float | None) -> None:
        super().__init__(sizes, dtype)
        self._alpha = alpha

    def begin(self, model: Tensor) -> None:
        self.state["centre"].copy_(model)

    def update(self, local: Tensor, mean: Tensor, replicas: int, rates: Sequence[float]) -> Tensor:
        centre = self.state["centre"]
        # The default is stable for every number of replicas: alpha * (replicas + 1) stays below 2.
        alpha = 0.9 / replicas if self._alpha is None else self._alpha
        drawn = local - alpha * (local - centre)
        centre += replicas * alpha * (mean - centre)
        return drawn


class BlockMomentum(OuterUpdate):
    """BMUF (Chen and Huo, 2016), classical block momentum: a momentum filter over the model updates of the blocks."""

    KEPT = ("anchor", "update")

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, lr: float, momentum: float | None) -> None:
        super().__init__(sizes, dtype)
        self._lr, self._momentum = lr, momentum

    def update(self, local: Tensor, mean: Tensor, replicas: int, rates: Sequence[float]) -> Tensor:
        anchor, filtered = self.state["anchor"], self.state["update"]
        momentum = 1 - 1 / replicas if self._momentum is None else self._momentum
        filtered.mul_(momentum).add_(mean - anchor, alpha=self._lr)
        return anchor.add_(filtered)


class SlowMomentum(OuterUpdate):
    """SlowMo (Wang et al., 2020), algorithm 1, in units of the model instead of the gradient.

    The state keeps ``rate * u`` for the slow momentum u, which avoids a division by a learning rate of zero. When the
    rate of a tensor changes, its state is scaled by the ratio.
    """

    KEPT = ("anchor", "momentum", "rate")

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, lr: float, momentum: float) -> None:
        super().__init__(sizes, dtype)
        self.state["rate"] = torch.zeros(len(sizes), dtype=dtype, device="cpu")
        self._sizes, self._lr, self._momentum = tuple(sizes), lr, momentum

    def update(self, local: Tensor, mean: Tensor, replicas: int, rates: Sequence[float]) -> Tensor:
        anchor, slow = self.state["anchor"], self.state["momentum"]
        for part, rate, before in zip(slow.split(self._sizes), rates, self.state["rate"].tolist(), strict=True):
            part.mul_(self._momentum * (rate / before if rate > 0 and before > 0 else 1.0))
        self.state["rate"].copy_(torch.tensor(rates, dtype=torch.float64, device="cpu"))
        slow.add_(anchor - mean)
        return anchor.sub_(slow, alpha=self._lr)


class OuterNesterov(OuterUpdate):
    """DiLoCo (Douillard et al., 2023): SGD with Nesterov momentum on the outer gradient, the anchor minus the mean."""

    KEPT = ("anchor", "momentum")

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, lr: float, momentum: float) -> None:
        super().__init__(sizes, dtype)
        self._lr, self._momentum = lr, momentum

    def update(self, local: Tensor, mean: Tensor, replicas: int, rates: Sequence[float]) -> Tensor:
        anchor, momentum = self.state["anchor"], self.state["momentum"]
        gradient = anchor - mean
        momentum.mul_(self._momentum).add_(gradient)
        return anchor.sub_(gradient.add_(momentum, alpha=self._momentum), alpha=self._lr)


def make_outer(settings: Consistency, sizes: Sequence[int], dtype: torch.dtype) -> OuterUpdate:
    """The outer update of one fragment with tensors of these sizes, for a consistency of mode ``periodic``."""
    lr, momentum = settings.outer_lr, settings.outer_momentum
    match settings.outer:
        case "easgd":
            return ElasticAveraging(sizes, dtype, settings.alpha)
        case "bmuf":
            return BlockMomentum(sizes, dtype, _or(lr, 1.0), momentum)
        case "slowmo":
            return SlowMomentum(sizes, dtype, _or(lr, 1.0), _or(momentum, 0.5))
        case "diloco":
            return OuterNesterov(sizes, dtype, _or(lr, 0.7), _or(momentum, 0.9))
        case _:
            return Averaging(sizes, dtype)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

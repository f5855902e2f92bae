"""Dropout in comparisons of models: disabled, or checked for ranks that must or must not drop the same elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.hybrid.execution.activation import Activation, bring_home
from lightning_autosync.hybrid.execution.random_streams import Draw, digest
from lightning_autosync.hybrid.execution.split_model import SplitModel

_DROPOUTS: dict[Any, tuple[str, int]] = {
    **{
        getattr(F, name): ("p", 1)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    },
    torch.dropout: ("p", 1),
    F.scaled_dot_product_attention: ("dropout_p", 4),
}
"""Name and position of the argument with the dropout probability, by function."""
_BY_ELEMENT = {F.dropout, F.alpha_dropout, torch.dropout}
"""Functions that drop each element by itself; others drop whole channels, with one draw for all axes from the third."""
_BITS = 40
"""With fewer bits of information in a draw, an independent one of another rank may be equal by chance."""


class WithoutDropout(TorchFunctionMode):
    """Disables dropout within the block. It changes attributes of the module, which the caller must restore."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for part in module.modules():
            # These modules pass the probability to composite functions, which this mode does not see into.
            if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
                part.dropout = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            name, place = _DROPOUTS[func]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                given[name] = 0.0
        return func(*args, **given)


def draws(split: SplitModel, step: Callable[[], Any], batch: Any) -> list[Draw]:
    """The random numbers that this rank draws in a training step."""
    watch = _Watch(split)
    streams = split.around.streams
    streams.heard = []
    try:
        with watch, split.forward(batch):
            state = torch.get_rng_state()
            home = Draw(streams.place(split.around.home_states), digest(bytes(torch.rand(8, device="cpu").numpy())))
            torch.set_rng_state(state)
            bring_home(step())
        return [home, *streams.heard, *watch.found]
    finally:
        streams.heard = None


def dropout_faults(split: SplitModel, drawn: list[Draw]) -> list[str]:
    """Faults in the random numbers of a training step, of which each rank brings its `draws`; collective.

    Ranks with the same part of a value must drop the same elements; ranks with different parts must not.
    """
    return _faults(gather_json(drawn, split.mesh.group(split.mesh.dimensions)))


def _faults(by_rank: list[list[list[Any]]]) -> list[str]:
    if len({len(theirs) for theirs in by_rank}) > 1:
        return ["ranks drew random numbers for different values"]
    for draws in zip(*by_rank, strict=True):
        for rank, (place, numbers, chance) in enumerate(draws):
            for other, (its_place, its_numbers, _) in enumerate(draws[:rank]):
                if place == its_place and numbers != its_numbers:
                    return [f"ranks {other} and {rank} dropped different elements of the same value"]
                if place != its_place and numbers == its_numbers and not chance:
                    return [f"ranks {other} and {rank} dropped the same elements of different values"]
    return []


class _Watch(TorchFunctionMode):
    """Records which elements are dropped."""

    def __init__(self, split: SplitModel) -> None:
        super().__init__()
        self.found: list[Draw] = []
        self._split = split

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if _DROPOUTS.get(func, ("",))[0] == "p" and args and isinstance(args[0], Tensor):
            self._note(func(torch.ones_like(args[0]), *args[1:], **given), func not in _BY_ELEMENT)
        return func(*args, **given)

    def _note(self, kept: Tensor, by_channel: bool) -> None:
        """Record a draw.

        Args:
            kept: result of a dropout function on ones.
            by_channel: whether it drops whole channels, so that there is one draw for all further axes.
        """
        around = self._split.around
        states = around.home_states
        if isinstance(kept, Activation):
            states, kept = kept.placement.states, kept.local
        if by_channel and kept.dim() > 2:
            kept = kept.flatten(2)[..., 0]
        kept = kept.flatten()
        other = kept != kept[:1]
        chance = _bits(int(other.sum()), other.numel()) < _BITS
        self.found.append(Draw(around.streams.place(states), digest(bytes(other.cpu().numpy())), chance))


def _bits(chosen: int, size: int) -> float:
    """Information in a choice of elements, if their number is known: chance can make another choice equal."""
    ways = math.lgamma(size + 1) - math.lgamma(chosen + 1) - math.lgamma(size - chosen + 1)
    return ways / math.log(2)

"""Random plans that a model can be split by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

from torch import nn

from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.signatures import kind_of, refusal, rules_of

FUSED = ("qkv", "c_attn")
"""Layers that make queries, keys and values at once."""


def draw_plan(module: nn.Module, mesh: Sequence[int], seed: int) -> HybridPlan:
    """A plan with random signatures and layouts of outputs, and the ranks in random order."""
    draw = random.Random(seed)
    layers = None
    while layers is None:  # what was drawn for one layer may leave nothing for another that shares its parameters
        layers = _draw_layers(module, mesh, draw)
    ranks = list(range(prod(mesh)))
    draw.shuffle(ranks)
    return HybridPlan(mesh=tuple(mesh), ranks=tuple(ranks), layers=tuple(layers))


def _draw_layers(module: nn.Module, mesh: Sequence[int], draw: random.Random) -> list[LayerPlan] | None:
    layers: list[LayerPlan] = []
    cuts: dict[nn.Parameter, tuple[int | None, ...]] = {}
    inside = tuple(f"{path}." for path, part in module.named_modules() if kind_of(part) == "attention")
    for path, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False))
        if not own or path.startswith(inside):
            continue
        layer = _draw_layer(path, part, mesh, draw, own, cuts)
        if layer is None:
            return None
        layers.append(layer)
    return layers


def _draw_layer(path, part, mesh, draw, own, cuts) -> LayerPlan | None:
    parts = 3 if path.endswith(FUSED) else 1
    # Whatever is not split some way most of the time would leave most of the code alone.
    names = [name for name in rules_of(part) for _ in range(1 if name in ("dp", "rep") else 2)]
    for _ in range(100):
        signature = tuple(draw.choice(names) for _ in mesh)
        rules = [rules_of(part)[name].axes for name in signature]
        # Layers that share a parameter cut it alike.
        made = {parameter: tuple(axes.get(name) for axes in rules) for name, parameter in own.items()}
        alike = all(cuts.get(parameter, cut) == cut for parameter, cut in made.items())
        if alike and refusal(part, signature, mesh, parts) is None:
            cuts |= made
            break
    else:
        return None
    seldom = draw.random() < 0.4 or kind_of(part) == "unknown" or parts > 1
    output = None if seldom else tuple(draw.choice(("batch", "features", "full")) for _ in mesh)
    by_time = path.startswith("encoder.") and not getattr(part, "batch_first", True)
    return LayerPlan(module=path, signature=signature, output=output, parts=parts, batch_axis=1 if by_time else 0)

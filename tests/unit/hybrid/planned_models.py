"""Models whose graphs the tests know, and plans for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.cost import LayerCosts, StepSettings, step_seconds
from lightning_autosync.hybrid.graph import Graph
from lightning_autosync.hybrid.mesh import Links, near_order
from lightning_autosync.hybrid.pricing import Pricing
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.hybrid.structure import structure
from lightning_autosync.hybrid.tables import ILLEGAL, Tables, tables

TOKENS = torch.zeros(4, 16, dtype=torch.long)


def mlp(width: int = 64, layers: int = 3, last: int = 16) -> nn.Sequential:
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, last))


def vgg() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 16)),
    )


IMAGES = torch.zeros(4, 3, 16, 16)


def bert(layers: int = 2) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 96}
    return BertForMaskedLM(BertConfig(num_hidden_layers=layers, **sizes))


def gpt2(layers: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_head": 4, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_positions=32, use_cache=False, **sizes))


class Residual(nn.Module):
    """A block whose input is added to its output."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """A model that returns its loss."""

    def __init__(self, width: int = 64, classes: int = 16) -> None:
        super().__init__()
        self.body = mlp(width, last=classes)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.body(x)
        return nn.functional.cross_entropy(logits, x[:, 0].long().clamp(0, logits.shape[1] - 1))


class Gated(nn.Module):
    """A layer that two others gate, as in SwiGLU."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


SEQUENCE = torch.zeros(4, 8, 32)
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "mlp": (mlp, torch.zeros(4, 64)),
    "vgg": (vgg, IMAGES),
    "residual": (lambda: nn.Sequential(nn.Linear(32, 32), Residual(), Residual()), SEQUENCE),
    "loss": (Classifier, torch.zeros(4, 64)),
    "gated": (lambda: nn.Sequential(nn.Linear(32, 32), Gated(), Gated()), SEQUENCE),
    "attention": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2), SEQUENCE),
    "bert": (bert, TOKENS),
    "gpt2": (gpt2, TOKENS),
}


@cache
def graph_of(name: str) -> Graph:
    model, batch = MODELS[name]
    return capture(model(), batch)


def tables_of(graph: Graph, cluster: ClusterSpec, mesh: tuple[int, ...], collapse: bool = True) -> Tables:
    pricing = Pricing(mesh, near_order(cluster), Links(cluster), HybridRates())
    return tables(structure(graph, collapse), LayerCosts(pricing, StepSettings()))


def home(found: Tables) -> list[int]:
    """Data parallelism."""
    layers = [alternatives.index(("dp",) * len(alternatives[0])) for alternatives in found.signatures]
    return [*layers, *[0] * (len(found.alone) - found.layers)]


def drawn(found: Tables, rng: random.Random) -> list[int]:
    """A choice that can be, far from where it began."""
    choice = home(found)
    for _ in range(6 * len(choice)):
        number = rng.randrange(len(choice))
        state = rng.randrange(len(found.alone[number]))
        other = [*choice[:number], state, *choice[number + 1 :]]
        if step_seconds(found.total(other)) < ILLEGAL:
            choice = other
    return choice

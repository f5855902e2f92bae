"""The real modules among the models of a bench. Each returns its loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class ResidualLayers(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return F.mse_loss(F.layer_norm(hidden, hidden.shape[1:]), targets)


class EmbeddingRecommender(nn.Module):
    def __init__(self, rows: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, width, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, pairs: Tensor, ratings: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.items(pairs).flatten(1))[:, 0], ratings)


class FlatVector(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(numel))

    def forward(self, scale: Tensor) -> Tensor:
        return _ConstantGradient.apply(self.vector, scale)


class _ConstantGradient(torch.autograd.Function):
    """Returns zero; the gradient of every element of ``vector`` is ``scale``."""

    @staticmethod
    def forward(context: Any, vector: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(scale)
        context.shape = vector.shape
        return vector.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(context: Any, output: Tensor) -> tuple[Tensor, None]:
        (scale,) = context.saved_tensors
        return scale.expand(context.shape).contiguous(), None


class DigitsNetwork(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(2 * channels * 16, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(images).flatten(1)), labels)


class Perceptron(nn.Module):
    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.layers(inputs), targets)


class ImageClassifier(nn.Module):
    """Convolutions and a classifier of wide layers, which have most of the weights, as in VGG."""

    def __init__(self, size: int, channels: Sequence[int], hidden: int, classes: int) -> None:
        super().__init__()
        features: list[nn.Module] = []
        for before, after in pairwise((3, *channels)):
            features += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*features)
        width = channels[-1] * (size // 2 ** len(channels)) ** 2
        self.classifier = nn.Sequential(
            *(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images).flatten(1)), labels)


class LanguageModel(nn.Module):
    """A decoder-only Transformer that predicts each token from the previous tokens."""

    places: Tensor

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("places", torch.arange(length)[None], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(self.places[:, : tokens.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mixed = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        normal = self.before_attention(hidden)
        query, key, value = (
            layer(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.mixed(mixed)
        return hidden + self.down(F.gelu(self.up(self.before_mlp(hidden))))

"""What contenders train: real modules, and batches that differ between ranks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_autosync.documents import Record

Batch = tuple[Tensor, ...]
MIB = 1024 * 1024
BATCHES = 8


class Model(Record):
    """A recipe of a module and its batches.

    Attributes:
        learning_rate: of plain SGD, for all parameters; None leaves the optimizer out.
    """

    learning_rate: PositiveFloat | None = 0.01

    @abstractmethod
    def module(self, sparse: bool = False) -> nn.Module:
        """A new module; called with a batch, it returns the loss. ``sparse`` is that of its embeddings."""

    @abstractmethod
    def batches(self, rank: int) -> list[Batch]:
        """The batches that ``rank`` takes in turn."""


class Layers(Model):
    """Residual blocks of one linear layer each: half of the tensors are matrices, half are vectors.

    Attributes:
        tensors: parameter tensors, two a layer.
        width: features of every layer.
        batch: samples in a batch of one rank.
    """

    kind: Literal["layers"]
    tensors: PositiveInt
    width: PositiveInt
    batch: PositiveInt

    @field_validator("tensors")
    @classmethod
    def _check_even(cls, tensors: int) -> int:
        if tensors % 2:
            raise ValueError("every layer has two tensors, so the number must be even")
        return tensors

    def module(self, sparse: bool = False) -> nn.Module:
        return _Layers(self.tensors // 2, self.width)

    def batches(self, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(rank)
        draw = torch.randn(BATCHES, 2, self.batch, self.width, generator=generator)
        return [(inputs, targets) for inputs, targets in draw]


class Recommender(Model):
    """Embeddings of items, two a sample, and a small multilayer perceptron on them (as in NCF).

    Attributes:
        rows: rows of the table.
        width: features of a row.
        batch: samples in a batch of one rank.
    """

    kind: Literal["recommender"]
    rows: PositiveInt
    width: PositiveInt
    batch: PositiveInt

    def module(self, sparse: bool = False) -> nn.Module:
        return _Recommender(self.rows, self.width, sparse)

    def batches(self, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(rank)
        pairs = torch.randint(self.rows, (BATCHES, self.batch, 2), generator=generator)
        ratings = torch.rand(BATCHES, self.batch, generator=generator)
        return list(zip(pairs, ratings, strict=True))


class Flat(Model):
    """One vector whose backward costs next to nothing: a step is one synchronization, without optimizer.

    Attributes:
        mib: size of the vector in MiB of float32.
    """

    kind: Literal["flat"]
    mib: PositiveFloat
    learning_rate: None = None

    def module(self, sparse: bool = False) -> nn.Module:
        return _Flat(max(1, round(self.mib * MIB / 4)))

    def batches(self, rank: int) -> list[Batch]:
        return [(torch.tensor(float(rank + 1)),)]


class Digits(Model):
    """A small convolutional network on scikit-learn's digits.

    Attributes:
        channels: of the first convolution.
        batch: samples in a batch of one rank.
    """

    kind: Literal["digits"]
    channels: PositiveInt
    batch: PositiveInt

    def module(self, sparse: bool = False) -> nn.Module:
        return _Digits(self.channels)

    def batches(self, rank: int) -> list[Batch]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
        labels = torch.as_tensor(digits.target)
        generator = torch.Generator().manual_seed(rank)
        draw = torch.randint(len(images), (BATCHES, self.batch), generator=generator)
        return [(images[chosen], labels[chosen]) for chosen in draw]


AnyModel = Annotated[Layers | Recommender | Flat | Digits, Field(discriminator="kind")]


class _Layers(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return F.mse_loss(F.layer_norm(hidden, hidden.shape[1:]), targets)


class _Recommender(nn.Module):
    def __init__(self, rows: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, width, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, pairs: Tensor, ratings: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.items(pairs).flatten(1))[:, 0], ratings)


class _Flat(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(numel))

    def forward(self, scale: Tensor) -> Tensor:
        return _ConstantGradient.apply(self.vector, scale)


class _ConstantGradient(torch.autograd.Function):
    """Zero, with ``scale`` as the derivative by every element."""

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


class _Digits(nn.Module):
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

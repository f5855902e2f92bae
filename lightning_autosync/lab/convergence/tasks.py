"""Two small real tasks whose data come with scikit-learn and with Python."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autosync.documents import Record
from lightning_autosync.measure.models.digits import load_digits

HELD_OUT = 0.2
"""Share of the samples that only validation sees."""


class Task(Record):
    """A classification task: a model, samples, and accuracy on held-out samples.

    Attributes:
        batch: samples in a batch of one rank.
    """

    batch: PositiveInt = 16

    @abstractmethod
    def module(self) -> nn.Module:
        """A new module that maps inputs to logits, with weights from torch's global generator."""

    @abstractmethod
    def samples(self) -> tuple[Tensor, Tensor]:
        """All inputs and labels, in a fixed order; the last `HELD_OUT` of them are for validation."""

    def training(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels to learn from."""
        inputs, labels = self.samples()
        kept = len(inputs) - int(HELD_OUT * len(inputs))
        return inputs[:kept], labels[:kept]

    def accuracy(self, module: nn.Module) -> float:
        """Accuracy of ``module`` on the held-out samples, in percent."""
        inputs, labels = self.samples()
        kept = len(inputs) - int(HELD_OUT * len(inputs))
        with torch.no_grad():
            found = module(inputs[kept:]).argmax(1)
        return 100.0 * float((found == labels[kept:]).float().mean())


class DigitsTask(Task):
    """Scikit-learn's 8 x 8 digits with a small convolutional network."""

    kind: Literal["digits"]
    channels: PositiveInt = 8

    def module(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.channels, 2 * self.channels, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * self.channels * 16, 10),
        )

    def samples(self) -> tuple[Tensor, Tensor]:
        return _digits()


class CharactersTask(Task):
    """Predicts the next character of Python's own reference text from the previous ones (Bengio et al., 2003).

    Attributes:
        context: number of previous characters that the model sees.
        width: number of features of a character.
        hidden: number of features of the hidden layer.
    """

    kind: Literal["characters"]
    context: PositiveInt = 8
    width: PositiveInt = 16
    hidden: PositiveInt = 128

    def module(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(len(_ALPHABET), self.width),
            nn.Flatten(),
            nn.Linear(self.context * self.width, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, len(_ALPHABET)),
        )

    def samples(self) -> tuple[Tensor, Tensor]:
        return _characters(self.context)


AnyTask = Annotated[DigitsTask | CharactersTask, Field(discriminator="kind")]

_ALPHABET = "\n !\"#'()*+,-./0123456789:;<=>[]_`abcdefghijklmnopqrstuvwxyz"
_TEXT = 60_000
"""Number of characters of the text that are used."""


def loss(module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(module(inputs), labels)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


@cache
def _characters(context: int) -> tuple[Tensor, Tensor]:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).lower()[:_TEXT]
    codes = torch.tensor([_ALPHABET.index(letter) for letter in text if letter in _ALPHABET])
    windows = codes.unfold(0, context + 1, 1)
    return windows[:, :-1].contiguous(), windows[:, -1].contiguous()

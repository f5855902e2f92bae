"""Models whose graphs the tests know."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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

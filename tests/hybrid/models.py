"""Small models of each kind, and the batches that they train on: everything is divisible by eight ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LENGTH, WORDS, CLASSES = 16, 8, 6, 32, 8


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.third, self.head = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.second(F.relu(self.first(x)))))
        return self.head(F.gelu(self.third(self.drop(x))))


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.ReLU(inplace=True)),
        )
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            *(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Dropout(0.0)),
            *(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, CLASSES)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class Separate(nn.Module):
    """A block whose queries, keys and values have projections of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(*x.shape[:-1], HEADS, WIDTH // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Fused(Separate):
    """A block with one projection for queries, keys and values, and attention that is written out."""

    def __init__(self) -> None:
        super().__init__()
        del self.query, self.key, self.value
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH))[None, None])

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (item.view(b, t, HEADS, c // HEADS).transpose(1, 2) for item in self.qkv(x).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        mixed = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, t, c)
        return self.out(mixed)


class Dropping(Fused):
    """A fused block that drops values that lie in all layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.before(x)))
        return x + F.dropout(self.down(self.drop(F.gelu(self.up(self.after(x))))), 0.3, self.training)


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.checkpointing = False
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x).mean(dim=1))


class Encoder(nn.Module):
    """torch's own layers."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.batch_first = batch_first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.encoder(x, src_key_padding_mask=ids == 0) if self.batch_first else self.encoder(x.transpose(0, 1))
        return self.head(x.mean(dim=1 if self.batch_first else 0))


class Biased(nn.Module):
    """Attention with a learned bias for each pair of places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(x, x, x, attn_mask=self.bias, need_weights=False)[0]
        return self.head(x.mean(dim=1))


class Language(nn.Module):
    """An embedding language model; the table is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))) * self.scale)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_embd=WIDTH,
            n_layer=2,
            n_head=HEADS,
            n_positions=LENGTH,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "mlp_dropout": lambda: Mlp(0.5),
    "vgg": Vgg,
    "separate": lambda: Stack(Separate),
    "fused": lambda: Stack(Fused),
    "dropping": lambda: Stack(Dropping),
    "encoder": Encoder,
    "encoder_time_first": lambda: Encoder(batch_first=False),
    "biased": Biased,
    "language": Language,
    "bert": bert,
    "gpt2": gpt2,
    "gpt2_dropout": lambda: gpt2(0.1),
}


def make_batch(model: str, samples: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and labels of so many samples."""
    generator = torch.Generator().manual_seed(seed)
    if model.startswith("mlp"):
        inputs = torch.randn(samples, 8, generator=generator, dtype=dtype)
    elif model == "vgg":
        inputs = torch.randn(samples, 3, 8, 8, generator=generator, dtype=dtype)
    else:
        inputs = torch.randint(1, WORDS, (samples, LENGTH), generator=generator)
    if model.startswith(("language", "bert", "gpt2")):
        return inputs, torch.randint(0, WORDS, (samples, LENGTH), generator=generator)
    return inputs, torch.randint(0, CLASSES, (samples,), generator=generator)


def loss_of(module: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    """The mean loss of a batch."""
    if hasattr(module, "config"):  # of transformers
        return module(input_ids=inputs, labels=labels).loss
    output = module(inputs)
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())

"""Small LightningModules, each with one thing that a strategy can get wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 6
CLASSES = 3
TOKENS = 5000
"""Rows of embedding tables: enough for a dense one to travel by rows."""


def loader(samples: int = 32, batch_size: int = 2) -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=batch_size)


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps, cycle_momentum=False)


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)
        self.largest_difference = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(inputs)))

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self(inputs).float(), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        return loader()


class Wide(Plain):
    """Gradients of 200 kB, next to which other messages between ranks are small."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 5000)
        self.head = nn.Linear(5000, CLASSES)


class SeesGradients(Plain):
    """Notes how far the gradients that ``on_after_backward`` sees differ between ranks."""

    def on_after_backward(self) -> None:
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in self.parameters()])
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat)
        difference = float((parts[0] - parts[1]).abs().max())
        self.largest_difference = max(self.largest_difference, difference)


class ReadsOnRankZero(Plain):
    """Rank 0 reads its gradients before they are clipped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 0:
            assert all(parameter.grad is not None for parameter in self.parameters())


class ReadsGradients(Plain):
    """All ranks read their gradients before they are clipped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(parameter.grad is not None for parameter in self.parameters())


class Scheduled(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Unused(Plain):
    """One layer that only rank 0 uses, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(8, CLASSES)
        self.never = nn.Linear(8, CLASSES)
        self.never_got_gradients = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(inputs))
        return self.head(hidden) + (self.sometimes(hidden) if self.global_rank == 0 else 0)

    def on_after_backward(self) -> None:
        self.never_got_gradients &= self.never.weight.grad is None


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, FEATURES)
        self.twin = nn.Linear(FEATURES, FEATURES)
        self.twin.weight = self.body.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.twin(torch.tanh(self.body(inputs)))))


class Normalized(Plain):
    """Running statistics are buffers, and the forward pass reads one that ranks update differently."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.body(inputs)) + self.offset
        if self.training:
            self.offset += 0.01 * (self.global_rank + 1)
        return self.head(torch.tanh(hidden))


class Checkpointed(Plain):
    reentrant = False

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        hidden = checkpoint(self.body, inputs, use_reentrant=self.reentrant)
        return self.head(torch.tanh(hidden))


class Reentrant(Checkpointed):
    reentrant = True


class Adapters(Plain):
    """Trains blocks in reentrant checkpoints under a frozen head, so that the first gradient arrives in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        for block in self.body:
            inputs = torch.tanh(checkpoint(block, inputs, use_reentrant=True))
        return self.head(inputs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.parameters(), lr=0.1)


class AdaptersByHand(Adapters):
    """Its backward passes are made by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class SparseTable(Plain):
    sparse = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, FEATURES, sparse=self.sparse)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        inputs, labels = batch
        tokens = (inputs[:, 0].abs() * 1e4).long() % TOKENS
        loss = F.cross_entropy(self(inputs + self.table(tokens)), labels)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        dense = [*self.body.parameters(), *self.head.parameters()]
        kind = torch.optim.SparseAdam if self.sparse else torch.optim.Adam
        return torch.optim.SGD(dense, lr=0.1), kind(list(self.table.parameters()), lr=0.01)


class DenseTable(SparseTable):
    sparse = False


class Adversarial(LightningModule):
    """Two optimizers in turn, by hand."""

    toggles = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(FEATURES, FEATURES)
        self.critic = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, index: int) -> None:
        inputs, _ = batch
        generator, critic = self.optimizers()
        self._turn(generator, lambda: -self.critic(self.generator(inputs)).mean())
        self._turn(
            critic,
            lambda: (self.critic(self.generator(inputs).detach()) - self.critic(inputs)).square().mean(),
        )

    def _turn(self, optimizer: Any, loss: Any) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.differentiate(loss())
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def differentiate(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.generator.parameters(), lr=0.05),
            torch.optim.Adam(self.critic.parameters(), lr=0.05),
        )

    def train_dataloader(self) -> DataLoader:
        return loader()


class Untoggled(Adversarial):
    toggles = False


class Accumulates(Adversarial):
    """Each optimizer steps on every second batch, so that one synchronizes while the other has local gradients."""

    set_to_none = True

    def training_step(self, batch: Any, index: int) -> None:
        inputs, _ = batch
        generator, critic = self.optimizers()
        # Their turns are out of step: neither has just been zeroed when the other synchronizes.
        self._part(generator, index % 2 == 1, lambda: -self.critic(self.generator(inputs)).mean())
        self._part(
            critic,
            index % 2 == 0,
            lambda: (self.critic(self.generator(inputs).detach()) - self.critic(inputs)).square().mean(),
        )

    def _part(self, optimizer: Any, last: bool, loss: Any) -> None:
        with optimizer.toggle_model(sync_grad=last):
            self.differentiate(loss())
            if last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=self.set_to_none)


class AccumulatesInPlace(Accumulates):
    """Keeps the tensors that gradients were synchronized in."""

    set_to_none = False


class Loud(LightningModule):
    """A part with huge gradients is frozen after the first batch; gradients do not depend on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.live = nn.Linear(FEATURES, 1, bias=False)
        self.loud = nn.Linear(FEATURES, 1, bias=False)
        self.gradients: list[list[float]] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.loud.requires_grad_(index == 0)
        inputs = batch[0].abs()
        return self.live(inputs).mean() + (1e4 * self.loud(inputs).mean() if index == 0 else 0)

    def on_after_backward(self) -> None:
        self.gradients.append(self.live.weight.grad.flatten().tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return loader()


class Direct(Adversarial):
    """Calls ``loss.backward()`` itself, which Lightning's DDP does not synchronize."""

    def differentiate(self, loss: Tensor) -> None:
        loss.backward()


class Logs(Plain):
    """Every loop, with values reduced over ranks."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.log("rank", float(self.global_rank), sync_dist=True)
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    val_dataloader = test_dataloader = predict_dataloader = Plain.train_dataloader


class Validates(Plain):
    """Validates at the end of each epoch, with a loss that is reduced over ranks."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    val_dataloader = Plain.train_dataloader


class Thaws(Plain):
    """The body trains from the second epoch on; it is frozen at once, or when the strategy is set up."""

    early = True

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(not self.early)

    def on_fit_start(self) -> None:
        self.body.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.body.requires_grad_(self.current_epoch > 0)


class ThawsLate(Thaws):
    early = False


class Mixture(Plain):
    """Tied and frozen parameters, some that one rank uses, some that nobody does, and some that train for a time.

    On one rank, gradients are not finite now and then if a scaler is there to skip such steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(FEATURES, FEATURES)
        self.again = nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.twin.weight
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.late = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.sometimes = nn.Linear(8, CLASSES)
        self.never = nn.Linear(8, CLASSES)
        self.scale = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = torch.tanh(self.late(self.frozen(self.again(torch.tanh(self.twin(inputs))))))
        hidden = torch.tanh(self.body(inputs))
        return self.head(hidden) + (self.sometimes(hidden) if self.global_rank == 0 else 0)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is None:
            return loss
        self.scale = scaler.get_scale()
        return loss * torch.inf if index % 20 == 7 and self.global_rank == 1 else loss

    def on_train_epoch_start(self) -> None:
        self.late.requires_grad_(self.current_epoch in (2, 3))

    def train_dataloader(self) -> DataLoader:
        return loader(samples=240)


class Compiled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(self.body, backend="aot_eager")


class ThawsAtOnce(Thaws):
    def on_train_epoch_start(self) -> None:
        self.body.requires_grad_(True)


class AllFrozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class StepsEarly(Plain):
    def __init__(self) -> None:
        super().__init__()
        _apply_optimizer_in_backward(torch.optim.SGD, self.parameters(), {"lr": 0.1})

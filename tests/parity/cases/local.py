"""Backward passes that DDP leaves to their rank."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from models import FEATURES, loader
from torch import nn
from torch.nn import functional as F

from parity.case import Family
from parity.parts import ByHand, Task, mlp, sgd

if TYPE_CHECKING:
    from parity.side import Side

family = Family("passes of one rank", plans=("default", "ring"))


def attack(module: Task, batch: Any, passes: int) -> Any:
    """Inputs that a few backward passes have moved; gradients of parameters are left as they come."""
    inputs = batch[0].clone()
    for _ in range(passes):
        inputs = inputs.detach().requires_grad_()
        F.cross_entropy(module.net(inputs), batch[1]).backward()
        assert inputs.grad is not None
        inputs = inputs + 0.1 * inputs.grad.sign()
    return inputs.detach()


@family()
def attack_that_ends_earlier_on_one_rank(side: Side) -> None:
    class Attacked(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            inputs = attack(self, batch, 1 + self.global_rank)
            return self.loss((inputs, batch[1]))

    side.fit(Attacked())


@family()
def attack_that_ends_earlier_by_hand(side: Side) -> None:
    class Attacked(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            inputs = attack(self, batch, 1 + self.global_rank)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss((inputs, batch[1])))
            optimizer.step()

    side.fit(Attacked())


class Pictures(Callback):
    """Rank 0 computes gradients of outputs, as pictures of what a network looks at need them."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            (module.net(torch.ones(1, FEATURES)).sum() * 100).backward()
            module.zero_grad()

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.on_train_batch_end(trainer, module)


@family()
def pictures_on_one_rank(side: Side) -> None:
    side.fit(Task(), callbacks=[Pictures()])


@family()
def local_gradients_of_a_sharpness_aware_step(side: Side) -> None:
    class Local(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            self.loss(batch).backward()
            moves = [0.01 * parameter.grad.sign() for parameter in self.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(self.parameters()), moves)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            with torch.no_grad():
                torch._foreach_sub_(list(self.parameters()), moves)
            optimizer.step()
            optimizer.zero_grad()
            for parameter in self.parameters():  # equal on all ranks, but for the rounding of the moves
                parameter.data = self.all_gather(parameter.data)[0].clone()

    side.fit(Local(), max_epochs=1)


@family()
def wrapper_called_by_hand(side: Side) -> None:
    class Called(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            F.cross_entropy(self.trainer.model(batch[0]), batch[1]).backward()
            optimizer.step()

    side.fit(Called())


@family(unused=True)
def hand_over_after_a_wrapper_call(side: Side) -> None:
    """A pass by hand after one that the wrapper's call has made synchronous."""

    class Twice(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            output = self.trainer.model(batch[0])
            self.manual_backward(F.cross_entropy(output, batch[1]))
            F.cross_entropy(self.net(batch[0][: 1 + self.global_rank]), batch[1][: 1 + self.global_rank]).backward()
            side.note_gradients(self)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    side.fit(Twice())


class Fails(torch.autograd.Function):
    """The identity, whose gradient raises."""

    @staticmethod
    def forward(ctx: Any, inputs: Any) -> Any:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise MemoryError("too large")


@family()
def pass_that_fails_at_once_and_is_tried_again(side: Side) -> None:
    class Retries(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            if index == self.global_rank:
                with suppress(MemoryError):
                    self.manual_backward(Fails.apply(self.loss(batch)))
            self.manual_backward(self.loss(batch))
            optimizer.step()

    side.fit(Retries())


def _fabric(side: Side) -> tuple[Any, nn.Module, Any, Any]:
    fabric = side.fabric()
    net = mlp()
    return fabric, net, *fabric.setup(net, sgd(net.parameters()))


@family()
def fabric_module_without_its_wrapper(side: Side) -> None:
    fabric, net, module, optimizer = _fabric(side)
    for inputs, labels in fabric.setup_dataloaders(loader(16)):
        for _ in range(1 + side.rank):
            (net(inputs).sum() * 100).backward()
        side.note_gradients(net)
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(module(inputs), labels))
        side.note_gradients(net)
        optimizer.step()
        optimizer.zero_grad()
    side.note_module(net)
    fabric.strategy.teardown()


@family()
def fabric_second_pass_through_one_graph(side: Side) -> None:
    fabric, net, module, optimizer = _fabric(side)
    for inputs, labels in fabric.setup_dataloaders(loader(16)):
        loss = F.cross_entropy(module(inputs), labels)
        fabric.backward(loss, retain_graph=True)
        side.note_gradients(net)
        fabric.backward(loss * (1 + side.rank))
        side.note_gradients(net)
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(module(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    side.note_module(net)
    fabric.strategy.teardown()


@family()
def fabric_forward_within_no_sync_and_backward_outside(side: Side) -> None:
    fabric, net, module, optimizer = _fabric(side)
    for inputs, labels in fabric.setup_dataloaders(loader(16)):
        with fabric.no_backward_sync(module):
            loss = F.cross_entropy(module(inputs), labels)
        fabric.backward(loss)
        side.note_gradients(net)
        fabric.backward(F.cross_entropy(module(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    side.note_module(net)
    fabric.strategy.teardown()

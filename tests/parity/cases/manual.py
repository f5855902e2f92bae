"""Optimization by hand: several optimizers, adversaries, parts frozen in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from models import FEATURES, Accumulates, AccumulatesInPlace, Adversarial, Direct, Untoggled
from torch import Tensor, nn
from torch.nn import functional as F

from parity.case import Family
from parity.parts import ByHand, Task, adamw, mlp, sgd

if TYPE_CHECKING:
    from parity.side import Side

family = Family("manual optimization")

family.add("adversaries, toggled", lambda side: side.fit(Adversarial(), max_epochs=1), unused=True)
family.add("adversaries, untoggled", lambda side: side.fit(Untoggled(), max_epochs=1), unused=True)
family.add("adversaries, accumulated", lambda side: side.fit(Accumulates(), max_epochs=1), unused=True)
family.add("adversaries, accumulated in place", lambda side: side.fit(AccumulatesInPlace(), max_epochs=1), unused=True)
family.add(
    "small buckets for adversaries",
    lambda side: side.fit(Adversarial(), max_epochs=1),
    unused=True,
    bucket_cap_mb=1e-4,
    plans=("default", "native", "ring"),
)
family.add("loss.backward instead of manual_backward", lambda side: side.fit(Direct(), max_epochs=1), unused=True)


class Pair(ByHand):
    """A generator and a critic of FEATURES inputs."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.generator = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        return adamw(self.generator.parameters()), adamw(self.critic.parameters())

    def take(self, optimizer: Any, loss: Callable[[], Tensor]) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss())
        optimizer.step()

    def judged(self, real: Tensor, fake: Tensor) -> Tensor:
        return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("judged", self.critic(self.generator(batch[0])).mean(), sync_dist=True)


@family(unused=True)
def critic_that_trains_more_often(side: Side) -> None:
    class Often(Pair):
        def training_step(self, batch: Any, index: int) -> None:
            generator, critic = self.optimizers()
            fake = self.generator(batch[0])
            self.take(critic, lambda: self.judged(batch[0], fake.detach()))
            if index % 2:
                self.take(generator, lambda: -self.critic(fake).mean())

    side.fit(Often())


@family(unused=True)
def critic_with_a_gradient_penalty(side: Side) -> None:
    class Penalty(Pair):
        def training_step(self, batch: Any, index: int) -> None:
            generator, critic = self.optimizers()
            fake = self.generator(batch[0])

            def loss() -> Tensor:
                mixed = (0.5 * batch[0] + 0.5 * fake.detach()).requires_grad_()
                (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
                return self.judged(batch[0], fake.detach()) + (slope.norm(dim=1) - 1).square().mean()

            self.toggle_optimizer(critic)
            self.take(critic, loss)
            self.untoggle_optimizer(critic)
            self.toggle_optimizer(generator)
            self.take(generator, lambda: -self.critic(self.generator(batch[0])).mean())
            self.untoggle_optimizer(generator)

    side.fit(Penalty())


@family(unused=True)
def parts_frozen_in_turn(side: Side) -> None:
    class Turns(Pair):
        def training_step(self, batch: Any, index: int) -> None:
            parts = (self.generator, self.critic)
            for part, other, optimizer in zip(parts, parts[::-1], self.optimizers(), strict=True):
                part.requires_grad_(True)
                other.requires_grad_(False)
                self.take(optimizer, lambda: self.critic(self.generator(batch[0])).square().mean())
            for part in parts:
                part.requires_grad_(True)

    side.fit(Turns())


@family(unused=True)
def losses_of_two_parts_in_one_backward(side: Side) -> None:
    class Joint(Pair):
        def training_step(self, batch: Any, index: int) -> None:
            generator, critic = self.optimizers()
            generator.zero_grad()
            critic.zero_grad()
            fake = self.generator(batch[0])
            self.manual_backward(self.judged(batch[0], fake) + fake.square().mean())
            critic.step()
            generator.step()

    side.fit(Joint())


@family()
def one_optimizer_by_hand(side: Side) -> None:
    class One(ByHand):
        def training_step(self, batch: Any, index: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            return loss

    side.fit(One())


@family()
def closure_given_by_hand(side: Side) -> None:
    class Closure(ByHand):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    side.fit(Closure())


@family()
def schedule_stepped_by_hand(side: Side) -> None:
    class Stepped(ByHand):
        def configure_optimizers(self) -> Any:
            made = sgd(self.parameters())
            return [made], [torch.optim.lr_scheduler.StepLR(made, 2, 0.5)]

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.lr_schedulers().step()

    side.fit(Stepped())


class Accumulating(ByHand):
    """Steps on every second batch; how gradients of the others stay local is for subclasses to say."""

    def local(self) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        if index % 2 == 0:
            with self.local():
                self.manual_backward(self.loss(batch) / 2)
            return
        self.manual_backward(self.loss(batch) / 2)
        optimizer.step()
        optimizer.zero_grad()


@family()
def accumulation_within_block_backward_sync(side: Side) -> None:
    class Blocked(Accumulating):
        def local(self) -> Any:
            return self.trainer.strategy.block_backward_sync()

    side.fit(Blocked())


@family()
def accumulation_within_no_sync_of_the_model(side: Side) -> None:
    class Blocked(Accumulating):
        def local(self) -> Any:
            return self.trainer.model.no_sync()

    side.fit(Blocked())


@family()
def accumulation_without_any_block(side: Side) -> None:
    class Open(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            self.manual_backward(self.loss(batch) / 3)
            if index % 3 == 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    side.fit(Open())


@family()
def several_backward_passes_a_step(side: Side) -> None:
    class Tasks(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.manual_backward(self(batch[0]).square().mean())
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()

    side.fit(Tasks())


@family()
def one_batch_in_several_parts(side: Side) -> None:
    class Parts(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            inputs, labels = batch
            optimizer.zero_grad()
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss((inputs[:2], labels[:2])) / 2)
            self.manual_backward(self.loss((inputs[2:], labels[2:])) / 2)
            optimizer.step()

    side.fit(Parts(batch=4))


@family()
def memory_carried_from_step_to_step(side: Side) -> None:
    class Recurrent(ByHand):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 3))
            self.cell = nn.GRUCell(FEATURES, 8)
            self.memory: Tensor | None = None

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            memory = torch.zeros(len(batch[0]), 8) if self.memory is None else self.memory
            memory = self.cell(batch[0], memory)
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(memory), batch[1]))
            optimizer.step()
            self.memory = memory.detach()

        def validation_step(self, batch: Any, index: int) -> None:
            pass

    side.fit(Recurrent())


@family()
def a_mean_over_ranks_by_hand(side: Side) -> None:
    class Own(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
            for parameter in self.parameters():
                parameter.grad = self.trainer.strategy.reduce(parameter.grad, reduce_op="mean")
            optimizer.step()

    side.fit(Own())


@family()
def losses_over_what_all_ranks_gathered(side: Side) -> None:
    class Contrast(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            own = F.normalize(self(batch[0]))
            everyone = self.all_gather(own, sync_grads=True).flatten(0, 1)
            return F.cross_entropy(own @ everyone.t() * 5, torch.arange(len(own)) + len(own) * self.global_rank)

    side.fit(Contrast())


@family()
def two_networks_one_optimizer_each_step(side: Side) -> None:
    class Alternates(ByHand):
        def __init__(self) -> None:
            super().__init__()
            self.other = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs) + self.other(inputs)

        def configure_optimizers(self) -> Any:
            return sgd(self.net.parameters()), adamw(self.other.parameters())

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()[index % 2]
            self.manual_backward(self.loss(batch))
            optimizer.step()
            for each in self.optimizers():
                each.zero_grad()

    side.fit(Alternates())

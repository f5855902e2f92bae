"""Optimizers of torch and of others, with and without closures, and their schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from models import FEATURES
from torch import Tensor, nn, optim
from torch.nn import functional as F

from parity.case import Family
from parity.parts import ByHand, Task, adamw, mlp, sgd

if TYPE_CHECKING:
    from parity.side import Side

family = Family("optimizers")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD, momentum, dampening, decay": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "SGD, nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, maximize": partial(optim.SGD, lr=0.01, maximize=True),
    "SGD, foreach": partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=0.02),
    "Adam, amsgrad": partial(optim.Adam, lr=0.02, amsgrad=True),
    "Adam, foreach": partial(optim.Adam, lr=0.02, foreach=True),
    "Adam, fused": partial(optim.Adam, lr=0.02, fused=True),
    "AdamW": adamw,
    "AdamW, fused, amsgrad": partial(optim.AdamW, lr=0.02, fused=True, amsgrad=True),
    "AdamW, rate as a tensor": lambda parameters: optim.AdamW(parameters, lr=torch.tensor(0.02), foreach=False),
    "NAdam": partial(optim.NAdam, lr=0.02),
    "RAdam": partial(optim.RAdam, lr=0.02),
    "Adagrad": partial(optim.Adagrad, lr=0.05),
    "Adagrad, fused": partial(optim.Adagrad, lr=0.05, fused=True),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "Adamax": partial(optim.Adamax, lr=0.02),
    "RMSprop, centered": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "ASGD": partial(optim.ASGD, lr=0.05),
    "LBFGS": partial(optim.LBFGS, lr=0.1, max_iter=3),
    "Adafactor": partial(optim.Adafactor, lr=0.05),
}
for _name, _make in OPTIMIZERS.items():
    family.add(_name, lambda side, make=_make: side.fit(Task(optimizer=make)))
family.add(
    "Adam, capturable",
    lambda side: side.fit(Task(optimizer=partial(optim.Adam, lr=0.02, capturable=True)), max_epochs=1),
    raises="capturable",
)
for _name in ("SGD, fused", "Adam, fused", "Adam, foreach", "LBFGS"):
    family.add(
        f"{_name}, accumulated",
        lambda side, make=OPTIMIZERS[_name]: side.fit(Task(optimizer=make), accumulate_grad_batches=2),
    )
for _name in ("SGD, fused", "AdamW, fused, amsgrad", "Adam, foreach", "Adagrad, fused"):
    family.add(
        f"{_name}, as views",
        lambda side, make=OPTIMIZERS[_name]: side.fit(Task(optimizer=make)),
        gradient_as_bucket_view=True,
        plans=("default", "native", "ring"),
    )


@family()
def adafactor_of_transformers(side: Side) -> None:
    from transformers.optimization import Adafactor  # whose import takes seconds

    side.fit(Task(optimizer=Adafactor))
    side.fit(Task(optimizer=partial(Adafactor, lr=0.02, relative_step=False, scale_parameter=False, beta1=0.9)))


@family()
def muon(side: Side) -> None:
    class Two(Task):
        def configure_optimizers(self) -> Any:
            return optim.Muon([parameter for parameter in self.parameters() if parameter.ndim == 2], lr=0.02)

    side.fit(Two())


@family()
def groups_of_parameters(side: Side) -> None:
    class Groups(Task):
        def configure_optimizers(self) -> Any:
            weights = [parameter for parameter in self.parameters() if parameter.ndim > 1]
            rest = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
            groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.1}]
            return optim.AdamW(groups, lr=0.01)

    side.fit(Groups())


@family()
def a_group_added_in_training(side: Side) -> None:
    class Grows(Task):
        def configure_optimizers(self) -> Any:
            return sgd(self.net[0].parameters())

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.optimizers().add_param_group({"params": list(self.net[2].parameters()), "lr": 0.01})

    side.fit(Grows())


@family()
def state_kept_in_gradients_of_zero(side: Side) -> None:
    class Zeros(Task):
        def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

    side.fit(Zeros(optimizer=adamw))


class SAM(optim.Optimizer):
    """Sharpness-aware minimization: a step up, a second gradient there, and the base's step."""

    def __init__(self, parameters: Iterable[nn.Parameter], base: Callable[..., optim.Optimizer], rho: float) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for p in found:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=float(0.05 / (norm + 1e-12)))

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "old" in self.state[p]:
                    p.data = self.state[p]["old"]
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.climb()
        with torch.enable_grad():
            closure()
        self.descend()
        return loss


@family()
def sharpness_aware_with_one_closure_run_twice(side: Side) -> None:
    side.fit(Task(optimizer=lambda parameters: SAM(parameters, partial(optim.SGD, lr=0.1, momentum=0.9), 0.05)))


@family()
def sharpness_aware_by_hand(side: Side) -> None:
    class Sharp(ByHand):
        def configure_optimizers(self) -> Any:
            return SAM(self.parameters(), partial(optim.SGD, lr=0.1), 0.05)

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers().optimizer
            for step in (optimizer.climb, optimizer.descend):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                step()

    side.fit(Sharp())


class Lookahead(optim.Optimizer):
    """Slow weights that follow those of another optimizer every few steps."""

    def __init__(self, base: optim.Optimizer) -> None:
        self.base, self.count = base, 0
        super().__init__([p for group in base.param_groups for p in group["params"]], {"lr": 0.1})
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.count % 3 == 0:
                    slow += 0.5 * (p.detach() - slow)
                    p.data.copy_(slow)
        return loss


@family()
def lookahead(side: Side) -> None:
    side.fit(Task(optimizer=lambda parameters: Lookahead(adamw(parameters))))


class Lion(optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_((mean * 0.9 + p.grad * 0.1).sign(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)
        return loss


family.add("Lion", lambda side: side.fit(Task(optimizer=Lion)))


class Normed(optim.SGD):
    """Replaces the data of gradients within its step."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.data = p.grad.data / p.grad.data.norm().clamp(min=1e-6)
        super().step()
        return loss


family.add("gradients normalized within the step", lambda side: side.fit(Task(optimizer=partial(Normed, lr=0.01))))


@family()
def several_closures_in_a_step(side: Side) -> None:
    """Averages the gradients of three evaluations, between which weights move."""

    class Extra(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for _ in range(3):
                with torch.enable_grad():
                    loss = closure()
                super().step()
            return loss

    side.fit(Task(optimizer=partial(Extra, lr=0.05, momentum=0.5)))


@family()
def weights_edited_after_each_step(side: Side) -> None:
    class Projected(Task):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-0.3, 0.3)

    side.fit(Projected())


@family()
def weights_whose_data_is_replaced(side: Side) -> None:
    class Moves(Task):
        def on_train_batch_end(self, *_: Any) -> None:
            for parameter in self.parameters():
                parameter.data = parameter.data.clone() * 0.99

    side.fit(Moves())


class Tokens(Task):
    """Reads tokens by a table, which may have sparse gradients."""

    def __init__(self, table: nn.Module, tokens: int = 40, **options: Any) -> None:
        super().__init__(**options)
        self.table, self.tokens = table, tokens

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = (inputs[:, :3].abs() * 10).long() % self.tokens
        found = self.table(tokens)
        return self.net(inputs + (found.sum(dim=1) if found.ndim == 3 else found))


TABLES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(40, FEATURES),
    "embedding, padding": lambda: nn.Embedding(40, FEATURES, padding_idx=0),
    "embedding, largest norm": lambda: nn.Embedding(40, FEATURES, max_norm=1.0),
    "embedding, scaled by frequency": lambda: nn.Embedding(40, FEATURES, scale_grad_by_freq=True),
    "embedding bag": lambda: nn.EmbeddingBag(40, FEATURES, mode="mean"),
}
for _name, _table in TABLES.items():
    family.add(_name, lambda side, table=_table: side.fit(Tokens(table(), optimizer=adamw)))
family.add(
    "large embedding, dense",
    lambda side: side.fit(Tokens(nn.Embedding(5000, FEATURES), 5000, optimizer=adamw), max_epochs=1),
)
family.add(
    "sparse embedding, SGD",
    lambda side: side.fit(Tokens(nn.Embedding(40, FEATURES, sparse=True), optimizer=partial(optim.SGD, lr=0.1))),
)
family.add(
    "sparse embedding bag, Adagrad",
    lambda side: side.fit(Tokens(nn.EmbeddingBag(40, FEATURES, sparse=True), optimizer=partial(optim.Adagrad, lr=0.1))),
)


@family()
def sparse_embedding_with_sparse_adam(side: Side) -> None:
    class Two(Tokens):
        def __init__(self) -> None:
            super().__init__(nn.Embedding(40, FEATURES, sparse=True))
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return sgd(self.net.parameters()), optim.SparseAdam(list(self.table.parameters()), lr=0.05)

    side.fit(Two())


@family()
def sparse_embedding_accumulated(side: Side) -> None:
    table = nn.Embedding(40, FEATURES, sparse=True)
    side.fit(Tokens(table, optimizer=partial(optim.SGD, lr=0.1)), accumulate_grad_batches=2)


@family()
def sparse_gradient_kept_and_zeroed_in_place(side: Side) -> None:
    class Zeros(Tokens):
        def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

    side.fit(Zeros(nn.Embedding(40, FEATURES, sparse=True), optimizer=partial(optim.SGD, lr=0.1)))


# Learning rates ------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "StepLR, by step": ("step", partial(optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)),
    "StepLR, by epoch": ("epoch", partial(optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)),
    "cosine": ("step", partial(optim.lr_scheduler.CosineAnnealingLR, T_max=6)),
    "one cycle": ("step", partial(optim.lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=8)),
    "cyclic": ("step", partial(optim.lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3)),
    "lambda": ("step", partial(optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))),
    "warm restarts": ("epoch", partial(optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=1)),
}
for _name, (_interval, _schedule) in SCHEDULES.items():

    def _scheduled(side: Side, interval: str = _interval, schedule: Callable[[Any], Any] = _schedule) -> None:
        class Scheduled(Task):
            def configure_optimizers(self) -> Any:
                made = sgd(self.parameters())
                return {"optimizer": made, "lr_scheduler": {"scheduler": schedule(made), "interval": interval}}

        side.fit(Scheduled())

    family.add(f"schedule: {_name}", _scheduled, plans=("default", "native", "ring"))


@family()
def schedule_on_a_plateau_of_a_synchronized_metric(side: Side) -> None:
    class Plateau(Task):
        def configure_optimizers(self) -> Any:
            made = sgd(self.parameters())
            plateau = optim.lr_scheduler.ReduceLROnPlateau(made, patience=0, threshold=0.1)
            return {"optimizer": made, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    side.fit(Plateau(), max_epochs=4)


@family()
def averaged_model(side: Side) -> None:
    class Averaged(Task):
        def __init__(self) -> None:
            super().__init__(mlp(nn.BatchNorm1d(8)))
            self.average = optim.swa_utils.AveragedModel(self.net, use_buffers=True)
            self.average.requires_grad_(False)

        def on_train_batch_end(self, *_: Any) -> None:
            self.average.update_parameters(self.net)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("averaged", F.cross_entropy(self.average(batch[0]), batch[1]), sync_dist=True)

    side.fit(Averaged())


@family()
def rates_edited_by_hand(side: Side) -> None:
    class Warm(Task):
        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)
            optimizer.step(closure=closure)

    side.fit(Warm())


@family()
def zero_redundancy(side: Side) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class Sharded(Task):
        def configure_optimizers(self) -> Any:
            return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=optim.Adam, lr=0.02)

    module = Sharded()
    trainer = side.trainer(max_epochs=2)
    trainer.fit(module)
    side.note_module(module)


@family()
def teacher_that_follows_by_momentum(side: Side) -> None:
    class Distilled(Task):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = mlp().requires_grad_(False)

        def training_step(self, batch: Any, index: int) -> Any:
            return F.mse_loss(self(batch[0]), self.teacher(batch[0]) + 1)

        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    own.lerp_(other, 0.1)

    side.fit(Distilled())

"""What ranks do in tests of replicas that begin to differ: something changes in training, on some ranks or on all."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import models
import torch
import torch.distributed as dist
from jobs import distance, make_fabric, make_trainer, replicas_equal
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy
from lightning_autosync.engine.gradients import DenseGradients
from lightning_autosync.engine.replicas import ReplicaCheck
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.strategy import exact as replica_module
from lightning_autosync.strategy import replica_comparison
from lightning_autosync.strategy.base import accumulation
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.settings import StrategySettings

CHANGE_AT = 3
"""Batches before the change."""


class Trained:
    """A module's parameters that an optimizer trains, and their values at some moment."""

    def __init__(self, module: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        trained = {parameter for group in groups for parameter in group["params"]}
        own = set() if module is None else {one for one in module.parameters() if one.requires_grad}
        self._then = [(parameter, parameter.detach().clone()) for parameter in trained & own]

    def unmoved(self) -> bool:
        """Whether some have the same values since: they got no gradients, which keeps replicas equal too."""
        return any(torch.equal(parameter.detach(), then) for parameter, then in self._then)


class Changing(models.Plain):
    """Trains, and does something to itself once."""

    def __init__(self, change: Callable[[Changing], None], ranks: list[int]) -> None:
        super().__init__()
        self._change, self._ranks = change, ranks
        self.changed = Trained()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.trainer.global_step == CHANGE_AT and dist.get_rank() in self._ranks:
            self._change(self)
            self.changed = Trained(self, self.trainer.optimizers[0])


class EditsGradient(Changing):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        pass

    def on_after_backward(self) -> None:
        if self.trainer.global_step == CHANGE_AT and dist.get_rank() in self._ranks:
            self._change(self)


def replace(module: Changing) -> None:
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    module.trainer.optimizers[0].add_param_group({"params": [module.head.weight]})


def add_layer(module: Changing) -> None:
    torch.manual_seed(5)
    module.body = nn.Sequential(module.body, nn.Linear(8, 8, bias=False))


def freeze(module: Any) -> None:
    module.head.bias.requires_grad_(False)


def assign(module: Changing) -> None:
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    module.trainer.optimizers[0].param_groups[0]["params"] = list(module.parameters())


def learning_rate(module: Changing) -> None:
    module.trainer.optimizers[0].param_groups[0]["lr"] *= 3


def weight(module: Any) -> None:
    with torch.no_grad():
        module.head.bias[0] += 0.5


def gradient(module: Changing) -> None:
    module.head.bias.grad[0] += 0.5


CHANGES = {change.__name__: change for change in (replace, add_layer, freeze, assign, learning_rate, weight, gradient)}


def change(name: str, where: list[int], **strategy: Any) -> str | float:
    """The error of training in which the ranks ``where`` change something.

    Without an error, how far replicas are apart; infinity if parameters no longer train.
    """
    seed_everything(3)
    kind = EditsGradient if name == "gradient" else Changing
    module = kind(CHANGES[name], where)
    try:
        make_trainer(AutoSyncStrategy(**strategy)).fit(module)
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return math.inf if module.changed.unmoved() else apart(module)


def convert(module: Any) -> None:
    module.half()


class Exports(models.Plain):
    """Does something to itself when it has trained."""

    def __init__(self, change: Callable[[Any], None], ranks: list[int]) -> None:
        super().__init__()
        self._change, self._ranks = change, ranks

    def on_train_end(self) -> None:
        if dist.get_rank() in self._ranks:
            self._change(self)


class Exporter(Callback):
    """Lets a callback do it."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        Exports.on_train_end(module)


def change_at_end(name: str, where: list[int], by_callback: bool = False) -> str | int:
    """The error of training after which the ranks ``where`` change something; without one, the number of steps."""
    seed_everything(3)
    change = {"weight": weight, "convert": convert}[name]
    kind = type("Quiet", (Exports,), {"on_train_end": models.Plain.on_train_end}) if by_callback else Exports
    trainer = make_trainer(AutoSyncStrategy(), callbacks=[Exporter()] if by_callback else [])
    try:
        trainer.fit(kind(change, where))
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return int(trainer.global_step)


class Pretrained(models.Plain):
    """Trains a head on a frozen body, which one rank alone loads before training."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank
        self.body.requires_grad_(False)

    def on_train_start(self) -> None:
        if dist.get_rank() == self._rank:
            self.body.load_state_dict({name: tensor + 0.5 for name, tensor in self.body.state_dict().items()})


def load_frozen(rank: int | None, **strategy: Any) -> str | float:
    """The error of training on a frozen body that one rank loads; without one, how far replicas are apart."""
    seed_everything(3)
    module = Pretrained(rank)
    try:
        make_trainer(AutoSyncStrategy(**strategy)).fit(module)
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return apart(module)


def new_buffer(module: Changing) -> None:
    module.register_buffer("late", torch.full((3,), 1.0 + dist.get_rank(), dtype=torch.float64))


def longer_buffer(module: Changing) -> None:
    module.mark = torch.full((7,), 1.0 + dist.get_rank())


def no_buffer(module: Changing) -> None:
    del module.mark


class Marked(Changing):
    """With a buffer that is each rank's own but for what rank 0 broadcasts."""

    def __init__(self, change: Callable[[Changing], None], ranks: list[int]) -> None:
        super().__init__(change, ranks)
        self.register_buffer("mark", torch.zeros(5))
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen += [float(buffer.sum()) for buffer in self.buffers()]
        return super().training_step(batch, index)


def change_buffers(name: str, where: list[int], ddp: bool = False) -> list[float] | str:
    """What a rank sees of its buffers while it trains, or the error."""
    seed_everything(3)
    changes = {change.__name__: change for change in (new_buffer, longer_buffer, no_buffer)}
    module = Marked(changes[name], where)
    try:
        make_trainer(DDPStrategy() if ddp else AutoSyncStrategy(timeout=60.0)).fit(module)
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return module.seen


def apart(module: nn.Module) -> float:
    """How far the parameters of replicas are apart."""
    worst = 0.0
    for tensor in module.parameters():
        first = tensor.detach().clone()
        dist.broadcast(first, src=0)
        worst = max(worst, float((first - tensor.detach()).abs().max()))
    return worst


def assign_in_place(module: nn.Module) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


def new_head(module: nn.Module) -> None:
    torch.manual_seed(5)
    module.head = nn.Linear(8, models.CLASSES)


FABRIC_CHANGES = {change.__name__: change for change in (assign_in_place, new_head, freeze, weight)}


def change_under_fabric(
    name: str, where: list[int], plain_backward: bool = False, evaluating: bool = False, **strategy: Any
) -> str | float:
    """As `change`, in a loop of the user's own, which may leave the module in evaluation, as for fixed statistics."""
    fabric = make_fabric(AutoSyncFabricStrategy(**strategy))
    seed_everything(3)
    plain = models.Plain()
    module, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    module.train(not evaluating)
    inputs = torch.randn(16, 4, models.FEATURES, generator=torch.Generator().manual_seed(dist.get_rank()))
    changed = Trained()
    try:
        for step, batch in enumerate(inputs):
            if step == CHANGE_AT and dist.get_rank() in where:
                FABRIC_CHANGES[name](plain)
                optimizer.param_groups[0]["params"] = list(plain.parameters())
                changed = Trained(plain, optimizer)
            loss = module(batch).square().mean()
            loss.backward() if plain_backward else fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        fabric.strategy.teardown()
    return math.inf if changed.unmoved() else apart(plain)


class InTurn(models.Plain):
    """Two parts, of which one trains while the other is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]

    def training_step(self, batch: Any, index: int) -> None:
        inputs, labels = batch
        for part, other, optimizer in zip(
            (self.body, self.head), (self.head, self.body), self.optimizers(), strict=True
        ):
            part.requires_grad_(True)
            other.requires_grad_(False)
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(inputs), labels))
            optimizer.step()


def in_turn(**strategy: Any) -> dict[str, float]:
    """How far networks that are frozen in turn end from DDP's, and how often a plan was made."""
    trained = []
    plans = 0

    class Counted(replica_module.Engine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal plans
            plans += 1
            super().__init__(*arguments, **options)

    own, replica_module.Engine = replica_module.Engine, Counted  # type: ignore[misc]
    try:
        for method in (AutoSyncStrategy(**strategy), DDPStrategy(find_unused_parameters=True)):
            seed_everything(3)
            module = InTurn()
            if isinstance(method, DDPStrategy):
                module.requires_grad_(True)  # DDP leaves out what is frozen when it begins
            make_trainer(method).fit(module)
            trained.append(module)
    finally:
        replica_module.Engine = own  # type: ignore[misc]
    return {"distance": distance(*trained), "plans": plans}


def _train_in_turn(
    strategy: Any, began: Callable[[int], None] = lambda step: None, looks: bool = False, odd: int | None = None
) -> nn.Module:
    """A module of two parts, of which one trains while the other is frozen, in a loop of the user's own.

    Args:
        strategy: Fabric's strategy.
        began: called before each backward pass with its number.
        looks: whether rank 0 runs the module more often than the other ranks.
        odd: the step before which rank 1 freezes a parameter that trains elsewhere.
    """
    fabric = make_fabric(strategy)
    seed_everything(3)
    plain = models.Plain()
    module, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    inputs = torch.randn(12, 4, models.FEATURES, generator=torch.Generator().manual_seed(dist.get_rank()))
    try:
        for step, batch in enumerate(inputs):
            plain.body.requires_grad_(step % 2 == 0)
            plain.head.requires_grad_(step % 2 == 1)
            if step == odd and dist.get_rank() == 1:
                plain.head.bias.requires_grad_(False)
            for _ in range(step if looks and dist.get_rank() == 0 else 0):
                module(batch)
            loss = module(batch).square().mean()
            began(step)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        fabric.strategy.teardown()
    return plain


def in_turn_under_fabric(**strategy: Any) -> dict[str, Any]:
    """How far networks that are frozen in turn end from DDP's, and what their passes exchange.

    Returns:
        The largest distance of weights, the largest number of exchanges of one message in each pass, and the number of
        collectives that gather data of all ranks after the second pass.
    """
    passes: list[Counter[int]] = []
    gathers: list[int] = []
    start = DenseGradients.start

    def counted(self: DenseGradients) -> None:
        passes[-1][self.message.index] += 1
        start(self)

    with (
        mock.patch.object(DenseGradients, "start", counted),
        mock.patch.object(replica_comparison, "gather_json", wraps=replica_comparison.gather_json) as gather,
    ):

        def began(step: int) -> None:
            passes.append(Counter())
            gathers.append(gather.call_count)

        ours = _train_in_turn(AutoSyncFabricStrategy(**strategy), began, looks=True)
        after = gather.call_count - gathers[2]
    theirs = _train_in_turn(FabricDDP(find_unused_parameters=True))
    return {"distance": distance(ours, theirs), "exchanges": [max(one.values()) for one in passes], "gathers": after}


def odd_in_turn(**strategy: Any) -> str:
    """The error where networks are frozen in turn, and one rank then freezes more than the others."""
    try:
        _train_in_turn(AutoSyncFabricStrategy(**strategy), odd=7)
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def new_head_in_turn(**strategy: Any) -> float:
    """How far replicas are apart that get a new head while the ranks compare their parameters in each pass."""
    fabric = make_fabric(AutoSyncFabricStrategy(check_replicas=1, **strategy))
    seed_everything(3)
    plain = models.Plain()
    module, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    inputs = torch.randn(8, 4, models.FEATURES, generator=torch.Generator().manual_seed(dist.get_rank()))
    try:
        for step, batch in enumerate(inputs):
            plain.body.requires_grad_(step % 2 == 0)
            if step == CHANGE_AT:
                new_head(plain)
                optimizer.param_groups[0]["params"] = list(plain.parameters())
                changed = Trained(plain.head, optimizer)
            for _ in range(step * dist.get_rank()):
                module(batch)
            fabric.backward(module(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        fabric.strategy.teardown()
    return math.inf if changed.unmoved() else apart(plain)


def other_forms(dtype: str = "float32", rows: int = 6) -> str:
    """The error of a check of weights that have another dtype or shape on rank 1."""
    weights = torch.ones(6, 4)
    if dist.get_rank() == 1:
        weights = weights[:rows].to(getattr(torch, dtype))
    try:
        ReplicaCheck(1).run({"head": torch.ones(2), "body": weights})
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _step(module: nn.ModuleDict, replica: ExactReplica, parts: list[str]) -> None:
    module.zero_grad()
    with replica.backward():
        sum(module[part](torch.ones(1, 3)).sum() for part in parts).backward()


def _replica(**settings: Any) -> tuple[nn.ModuleDict, ExactReplica]:
    module = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in ("shared", "mine", "late")})
    module["late"].requires_grad_(False)
    return module, ExactReplica(module, StrategySettings(**settings), 1, 2)


def unused_when_changed(**settings: Any) -> list[float]:
    """A gradient that only rank 0 has: in a usual pass, and in the one in which another part begins to train."""
    module, replica = _replica(**settings)
    used = ["shared", "mine"] if dist.get_rank() == 0 else ["shared"]
    _step(module, replica, used)
    found = [float(module["mine"].weight.grad[0, 0])]
    module["late"].requires_grad_(True)
    _step(module, replica, [*used, "late"])
    found += [float(module[part].weight.grad[0, 0]) for part in ("mine", "late")]
    dist.barrier()
    replica.close()
    return found


def one_for_another() -> list[float]:
    """Gradients of a part that begins to train as another one is frozen."""
    module, replica = _replica()
    _step(module, replica, ["shared", "mine"])
    module["mine"].requires_grad_(False)
    module["late"].requires_grad_(True)
    _step(module, replica, ["shared", "late"])
    dist.barrier()
    replica.close()
    return [float(module[part].weight.grad[0, 0]) for part in ("shared", "late")]


def other_dtype(**settings: Any) -> list[float]:
    """A gradient where each rank has another, in every pass after the parameters got another dtype."""
    module, replica = _replica(**settings)
    found = []
    for dtype in (torch.float32, torch.float64, torch.float64, torch.bfloat16):
        module.to(dtype).zero_grad()
        with replica.backward():
            (module["shared"](torch.ones(1, 3, dtype=dtype)).sum() * dist.get_rank()).backward()
        found.append(float(module["shared"].weight.grad[0, 0]))
    dist.barrier()
    replica.close()
    return found


def error_while_accumulating() -> float:
    """A gradient after an error in a pass of which no other rank knows."""
    module, replica = _replica()
    with contextlib.suppress(MemoryError), accumulation(replica), replica.backward():
        raise MemoryError
    _step(module, replica, ["shared"])
    dist.barrier()
    replica.close()
    return float(module["shared"].weight.grad[0, 0])


__all__ = ["change", "error_while_accumulating", "in_turn", "replicas_equal", "unused_when_changed"]

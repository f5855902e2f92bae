"""Loops of the user's own, by Fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from models import CLASSES, FEATURES, loader
from torch import nn
from torch.nn import functional as F

from parity.case import Family
from parity.parts import HIDDEN, Task, adamw, mlp, sgd

if TYPE_CHECKING:
    from parity.side import Side

family = Family("Fabric")


def train(
    side: Side,
    net: nn.Module,
    make: Callable[[Any], Any] = sgd,
    edit: Callable[..., None] | None = None,
    accumulate: int = 1,
    evaluate: bool = False,
    **arguments: Any,
) -> Any:
    """Train for two epochs; ``edit(fabric, module, optimizer)`` runs between backward and the step."""
    fabric = side.fabric(**arguments)
    module, optimizer = fabric.setup(net, make(net.parameters()))
    data = fabric.setup_dataloaders(loader(16))
    for _ in range(2):
        for index, (inputs, labels) in enumerate(data):
            local = index % accumulate != accumulate - 1
            with fabric.no_backward_sync(module, enabled=local):
                loss = F.cross_entropy(module(inputs).float(), labels)
                fabric.backward(loss / accumulate)
            side.note_gradients(net)
            if local:
                continue
            if edit is not None:
                edit(fabric, module, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            side.note("loss", fabric.all_reduce(loss.detach(), reduce_op="mean"))
        if evaluate:
            module.eval()
            with torch.no_grad():
                side.note("evaluated", [module(inputs) for inputs, _ in data])
            module.train()
    side.note_module(net)
    side.note("optimizer", optimizer.state_dict())
    fabric.strategy.teardown()
    return fabric


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": mlp,
    "batch norm": lambda: mlp(nn.BatchNorm1d(HIDDEN)),
    "dropout": lambda: mlp(nn.Dropout(0.3)),
    "frozen part": lambda: nn.Sequential(nn.Linear(FEATURES, HIDDEN).requires_grad_(False), nn.Linear(HIDDEN, CLASSES)),
}
for _name in NETS:
    for _how, _settings in {
        "": {},
        ", accumulated": {"accumulate": 2},
        ", evaluated": {"evaluate": True},
        ", bf16-mixed": {"precision": "bf16-mixed"},
    }.items():
        family.add(
            f"fabric, {_name}{_how}",
            lambda side, net=NETS[_name], settings=_settings: train(side, net(), **settings),
            plans=("default", "native", "ring"),
        )
for _precision in ("bf16-true", "64-true"):
    family.add(
        f"fabric, {_precision}",
        lambda side, precision=_precision: train(side, mlp(), precision=precision),
        plans=("default", "native"),
    )


def _clamp(fabric: Any, module: Any, optimizer: Any) -> None:
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-0.02, 0.02)


def _replace(fabric: Any, module: Any, optimizer: Any) -> None:
    for parameter in module.parameters():
        parameter.grad = parameter.grad.sign() * 0.01


EDITS: dict[str, Callable[..., None]] = {
    "clipped by norm": lambda fabric, module, optimizer: fabric.clip_gradients(module, optimizer, max_norm=0.05),
    "clipped by value": lambda fabric, module, optimizer: fabric.clip_gradients(module, optimizer, clip_val=0.02),
    "data replaced": _clamp,
    "replaced": _replace,
}
for _name, _edit in EDITS.items():
    family.add(f"fabric, {_name}", lambda side, edit=_edit: train(side, mlp(), edit=edit))
family.add(
    "fabric, clipped and accumulated",
    lambda side: train(side, mlp(), adamw, edit=EDITS["clipped by norm"], accumulate=2),
)
family.add("fabric, fused", lambda side: train(side, mlp(), lambda p: torch.optim.Adam(p, lr=0.02, fused=True)))
family.add("fabric, as views", lambda side: train(side, mlp()), gradient_as_bucket_view=True)
family.add("fabric, static graph", lambda side: train(side, mlp()), static_graph=True, plans=("default", "native"))


@family()
def two_modules(side: Side) -> None:
    fabric = side.fabric()
    body, head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
    first, one = fabric.setup(body, sgd(body.parameters()))
    second, other = fabric.setup(head, adamw(head.parameters()))
    for inputs, labels in fabric.setup_dataloaders(loader(16)):
        fabric.backward(F.cross_entropy(second(torch.tanh(first(inputs))), labels))
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    side.note_module(body)
    side.note_module(head)
    fabric.strategy.teardown()


@family()
def adversaries_of_two_modules(side: Side) -> None:
    fabric = side.fabric()
    networks = [
        nn.Linear(FEATURES, FEATURES),
        nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)),
    ]
    (generator, one), (critic, other) = (fabric.setup(net, adamw(net.parameters())) for net in networks)
    for inputs, _ in fabric.setup_dataloaders(loader(16)):
        fake = generator(inputs)
        other.zero_grad()
        fabric.backward(F.softplus(-critic(inputs)).mean() + F.softplus(critic(fake.detach())).mean())
        other.step()
        one.zero_grad()
        fabric.backward(-critic(fake).mean())
        one.step()
    for net in networks:
        side.note_module(net)
    fabric.strategy.teardown()


@family()
def steps_of_a_lightning_module(side: Side) -> None:
    class Own(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            return self.loss(batch)

    fabric = side.fabric()
    inner = Own(mlp(nn.BatchNorm1d(HIDDEN)))
    module, optimizer = fabric.setup(inner, inner.configure_optimizers())
    for index, batch in enumerate(fabric.setup_dataloaders(loader(16))):
        optimizer.zero_grad()
        fabric.backward(module.training_step(batch, index))
        optimizer.step()
    side.note_module(inner)
    fabric.strategy.teardown()


@family()
def another_method_marked_as_forward(side: Side) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, inputs: Any) -> Any:
            raise NotImplementedError

        def classify(self, inputs: Any) -> Any:
            return self.net(inputs)

    fabric = side.fabric()
    inner = Odd()
    module, optimizer = fabric.setup(inner, sgd(inner.parameters()))
    module.mark_forward_method("classify")
    for inputs, labels in fabric.setup_dataloaders(loader(16)):
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(module.classify(inputs), labels))
        optimizer.step()
    side.note_module(inner)
    fabric.strategy.teardown()


def _steps(fabric: Any, module: Any, optimizer: Any, batches: list[Any]) -> None:
    for inputs, labels in batches:
        fabric.backward(F.cross_entropy(module(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()


def _resume(side: Side, first: str | None, second: str | None) -> None:
    batches = list(loader(32))[side.rank :: 2]
    path = side.folder / "kept.ckpt"
    for plan, part in ((first, batches[:4]), (second, batches[4:])):
        torch.manual_seed(len(side.notes))
        fabric = side.fabric(plan)
        net = mlp(nn.BatchNorm1d(HIDDEN))
        module, optimizer = fabric.setup(net, adamw(net.parameters()))
        state = {"model": module, "optimizer": optimizer, "step": 0}
        if path.exists():
            side.note("rest", sorted(fabric.load(path, state)))
            side.note("step", state["step"])
        fabric.barrier()
        _steps(fabric, module, optimizer, part)
        fabric.save(path, {**state, "step": 4})
        side.note_module(net)
        side.note("optimizer", optimizer.state_dict())
        fabric.strategy.teardown()


family.add("fabric, saved and loaded", lambda side: _resume(side, None, None))
family.add("fabric, saved by DDP, loaded by AutoSync", lambda side: _resume(side, "ddp", None))
family.add("fabric, saved by AutoSync, loaded by DDP", lambda side: _resume(side, None, "ddp"))


@family(plans=("default", "native"))
def collectives_of_fabric(side: Side) -> None:
    fabric = side.fabric()
    own = torch.tensor([1.0, 2.0]) * (fabric.global_rank + 1)
    side.note("gathered", fabric.all_gather({"x": own}))
    side.note("sum", fabric.all_reduce(own.clone(), reduce_op="sum"))
    side.note("told", fabric.broadcast({"rank": fabric.global_rank}, src=1))
    side.note("place", [fabric.global_rank, fabric.local_rank, fabric.world_size, fabric.is_global_zero])
    with fabric.rank_zero_first():
        pass
    fabric.barrier()


@family(plans=("default", "native", "ring"))
def gradient_norm_that_is_not_finite(side: Side) -> None:
    fabric = side.fabric()
    net = mlp()
    module, optimizer = fabric.setup(net, sgd(net.parameters()))
    fabric.backward(module(torch.full((2, FEATURES), float("inf"))).sum())
    try:
        fabric.clip_gradients(module, optimizer, max_norm=1.0)
        raised = ""
    except RuntimeError as error:
        raised = str(error)[:40]
    side.note("raised", raised)
    fabric.strategy.teardown()

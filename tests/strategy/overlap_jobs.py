"""What ranks do in tests of ``overlap="step"``: train with it and without, and compare bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jobs
import models
import torch
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import step_overlap
from lightning_autosync.engine.due_parameter import due_of
from lightning_autosync.strategy import overlap as overlap_lines

SMALL = {"bucket_cap_mb": 1e-4}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.05, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.05),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "foreach": partial(torch.optim.AdamW, lr=0.05, foreach=True),
    "fused": partial(torch.optim.Adam, lr=0.05, fused=True),
    "learning rate as a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.05)),
}


class Chosen(models.Plain):
    """Trains with one of the optimizers, in two groups, by a schedule of learning rates per step."""

    optimizer = "SGD"

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.body.parameters()), "weight_decay": 0.1}, {"params": self.head.parameters()}]
        optimizer = OPTIMIZERS[self.optimizer](groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@contextmanager
def late_steps() -> Iterator[list[int]]:
    """A list to which the number of parameters that are stepped late, and those whose gradient came late, is added."""
    found = [0, 0]
    real = step_overlap._apply

    def count(due: Any) -> None:
        found[0] += sum(what.step is not None for _, what in due)
        found[1] += sum(what.step is None for _, what in due)
        real(due)

    with mock.patch.object(step_overlap, "_apply", count):
        yield found


def train(
    module: LightningModule, strategy: dict[str, Any], half: bool = False, **arguments: Any
) -> tuple[dict[str, Tensor], list[int], Any]:
    """Train with ``strategy``; returns the weights, the counts of `late_steps`, and the Trainer."""
    options = dict(strategy)
    if "cluster" in options:
        options["cluster"] = ClusterSpec.from_dict(options["cluster"])
    plugins = jobs._scaler(half)
    # Of the 8 batches of an epoch, those that overflow make no step; at least 20 steps are made.
    arguments.setdefault("max_epochs", 4 if arguments.get("accumulate_grad_batches", 1) == 1 else 14)
    with late_steps() as late:
        trainer = jobs.make_trainer(AutoSyncStrategy(**options), plugins, **arguments)
        trainer.fit(module)
    return {name: value.clone() for name, value in jobs.state(module).items()}, late, trainer


def both(
    make: Callable[[], LightningModule], strategy: dict[str, Any] | None = None, debug: bool = False, **arguments: Any
) -> list[Any]:
    """What overlap changes (names of weights, ``seen``), whether weights moved, and the counts of `late_steps`."""
    weights, late, seen = [], [], []
    for options in ({}, {"overlap": "step", "overlap_debug": debug}):
        seed_everything(3)
        module = make()
        start = copy.deepcopy(jobs.state(module))
        found, counted, _ = train(module, {**(strategy or {}), **options}, **copy.deepcopy(arguments))
        weights.append(found)
        late.append(counted)
        seen.append(getattr(module, "seen", []))
    assert late[0] == [0, 0]
    different = [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])]
    moved = any(not torch.equal(value, weights[0][name].to(value.dtype)) for name, value in start.items())
    return [different if seen[0] == seen[1] else [*different, "seen"], moved, late[1]]


def compare(model: str, strategy: dict[str, Any] | None = None, **arguments: Any) -> list[Any]:
    return both(globals().get(model) or getattr(models, model), strategy, **arguments)


def clipped(model: str, strategy: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """The weights after training with gradients clipped by norm, and the counts of `late_steps`, by ``overlap``."""
    found: dict[str, Any] = {}
    for overlap in (None, "step"):
        seed_everything(3)
        make = globals().get(model) or getattr(models, model)
        options = {**strategy, "overlap": overlap}
        weights, late, _ = train(make(), options, **{"gradient_clip_val": 0.05, **copy.deepcopy(arguments)})
        found[str(overlap)] = {name: value.tolist() for name, value in weights.items()}, late
    return found


def told(model: str, **arguments: Any) -> list[str]:
    """What rank 0 is told about steps that wait, while it trains with overlap."""
    with mock.patch.object(overlap_lines, "rank_zero_info") as tell:
        train(globals()[model](), {**arguments.pop("strategy"), "overlap": "step"}, **arguments)
    return [call.args[0] for call in tell.call_args_list]


class ChangesGradients(models.Plain):
    """Changes its gradients before they are clipped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(3.0)


class Scaled(models.Plain):
    """Notes the loss scale, which grows after three steps; two steps of each epoch overflow, in one layer on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_start(self) -> None:
        self.trainer.precision_plugin.scaler.set_growth_interval(3)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen.append(self.trainer.precision_plugin.scaler.get_scale())
        loss = super().training_step(batch, index)
        layer = {2: self.body, 3: self.head}.get(index)
        return loss if layer is None or self.global_rank == 0 else loss + layer.weight.sum() * torch.inf


class ScaledAndSeenEarly(Scaled):
    """Rank 0 reads its gradients before they are unscaled."""

    def on_after_backward(self) -> None:
        if self.global_rank == 0:
            self.seen += [parameter.grad.isfinite().all().item() for parameter in self.parameters()]


class ScaledAndSeen(Scaled):
    """Reads gradients after they were unscaled."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [parameter.grad.tolist() for parameter in self.parameters() if parameter.grad.isfinite().all()]


class ScaledAndFused(Scaled):
    """Its optimizer unscales gradients itself."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05, fused=True)


class ScaledByOwnClass(Scaled):
    """Its scaler is of a class of the user's."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.trainer.precision_plugin.scaler.__class__ = type("OwnScaler", (torch.amp.GradScaler,), {})


class ScaledInParts(Scaled):
    """Steps its layers one after the other, by two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.body, self.head)]


class ScaledAndUnscaled(Scaled):
    """Asks the scaler itself to unscale gradients, and clips them before its step, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        scaler = self.trainer.precision_plugin.scaler
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()


class ClipsParts(models.Plain):
    """Clips the gradients of its layers one after the other, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizers = self.optimizers()
        loss = super().training_step(batch, index)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.body, self.head)]


def clipped_by_fabric(strategy: dict[str, Any]) -> dict[str, Any]:
    """The norms that Fabric returns and the weights after some steps, and the counts of `late_steps`, by overlap."""
    found: dict[str, Any] = {}
    for overlap in (None, "step"):
        options = {**strategy, "cluster": ClusterSpec.from_dict(strategy["cluster"])}
        fabric = jobs.make_fabric(AutoSyncFabricStrategy(overlap=overlap, **options))
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        module, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
        norms = []
        with late_steps() as late:
            for step in range(20):
                inputs = torch.full((4, 5), 0.1 * step + fabric.global_rank)
                fabric.backward(module(inputs).square().sum())
                norms.append(float(fabric.clip_gradients(module, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
            fabric.strategy.settle()
        found[str(overlap)] = norms, [parameter.tolist() for parameter in model.parameters()], late
        fabric.strategy.teardown()
    return found


def scaled_by_fabric(strategy: dict[str, Any], clip: dict[str, float]) -> dict[str, Any]:
    """The weights and loss scales of 22 steps under Fabric, of which two overflow, and the late steps, by overlap."""
    found: dict[str, Any] = {}
    for overlap in (None, "step"):
        options = {**strategy, "cluster": ClusterSpec.from_dict(strategy["cluster"])}
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=3)
        precision = FabricMixedPrecision("16-mixed", "cpu", scaler=scaler)
        fabric = jobs.make_fabric(AutoSyncFabricStrategy(overlap=overlap, **options), (precision,))
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        module, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
        scales = []
        with late_steps() as late:
            for step in range(22):
                inputs = torch.full((4, 5), 0.1 * step + fabric.global_rank)
                infinite = step in (4, 5) and fabric.global_rank == 1
                fabric.backward(module(inputs).square().sum() * (torch.inf if infinite else 1.0))
                if clip:
                    fabric.clip_gradients(module, optimizer, **clip)
                optimizer.step()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
            fabric.strategy.settle()
        found[str(overlap)] = scales, [parameter.tolist() for parameter in model.parameters()], late
        fabric.strategy.teardown()
    return found


def optimizers(names: Iterable[str], **arguments: Any) -> dict[str, list[Any]]:
    """The result of `both` for some of the optimizers, in 20 steps."""

    def make(name: str) -> LightningModule:
        module = Chosen()
        module.optimizer = name
        return module

    arguments = {"max_epochs": 3, "max_steps": 20, **arguments}
    return {name: both(partial(make, name), SMALL, **arguments) for name in names}


class Sees(models.Plain):
    """Notes what it reads in ``seen``, first of all its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.seen.append(float(loss.detach()))
        return loss


class Reversed(Sees):
    """Its layers run in another order than they were registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(8, models.CLASSES), nn.Linear(models.FEATURES, 8)


class ReadOutside(Sees):
    """A weight is read outside of its module, which is never called."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(inputs, self.body.weight) + self.body.bias))


class WithReference(Sees):
    """A second model runs before the first one. Notes how many parameters of the first one it has completed."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = copy.deepcopy(self.body).requires_grad_(False)
        self.due: list[int] = []
        self.completed = 0

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.due.append(sum(due_of(each) is not None for each in self.parameters()))
        self.seen.append(float(self.reference(batch[0]).detach().sum()))
        self.completed += self.due[-1] - sum(due_of(each) is not None for each in self.parameters())
        return super().training_step(batch, index)


class Skips(Sees):
    """A layer runs in every second step only, so that its gradient must not be left over from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(8, models.CLASSES)
        self.steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += 1
        hidden = torch.tanh(self.body(inputs))
        return self.head(hidden) + (self.sometimes(hidden) if self.steps % 2 else 0)


class Settles(Sees):
    """Settles when nothing is due, when all is, and when a part is."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        hidden = torch.tanh(self.body(batch[0]))
        if index % 3 == 0:
            self.trainer.strategy.settle()
            self.trainer.strategy.settle()
        loss = F.cross_entropy(self.head(hidden), batch[1])
        self.seen.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step % 4 == 0:
            self.trainer.strategy.settle()


class Functional(Sees):
    """Calls a layer with other parameters, and differentiates by `torch.func` for each sample."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.trainer.strategy.settle()  # torch.func wraps its arguments before their class is asked
        gradients = torch.func.vmap(torch.func.grad(self._sample), in_dims=(None, 0))
        found = gradients(dict(self.head.named_parameters()), torch.zeros(2, 8) + 0.5)
        self.seen.append(float(found["weight"].detach().sum()))
        changed = {name: each * 1.1 for name, each in self.body.named_parameters()}
        return self.head(torch.tanh(torch.func.functional_call(self.body, changed, inputs)))

    def _sample(self, parameters: dict[str, Tensor], hidden: Tensor) -> Tensor:
        return torch.func.functional_call(self.head, parameters, hidden).square().sum()


class FunctionalCall(Sees):
    """Calls a layer with its own parameters, while their steps are due."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.func.functional_call(self.body, dict(self.body.named_parameters()), (inputs,))
        return self.head(torch.tanh(hidden))


class NeverCalled(Sees):
    """Attention reads the weights of a module that is never called, and an LSTM keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(models.FEATURES, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.recurrent(inputs[:, None].expand(-1, 3, -1))
        attended, _ = self.attention(hidden, hidden, hidden)
        return self.head(torch.tanh(self.body(inputs) + attended.sum(1)))


@torch.compile(backend="aot_eager")
def compiled_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


class CompiledLoss(Sees):
    """A compiled function, which is not the module's, takes a weight. Adam rounds otherwise in steps it compiles."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = compiled_loss(torch.tanh(self.body(batch[0])), self.head.weight, batch[1])
        self.seen.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class CompiledMethod(Sees):
    """Calls a method of its own that it has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._compiled = torch.compile(self._compute, backend="aot_eager")

    def _compute(self, inputs: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.body(inputs)), self.head.weight, self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._compiled(inputs)


def compiled_whole() -> Any:
    """A compiled LightningModule."""
    return torch.compile(models.Plain(), backend="aot_eager")


class ByHand(Sees):
    """Manual optimization that reads gradients between the backward pass and the step in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, index))
        if index % 2:
            self.seen.append(float(self.head.weight.grad.sum()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 3 == 0)


class Validates(Sees):
    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(float(F.cross_entropy(self(batch[0]), batch[1])))

    val_dataloader = models.Plain.train_dataloader


class Peeks(Callback):
    """Reads weights, and copies them to another module, after each batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        teacher = copy.deepcopy(module.head)
        module.seen.append(float(sum(each.detach().abs().sum() for each in module.body.parameters())))
        module.seen.append(float(nn.utils.parameters_to_vector(teacher.parameters()).sum()))
        module.seen.append(float(trainer.optimizers[0].state_dict()["state"][0]["momentum_buffer"].sum()))


def events(folder: str) -> dict[str, list[Any]]:
    """`both` with callbacks that read weights: averages, checkpoints and validation within an epoch."""
    found = {
        "peeks": both(Sees, SMALL, callbacks=[Peeks()]),
        "averages": both(Sees, SMALL, callbacks=[WeightAveraging()]),
        "validation": both(Validates, SMALL, val_check_interval=3, limit_val_batches=1),
    }
    checkpoints = []
    for place, overlap in (("waits", None), ("overlaps", "step")):
        saving = ModelCheckpoint(f"{folder}/{place}", every_n_train_steps=3, save_top_k=-1, filename="{step}")
        options = {**SMALL, "overlap": overlap}
        seed_everything(3)
        _, late, _ = train(Sees(), options, callbacks=[saving], enable_checkpointing=True)
        saved = sorted(Path(folder, place).iterdir())
        checkpoints.append([torch.load(path, weights_only=False) for path in saved])
    parts = [[_tensors(checkpoint) for checkpoint in each] for each in checkpoints]
    different = [
        name
        for ours, theirs in zip(*parts, strict=True)
        for name, value in theirs.items()
        if not torch.equal(ours[name], value)
    ]
    found["checkpoints"] = [different, len(checkpoints[0]) > 3, late]
    return found


def _tensors(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of a checkpoint, and momenta of its optimizer."""
    state = checkpoint["optimizer_states"][0]["state"]
    momenta = {f"momentum {place}": each["momentum_buffer"] for place, each in state.items()}
    return {**checkpoint["state_dict"], **momenta}


def second_model() -> tuple[list[int], int]:
    """How many parameters of a model are due at the beginning of each step, and how many another model completes."""
    seed_everything(3)
    module = WithReference()
    train(module, {**SMALL, "overlap": "step"}, max_epochs=1)
    return module.due, module.completed


def compiled() -> tuple[bool, list[str]]:
    """Whether a module that Fabric compiles trains alike with overlap and without, where some steps are late.

    With it, what rank 0 is told about steps that wait.
    """
    found = []
    for overlap in (None, "step"):
        fabric = jobs.make_fabric(AutoSyncFabricStrategy(overlap=overlap, **SMALL))
        torch.manual_seed(3)
        module = torch.compile(models.Plain(), backend="aot_eager")
        wrapped, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.05))
        with late_steps() as late, mock.patch.object(overlap_lines, "rank_zero_info") as tell:
            for inputs, labels in models.loader(samples=48):
                fabric.backward(F.cross_entropy(wrapped(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: value.clone() for name, value in jobs.state(module).items()})
        fabric.strategy.teardown()
    equal = all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    return late[0] > 0 and equal, [call.args[0] for call in tell.call_args_list]


def with_fabric(overlap: str | None, cleared: str) -> list[list[float]]:
    """The weights of two modules that a loop of the user's own trains; it clears gradients where ``cleared`` says."""
    fabric = jobs.make_fabric(AutoSyncFabricStrategy(overlap=overlap, **SMALL))
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(models.FEATURES, 8), nn.BatchNorm1d(8))
    head = nn.Linear(8, models.CLASSES)
    wrapped_body, first = fabric.setup(body, torch.optim.Adam(body.parameters(), lr=0.05))
    wrapped_head = fabric.setup(head)
    second = fabric.setup_optimizers(torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9))
    evaluated = []
    for index, (inputs, labels) in enumerate(fabric.setup_dataloaders(models.loader(samples=128))):
        accumulating = index % 3 == 0
        with fabric.no_backward_sync(wrapped_body, accumulating), fabric.no_backward_sync(wrapped_head, accumulating):
            loss = F.cross_entropy(wrapped_head(torch.tanh(wrapped_body(inputs))), labels)
            fabric.backward(loss) if index % 2 else loss.backward()
        if accumulating:
            continue
        first.step()
        second.step()
        if cleared == "by optimizers":
            first.zero_grad()
            second.zero_grad(set_to_none=False)
        elif cleared == "by modules":
            wrapped_body.zero_grad()
            wrapped_head.zero_grad()
        else:
            for parameter in (*body.parameters(), *head.parameters()):
                parameter.grad = None
        if index % 4 == 0:
            with torch.inference_mode():
                evaluated.append(float(wrapped_head(wrapped_body(inputs)).sum()))
    found = [[float(value) for value in each.flatten()] for each in (*body.parameters(), *head.parameters())]
    fabric.strategy.teardown()
    return [evaluated, *found]


def fabrics(ways: Iterable[str]) -> dict[str, list[Any]]:
    """Whether overlap changes what `with_fabric` finds, and how many parameters it steps late."""
    found = {}
    for cleared in ways:
        waits = with_fabric(None, cleared)
        with late_steps() as late:
            overlaps = with_fabric("step", cleared)
        found[cleared] = [waits == overlaps, late[0]]
    return found


def error_of_rank(victim: int, clip: float | None) -> str:
    """What ``fit`` raises on this rank when one rank's training step raises while steps are due."""

    class Breaks(models.Plain):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if index == 3 and self.global_rank == victim:
                assert due_of(self.body.weight) is not None
                raise ValueError("no such label")
            return super().training_step(batch, index)

    seed_everything(3)
    trees: dict[str, Any] = (
        {} if clip is None else {"plan": "packed_trees", "cluster": ClusterSpec.uniform(2, bandwidth="1 Gbit/s")}
    )
    strategy = AutoSyncStrategy(overlap="step", timeout=20.0, bucket_cap_mb=5e-5, **trees)
    try:
        jobs.make_trainer(strategy, max_epochs=1, gradient_clip_val=clip).fit(Breaks())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"

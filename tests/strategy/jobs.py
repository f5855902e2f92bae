"""What ranks do in tests of the strategies: train under DDP and under AutoSync, and compare."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import platform
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy, builders
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan import Compressor, compile_plan
from lightning_autosync.strategy import agreement, resolution
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.resolution import Resolution
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.workload import describe

if "RANK" in os.environ:  # in a worker; tests import this module for the names of its functions
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    warnings.filterwarnings("ignore")

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def make_trainer(strategy: Any, plugins: tuple[Any, ...] = (), **arguments: Any) -> Trainer:
    arguments = {"max_epochs": 2, "devices": 2, **QUIET, **arguments}
    plugins = (TorchElasticEnvironment(), *plugins)
    return Trainer(accelerator="cpu", plugins=list(plugins), strategy=strategy, **arguments)


def fit(model: str, strategy: Any, plugins: tuple[Any, ...] = (), **arguments: Any) -> Any:
    """The trained module; its weights start the same in every call."""
    seed_everything(3)
    module = getattr(models, model)()
    make_trainer(strategy, plugins, **arguments).fit(module)
    return module


def state(module: nn.Module) -> dict[str, Tensor]:
    found = module.state_dict()
    return {name.replace("_orig_mod.", ""): tensor.detach() for name, tensor in found.items()}


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of any weight or buffer."""
    ours, theirs = state(one), state(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def compare(model: str, reference: str | None = None, half: bool = False, **arguments: Any) -> dict[str, Any]:
    """How far AutoSync ends from DDP, and what the module noted."""
    options = arguments.pop("strategy", {})
    if "cluster" in options:
        options["cluster"] = ClusterSpec.from_dict(options["cluster"])
    ddp = DDPStrategy(find_unused_parameters=True)
    if model == "Reentrant":
        ddp = DDPStrategy()
    ours = fit(model, AutoSyncStrategy(**options), _scaler(half), **arguments)
    theirs = fit(reference or model, ddp, _scaler(half), **arguments)
    seed_everything(3)
    start = getattr(models, model)()
    return {
        "distance": distance(ours, theirs),
        "moved": distance(ours, start.to(next(ours.parameters()).dtype)),
        "notes": {
            name: value for name, value in vars(ours).items() if name in ("largest_difference", "never_got_gradients")
        },
    }


def _scaler(half: bool) -> tuple[Any, ...]:
    if not half:
        return ()
    return (MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10)),)


def replicas_equal(model: str, strategy: dict[str, Any], **arguments: Any) -> float:
    """How far this rank's weights and buffers are from rank 0's after training."""
    module = fit(model, AutoSyncStrategy(**strategy), **arguments)
    worst = 0.0
    for tensor in state(module).values():
        first = tensor.clone()
        dist.broadcast(first, src=0)
        worst = max(worst, float((first.double() - tensor.double()).abs().max()))
    return worst


def evaluation_buffers() -> list[float]:
    """What validation sees in a buffer that each rank changed on its own."""
    seen: list[float] = []

    class Watched(models.Normalized):
        def validation_step(self, batch: Any, index: int) -> None:
            seen.append(float(self.offset[0]))

        val_dataloader = models.Plain.train_dataloader

    seed_everything(3)
    make_trainer(AutoSyncStrategy(), max_epochs=1, val_check_interval=3, limit_val_batches=1).fit(Watched())
    return seen


def all_loops() -> dict[str, Any]:
    seed_everything(3)
    module = models.Logs()
    strategy = AutoSyncStrategy()
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module)
    found: dict[str, Any] = {
        "rank": float(trainer.callback_metrics["rank"]),
        "sampler": isinstance(trainer.train_dataloader.sampler, DistributedSampler),
        "engine_closed": strategy.engine is None,
        "plan": strategy.plan.to_dict(),
        "messages": len(strategy.schedule.messages),
        "val": [float(row["loss"]) for row in trainer.validate(module, verbose=False)],
        "test": [float(row["loss"]) for row in trainer.test(module, verbose=False)],
        "predicted": sum(len(batch) for batch in trainer.predict(module)),
    }
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    found["epochs"] = trainer.current_epoch
    return found


def resume(folder: str, plan: str | None, tail: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train two epochs at once, and one by one over a checkpoint (weights only, after fit returned)."""

    def lossy(compressor: str, **arguments: Any) -> dict[str, Any]:
        cluster = ClusterSpec.uniform(1, 2)
        made = builders.all_reduce(describe(models.Plain()), cluster, compressor=compressor, **arguments)
        return {"plan": made, "semantics": "compressed"}

    options = {} if plan is None else lossy(plan)
    if tail is not None and "compressor" in tail:
        tail = lossy(**tail)
    whole = fit("Plain", AutoSyncStrategy(**options))
    seed_everything(3)
    half = models.Plain()
    trainer = make_trainer(AutoSyncStrategy(**options), max_epochs=1)
    trainer.fit(half)
    path = Path(folder) / "half.ckpt"
    trainer.save_checkpoint(path)
    resumed = models.Plain()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(AutoSyncStrategy(**(tail or options))).fit(resumed, ckpt_path=path, weights_only=True)
    saved = torch.load(path, weights_only=True)
    entry = saved.get("autosync")
    return {
        "distance": distance(whole, resumed),
        "shapes": {
            name: {key: list(tensor.shape) for key, tensor in memory["tensors"].items()}
            for name, memory in entry["variables"].items()
        }
        if entry
        else None,
        "warnings": [str(warning.message) for warning in caught if "compressor" in str(warning.message)],
    }


def scaled(poisoned: int) -> dict[str, Any]:
    """How far a run under a moving gradient scale, which skips a batch, ends from one without scale and batch."""
    kind = Compressor(kind="topk", ratio=0.2)
    plan = builders.all_reduce(describe(models.Plain()), ClusterSpec.uniform(1, 2), topology="star", compressor=kind)

    class WithoutAutocast(MixedPrecision):
        """Single precision, so that scaling by powers of two changes no bit."""

        def forward_context(self) -> Any:
            return contextlib.nullcontext()

    batches = list(models.loader())[dist.get_rank() :: 2]

    class Poisoned(models.Plain):
        def training_step(self, batch: Any, index: int) -> Tensor:
            scales.append(scaler.get_scale())
            worst = index == poisoned and dist.get_rank() == 1
            return super().training_step(batch, index) * (float("inf") if worst else 1.0)

        def train_dataloader(self) -> Any:
            return DataLoader(batches, batch_size=None)

    class Without(models.Plain):
        def train_dataloader(self) -> Any:
            kept = [batch for index, batch in enumerate(batches) if index != poisoned]
            return DataLoader(kept, batch_size=None)

    scales: list[float] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    ended = []
    for module, plugins in (
        (Poisoned, (WithoutAutocast("16-mixed", "cpu", scaler=scaler),)),
        (Without, ()),
    ):
        seed_everything(3)
        ended.append(module())
        strategy = AutoSyncStrategy(plan=plan, semantics="compressed")
        make_trainer(strategy, plugins, max_epochs=1, use_distributed_sampler=False).fit(ended[-1])
    return {"distance": distance(*ended), "scales": scales}


def thawed() -> dict[str, Any]:
    """What is remembered before and after unfreezing, by a plan that changes the compressor of one bias."""
    module = models.Plain()
    module.body.requires_grad_(False)

    def resolve_lossy(settings: StrategySettings, module: nn.Module, *shape: Any, **options: Any) -> Resolution:
        cluster = ClusterSpec.uniform(1, 2)
        workload = describe(module)
        plan = builders.all_reduce(workload, cluster, topology="star", compressor="bf16", bucket_bytes=1)
        whole = len(plan.groups) > 2
        groups = [
            group.model_copy(update={"compressor": Compressor()})
            if whole and group.variables == ("head.bias",)
            else group
            for group in plan.groups
        ]
        plan = plan.model_copy(update={"groups": tuple(groups)})
        return Resolution(workload, cluster, plan, compile_plan(plan, workload, cluster), "a test")

    def remembered() -> dict[str, list[float]]:
        state = replica.engine.state_dict()
        return {name: memory.tensors["residual"].flatten().tolist() for name, memory in state.items()}

    with mock.patch.object(resolution, "resolve", resolve_lossy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replica = ExactReplica(module, StrategySettings(plan="ps", semantics="compressed"), 1, 2)
        inputs, labels = next(iter(models.loader()))
        with replica.backward():
            F.cross_entropy(module(inputs + dist.get_rank()), labels).backward()
        before = remembered()
        module.body.requires_grad_(True)
        replica._accept_change()
        after = remembered()
        dist.barrier()
        replica.close()
    told = [str(warning.message) for warning in caught if "a new plan was made" in str(warning.message)]
    return {"before": before, "after": after, "warnings": told}


def live_beside_frozen(compressor: dict[str, Any]) -> float:
    """How far the mean gradient of a live parameter in the last batches is from the uncompressed one, relatively."""
    means = []
    for kind in ({"kind": "none"}, compressor):
        plan = builders.all_reduce(describe(models.Loud()), ClusterSpec.uniform(1, 2), compressor=Compressor(**kind))
        module = fit("Loud", AutoSyncStrategy(plan=plan, semantics="compressed"), max_epochs=1)
        # The first few may still make up for what the loud part drowned.
        means.append(torch.tensor(module.gradients[4:]).mean(dim=0))
    exact, found = means
    return float((found - exact).abs().max() / exact.abs().max())


def error_of(model: str, **strategy: Any) -> str:
    """What ``fit`` raises on this rank; ``{rank}`` in a plan's path becomes the rank."""
    if isinstance(strategy.get("plan"), str):
        strategy["plan"] = strategy["plan"].format(rank=dist.get_rank())
    try:
        fit(model, AutoSyncStrategy(**strategy), max_epochs=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def error_of_meeting(
    odd: int, versions: dict[str, str], arguments: dict[str, Any], common: dict[str, Any] | None = None
) -> str:
    """What ``fit`` raises where rank ``odd`` has versions or arguments besides the ``common`` ones."""
    own = agreement.own_versions()
    if dist.get_rank() != odd:
        versions, arguments = {}, {}
    arguments = {**(common or {}), **arguments}
    with mock.patch.object(agreement, "own_versions", return_value=own | versions):
        return error_of("Plain", **arguments)


def error_with_other_python(odd: int, nodes: int, **strategy: Any) -> str:
    """What ``fit`` raises where rank ``odd`` of two on so many nodes runs Python 3.9."""
    cluster = ClusterSpec.uniform(nodes, 2 // nodes, "1 Gbit/s")
    found = ("3", "9", "1") if dist.get_rank() == odd else platform.python_version_tuple()
    with mock.patch.object(platform, "python_version_tuple", return_value=found):
        return error_of("Plain", cluster=cluster, **strategy)


def broken_backward(victim: int) -> dict[str, Any]:
    """What ``fit`` raises on this rank, and after how long, when one rank's backward pass raises in its third step."""
    began = time.monotonic()

    class Breaks(models.Plain):
        def training_step(self, batch: Any, index: int) -> Tensor:
            nonlocal began
            began = time.monotonic()
            loss = super().training_step(batch, index)
            if index == 2 and dist.get_rank() == victim:
                loss.register_hook(_out_of_memory)
            return loss

    strategy = AutoSyncStrategy(plan="ps", timeout=timedelta(seconds=20))
    try:
        seed_everything(3)
        make_trainer(strategy, max_epochs=1).fit(Breaks())
    except Exception as error:
        closed = strategy.engine is None
        return {
            "error": f"{type(error).__name__}: {error}",
            "seconds": time.monotonic() - began,
            "closed": closed,
        }
    return {"error": "none", "seconds": 0.0, "closed": False}


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((torch.ones(models.FEATURES), 0) for _ in range(self.samples))


def uneven_streams(longer: int, folder: str, model: str = "Plain", checkpoints: bool = False, **strategy: Any) -> str:
    """What ``fit`` raises if rank ``longer`` has one more batch than the other one."""
    data = DataLoader(Stream(12 if dist.get_rank() == longer else 8), batch_size=4)
    options = {"max_epochs": 1, "enable_checkpointing": checkpoints, "default_root_dir": folder}
    try:
        trainer = make_trainer(AutoSyncStrategy(**strategy, timeout=20), **options)
        trainer.fit(getattr(models, model)(), data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def printed_error(**strategy: Any) -> list[str]:
    """The lines that this rank would print if its process ended with the error of ``fit``."""
    hook, printed = sys.excepthook, io.StringIO()
    if "plan" in strategy:
        strategy["plan"] = strategy["plan"].format(rank=dist.get_rank())
    try:
        fit("Plain", AutoSyncStrategy(**strategy), max_epochs=1)
    except Exception as error:
        with contextlib.redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.excepthook = hook
    return printed.getvalue().splitlines()


def _out_of_memory(_: Tensor) -> None:
    raise MemoryError("no memory for this gradient")


def odd_model(change: str) -> str:
    """What happens if rank 1 has another model."""
    module = models.Plain()
    if dist.get_rank() == 1:
        if change == "frozen":
            module.head.bias.requires_grad_(False)
        elif change == "wider":
            module.body = nn.Linear(models.FEATURES, 16)
        elif change == "buffer":
            module.register_buffer("mark", torch.zeros(3))
    try:
        make_trainer(AutoSyncStrategy(), max_epochs=1).fit(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def by_rows() -> dict[str, list[int]]:
    """Rows of each message of a model with a large dense table, for no plan and for a builder's."""
    found = {}
    for name, options in {"none": {}, "builder": {"plan": "all_reduce"}}.items():
        strategy = AutoSyncStrategy(**options)
        seed_everything(3)
        make_trainer(strategy, max_epochs=1, limit_train_batches=1).fit(models.DenseTable())
        found[name] = [message.rows for message in strategy.schedule.messages]
    return found


def compiled_whole() -> float:
    """A whole compiled LightningModule against the same one, not compiled, under DDP."""
    seed_everything(3)
    module = models.Plain()
    make_trainer(AutoSyncStrategy()).fit(torch.compile(module, backend="aot_eager"))
    return distance(module, fit("Plain", DDPStrategy()))


def other_framework() -> float:
    """pytorch_lightning under its own registry's names."""
    import pytorch_lightning
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment as Environment

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(models.FEATURES, 8), nn.Linear(8, models.CLASSES)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.head(torch.tanh(self.body(batch[0]))), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trained = []
    for name in ("ddp", "autosync", "autosync_ps"):
        pytorch_lightning.seed_everything(3)
        module = Module()
        pytorch_lightning.Trainer(
            accelerator="cpu", devices=2, plugins=[Environment()], strategy=name, max_epochs=1, **QUIET
        ).fit(module, models.loader())
        trained.append(module)
    return max(distance(trained[0], other) for other in trained[1:])


def make_fabric(strategy: Any, plugins: tuple[Any, ...] = (), **arguments: Any) -> Fabric:
    plugins = (TorchElasticEnvironment(), *plugins)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=list(plugins), **arguments)
    fabric.launch()
    return fabric


def train_with_fabric(strategy: Any, plain_backward: bool = False, precision: str = "32-true") -> list[nn.Module]:
    """Two modules, each set up on its own, gradients accumulated over two batches."""
    fabric = make_fabric(strategy, precision=precision)
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(models.FEATURES, 8), nn.BatchNorm1d(8))
    head = nn.Linear(8, models.CLASSES)
    wrapped_body, first = fabric.setup(body, torch.optim.SGD(body.parameters(), lr=0.1))
    wrapped_head, second = fabric.setup(head, torch.optim.SGD(head.parameters(), lr=0.1))
    data = fabric.setup_dataloaders(models.loader())
    for index, (inputs, labels) in enumerate(data):
        accumulating = index % 2 == 0
        with (
            fabric.no_backward_sync(wrapped_body, enabled=accumulating),
            fabric.no_backward_sync(wrapped_head, enabled=accumulating),
        ):
            loss = F.cross_entropy(wrapped_head(torch.tanh(wrapped_body(inputs))), labels)
            loss.backward() if plain_backward else fabric.backward(loss)
        if not accumulating:
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
    fabric.strategy.teardown()
    return [body, head]


def fabric_against_ddp(**arguments: Any) -> float:
    ours = train_with_fabric(AutoSyncFabricStrategy(), **arguments)
    theirs = train_with_fabric(FabricDDP(), **{**arguments, "plain_backward": False})
    return max(distance(one, other) for one, other in zip(ours, theirs, strict=True))


def fabric_redirects() -> list[str]:
    """The dtype that ``training_step`` of a LightningModule computes in, under DDP and AutoSync."""
    found = []

    class Watched(models.Plain):
        def training_step(self, batch: Any, index: int) -> Tensor:
            logits = self(batch[0])
            found.append(str(logits.dtype))
            return F.cross_entropy(logits.float(), batch[1])

    for strategy in (FabricDDP(), AutoSyncFabricStrategy()):
        fabric = make_fabric(strategy, precision="bf16-mixed")
        module = fabric.setup(Watched())
        fabric.backward(module.training_step(next(iter(models.loader())), 0))
        fabric.strategy.teardown()
    return found


def fabric_figures() -> dict[str, Any]:
    """What Fabric tells of two passes of one module and none of another: whether it can, the figures, and once more."""
    fabric = make_fabric(AutoSyncFabricStrategy())
    strategy = fabric.strategy
    module, _ = (fabric.setup(nn.Linear(8, 1, bias=False)) for _ in range(2))
    before, measured = strategy.step_figures(), strategy.measure_steps()
    for _ in range(2):
        fabric.backward(module(torch.ones(1, 8)).sum())
    found = [None if each is None else each.metrics() for each in strategy.step_figures()]
    after = strategy.step_figures()
    fabric.strategy.teardown()
    return {"before": before, "measured": measured, "found": found, "after": after}


def fabric_twice() -> list[float]:
    """The gradient of a module that was set up twice, with the rank plus one as input."""
    fabric = make_fabric(AutoSyncFabricStrategy())
    module = nn.Linear(1, 1, bias=False)
    first = fabric.setup(module)
    again = fabric.setup(module)
    with torch.no_grad():
        first(torch.ones(1, 1))
    with pytest.raises(ExchangeError, match="use what the last setup returned"):
        first(torch.ones(1, 1))
    fabric.backward(again(torch.full((1, 1), dist.get_rank() + 1.0)).sum())
    fabric.strategy.teardown()
    assert module.weight.grad is not None
    return module.weight.grad.flatten().tolist()


def modules_after_the_user_deletes_them(**options: Any) -> list[str]:
    """Which of the modules that Fabric set up live although the user deleted them, and what went wrong."""
    fabric = make_fabric(AutoSyncFabricStrategy(timeout=20.0, **options))
    groups = len(dist.distributed_c10d._world.pg_map)
    found, lives = [], {}
    inputs = torch.full((1, 1), dist.get_rank() + 1.0)

    def make(passes: int) -> tuple[nn.Module, Any]:
        module = nn.Linear(1, 1, bias=False)
        wrapped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(passes):
            fabric.backward(wrapped(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
        return module, wrapped

    for name in ("the first", "the second"):
        lives[name] = weakref.ref(make(passes=2)[0])
    module, wrapped = make(passes=1)
    loss = wrapped(inputs).sum()
    del wrapped
    gc.collect()
    make(passes=1)
    fabric.backward(loss)
    if module.weight.grad is None or float(module.weight.grad) != 1.5:
        found.append("a gradient stayed on its rank")
    gc.collect()
    found += [name for name, module in lives.items() if module() is not None]
    if len(dist.distributed_c10d._world.pg_map) - groups > 2:  # those of the third module and of the last one
        found.append("a process group")
    fabric.strategy.teardown()
    return found


def groups_of_modules() -> list[int]:
    """Process groups that a job has more than before it: with a module that rank 1 deletes late, without it, ended."""
    fabric = make_fabric(AutoSyncFabricStrategy())
    before, found, first = _group_count(), list[int](), fabric.setup(nn.Linear(1, 1))
    for _ in range(3):
        deleted = fabric.setup(nn.Linear(1, 1))
    if dist.get_rank() == 0:
        del deleted
    gc.collect()
    last = fabric.setup(nn.Linear(1, 1))
    found.append(_group_count() - before)
    deleted = None
    gc.collect()
    last = fabric.setup(last.module)
    found.append(_group_count() - before)
    fabric.backward(last(torch.ones(1, 1)).sum() + first(torch.ones(1, 1)).sum())
    fabric.strategy.teardown()
    return [*found, _group_count() - before]


def _group_count() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def fabric_looks(changes: str = "never") -> list[float]:
    """Weights after steps between which rank 0 alone runs the module more often, as for pictures of its output.

    Args:
        changes: when a second layer is frozen or unfrozen: ``never``, ``once``, or ``in turn`` (before every step).
    """
    fabric = make_fabric(AutoSyncFabricStrategy(check_replicas=1, timeout=5.0))
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    wrapped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.5))
    for step in range(4):
        if changes == "in turn" or (changes == "once" and step == 1):
            module[1].requires_grad_(not module[1].weight.requires_grad)
        fabric.backward(wrapped(torch.full((1, 1), dist.get_rank() + 1.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(step if dist.get_rank() == 0 else 0):
            wrapped(torch.ones(1, 1))
    fabric.strategy.teardown()
    return [float(parameter) for parameter in module.parameters()]


def modules_in_any_order(steps: int = 4, changes: str = "never", **options: Any) -> list[float]:
    """Weights of two modules after backward passes that reach them in another order on each rank.

    Args:
        steps: number of steps.
        changes: when a second layer of each is frozen or unfrozen: ``never``, or ``in turn`` (before every step).
    """
    fabric = make_fabric(AutoSyncFabricStrategy(**{"check_replicas": 1, "timeout": 10.0, **options}))
    modules = [nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)) for _ in range(2)]
    weights = [parameter for module in modules for parameter in module.parameters()]
    for weight in weights:
        nn.init.ones_(weight)
    made: Any = [fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.5)) for module in modules]
    inputs = torch.full((1, 1), dist.get_rank() + 1.0)
    for _ in range(steps):
        for module in modules if changes == "in turn" else ():
            module[1].requires_grad_(not module[1].weight.requires_grad)
        losses: Any = [wrapped(inputs).sum() for wrapped, _ in (made if dist.get_rank() == 0 else made[::-1])]
        fabric.backward(sum(losses))
        for _, optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    fabric.strategy.teardown()
    return [float(weight) for weight in weights]


def _adapters_under_fabric(strategy: Any) -> nn.Module:
    fabric = make_fabric(strategy)
    seed_everything(3)
    module = models.Adapters()
    wrapped, optimizer = fabric.setup(module, module.configure_optimizers())
    for inputs, labels in list(models.loader())[dist.get_rank() :: 2]:
        fabric.backward(F.cross_entropy(wrapped(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    fabric.strategy.teardown()
    return module


def adapters(fabric: bool, static_graph: bool) -> dict[str, Any]:
    """How far trained adapters in reentrant checkpoints end from DDP's, and the exchanges in eight steps."""
    options = {"static_graph": static_graph}
    with mock.patch.object(ExactReplica, "_end_pass") as passed:
        if fabric:
            ours = _adapters_under_fabric(AutoSyncFabricStrategy(**options))
        else:
            ours = fit("AdaptersByHand", AutoSyncStrategy(**options), max_epochs=1)
    theirs = _adapters_under_fabric(FabricDDP()) if fabric else fit("Adapters", DDPStrategy(), max_epochs=1)
    return {"distance": distance(ours, theirs), "passes": passed.call_count}


def fabric_scales() -> dict[str, list[float]]:
    """The scale of each loss, and the one that the engine was told."""
    plan = builders.all_reduce(describe(models.Plain()), ClusterSpec.uniform(1, 2), compressor="int8")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    fabric = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=AutoSyncFabricStrategy(plan=plan, semantics="compressed"),
        plugins=[TorchElasticEnvironment(), FabricMixedPrecision("16-mixed", "cpu", scaler=scaler)],
    )
    fabric.launch()
    module = models.Plain()
    wrapped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    found: dict[str, list[float]] = {"used": [], "told": []}
    for inputs, labels in list(models.loader())[:5]:
        found["used"].append(scaler.get_scale())
        fabric.backward(F.cross_entropy(wrapped(inputs).float(), labels))
        found["told"].append(wrapped._forward_module.replica.engine.loss_scale)
        optimizer.step()
        optimizer.zero_grad()
    fabric.strategy.teardown()
    return found


def fabric_resume(folder: str) -> dict[str, Any]:
    """Six steps at once, and three and three over a checkpoint, with error feedback."""
    plan = builders.all_reduce(describe(models.Plain()), ClusterSpec.uniform(1, 2), compressor="int8")
    path = Path(folder) / "fabric.ckpt"
    batches = list(models.loader(batch_size=4))[dist.get_rank() :: 2]

    def begin(seed: int) -> tuple[Fabric, Any, Any]:
        fabric = make_fabric(AutoSyncFabricStrategy(plan=plan, semantics="compressed"))
        torch.manual_seed(seed)
        module = models.Plain()
        return fabric, *fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))

    def steps(fabric: Fabric, module: Any, optimizer: Any, part: list[Any]) -> None:
        for inputs, labels in part:
            fabric.backward(F.cross_entropy(module(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()

    whole = begin(3)
    steps(*whole, batches[:2])
    whole[0].save(path, {"model": whole[1], "optimizer": whole[2], "step": 2})
    steps(*whole, batches[2:])
    resumed = begin(4)
    rest = {"model": resumed[1], "optimizer": resumed[2], "step": 0}
    remainder = resumed[0].load(path, rest)
    steps(*resumed, batches[2:])
    for fabric, *_ in (whole, resumed):
        fabric.strategy.teardown()
    return {
        "distance": distance(whole[1].module, resumed[1].module),
        "step": rest["step"],
        "remainder": sorted(remainder),
    }


def weights(strategy: str) -> list[float]:
    """Sums of the weights that the script of the launch tests must arrive at."""
    return [float(tensor.double().sum()) for tensor in state(fit("Plain", strategy, max_epochs=1)).values()]

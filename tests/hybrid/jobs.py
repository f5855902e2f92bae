"""What ranks do in tests of `AutoDDLStrategy`: train under DDP and split, and compare."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from clusters import two_interfaces
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hybrid.models import Mlp, loss_of, make_batch
from hybrid.plans import draw_plan
from lightning_autosync import AutoDDLStrategy, ClusterSpec, HybridPlan, SyncPlan, builders
from lightning_autosync.hybrid import LayerPlan
from lightning_autosync.hybrid.execution.sharded_checkpoint import load_model, save_sharded
from lightning_autosync.strategy import autoddl, hybrid_choice
from lightning_autosync.workload import describe

if "RANK" in os.environ:  # in a worker; tests import this module for the names of its functions
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    warnings.filterwarnings("ignore")

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
BATCHES = 16


class Job(LightningModule):
    """Any of the models, on batches of four samples."""

    def __init__(self, net: nn.Module | None = None, name: str = "mlp", optimizer: str = "adamw") -> None:
        super().__init__()
        self.net = (Mlp(0.0) if net is None else net).double()
        self.name, self.optimizer = name, optimizer
        self.losses: list[float] = []
        self.norms: list[float] = []
        if optimizer == "kept":
            self.kept = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = loss_of(self.net, *batch)
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", loss_of(self.net, *batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.net(batch[0])

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*make_batch(self.name, 4 * BATCHES, 7)), batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*make_batch(self.name, 16, 8)), batch_size=4)

    predict_dataloader = val_dataloader

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if self.optimizer == "kept":
            return self.kept
        made = torch.optim.AdamW(self.parameters(), lr=1e-2)
        warm_up = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, step / 3))
        return [made], [{"scheduler": warm_up, "interval": "step"}]


def plan_for(module: nn.Module, seed: int = 1, mesh: Any = None) -> HybridPlan:
    """A random plan of a job's module on all ranks."""
    return draw_plan(module, mesh or [dist.get_world_size()], seed)


def make_trainer(strategy: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        **{"plugins": [TorchElasticEnvironment()], **QUIET, "max_epochs": 1, "limit_val_batches": 0, **options},
    )


def fit(job: Job, strategy: Any, **options: Any) -> Job:
    seed_everything(3)
    for parameter in job.parameters():  # on each rank others, which rank 0's take the place of
        nn.init.normal_(parameter, 0.0, 0.2, generator=torch.Generator().manual_seed(dist.get_rank()))
    make_trainer(strategy, **options).fit(job)
    return job


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def against_ddp(seed: int = 1, mesh: Any = None, optimizer: str = "adamw", **options: Any) -> dict[str, Any]:
    """How far training with a random plan ends from DDP's."""
    theirs = fit(Job(optimizer=optimizer), DDPStrategy(), **options)
    ours = Job(optimizer=optimizer)
    strategy = AutoDDLStrategy(plan=plan_for(ours, seed, mesh))
    fit(ours, strategy, **options)
    return {
        "distance": distance(theirs, ours),
        "loss": max(abs(a - b) for a, b in zip(theirs.losses, ours.losses[-len(theirs.losses) :], strict=True)),
        "steps": len(theirs.losses),
        "split": [tuple(p.shape) for p in ours.parameters()] == [tuple(p.shape) for p in theirs.parameters()],
    }


def resumed(folder: str, sharded: bool, seeds: list[int], meshes: list[Any] | None = None) -> dict[str, Any]:
    """Two epochs at once, and one by one over a checkpoint, with another plan for each seed."""

    def strategy(seed: int) -> AutoDDLStrategy:
        mesh = None if meshes is None else meshes[seeds.index(seed)]
        return AutoDDLStrategy(plan=plan_for(Job(), seed, mesh), save_distributed_checkpoint=sharded)

    whole = fit(Job(), strategy(seeds[0]), max_epochs=2)
    path = Path(folder) / ("parts" if sharded else "whole.ckpt")
    saved = Saving(path)
    half = fit(Job(), strategy(seeds[0]), callbacks=[saved])
    found = {"saved": distance(half, whole), "distances": []}
    for seed in seeds:
        again = Job()
        make_trainer(strategy(seed), max_epochs=2).fit(again, ckpt_path=path, weights_only=True)
        found["distances"].append(distance(whole, again))
    alone = Job()
    if not sharded:
        checkpoint = torch.load(path, weights_only=True)
        alone.load_state_dict(checkpoint["state_dict"])
        torch.optim.AdamW(alone.parameters()).load_state_dict(checkpoint["optimizer_states"][0])
        found["alone"] = distance(alone, half)
    elif dist.get_rank() == 0:
        single = path / "single.pt"
        (tensors,) = path.glob("tensors-*")
        dcp_to_torch_save(tensors, single)
        state = torch.load(single, weights_only=True)
        alone.load_state_dict(
            {name.removeprefix("state_dict."): value for name, value in state.items() if name.startswith("state_dict.")}
        )
        found["alone"] = distance(alone, half)
    return found


def saved_statistics(folder: str) -> list[float]:
    """The buffers of a batch norm in a folder, to which each rank brought its own number."""
    module = nn.BatchNorm1d(8)
    for buffer in module.buffers():
        buffer.fill_(dist.get_rank() + 1)
    save_sharded(folder, module, [], None)
    load_model(folder, module, None, {}, True)
    return [float(buffer.double().mean()) for buffer in module.buffers()]


class Saving(Callback):
    """Saves while the model is split."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


class Wide(LightningModule):
    """Weights that dwarf activations, so that splitting pays on any slow link."""

    def __init__(self, width: int = 512, compiled: str = "") -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)
        self.head = nn.Linear(64, 8)
        if compiled:
            setattr(self, compiled, torch.compile(getattr(self, compiled), backend="aot_eager"))
        self.shapes: list[int] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.shapes.append(sum(parameter.numel() for parameter in self.parameters()))
        return F.cross_entropy(self(batch[0]), batch[1])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.down(self.act(self.up(inputs))))

    def train_dataloader(self) -> Any:
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, torch.arange(16) % 8), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def told(job: LightningModule, strategy: Any, **options: Any) -> dict[str, Any]:
    """What rank 0 is told when a job is fitted, and what came out."""
    lines: list[str] = []
    with (
        mock.patch.object(autoddl, "rank_zero_info", lines.append),
        mock.patch.object(autoddl, "rank_zero_warn", lines.append),
    ):
        trainer = make_trainer(strategy, **options)
        trainer.fit(job)
    return {"lines": lines, "plan": trainer.strategy.hybrid_plan is not None, "trainer": trainer}


def searched(bandwidth: str | None, memory: str | None = None, width: int = 512, **options: Any) -> dict[str, Any]:
    """A job without a plan on links of this rate, against DDP."""
    seed_everything(3)
    theirs, ours = Wide(width), Wide(width)
    ours.load_state_dict(theirs.state_dict())
    make_trainer(DDPStrategy()).fit(theirs)
    size = dist.get_world_size()
    cluster = None if bandwidth is None else ClusterSpec.uniform(size, bandwidth=bandwidth)
    strategy = "autoddl" if bandwidth is memory is None else AutoDDLStrategy(cluster=cluster, memory=memory, **options)
    found = told(ours, strategy)
    whole = sum(parameter.numel() for parameter in ours.parameters())
    return {
        "lines": found["lines"],
        "distance": distance(theirs, ours),
        "share": max(ours.shapes[-4:]) / whole,
    }


def without_an_address() -> list[dict[str, Any]]:
    """Jobs without a plan on slow links: each node has a second interface without an address, or none."""
    size = dist.get_world_size()
    both = two_interfaces([1.25e6] * size, [1.25e6] * size, [("127.0.0.1",)] * size)
    found = []
    for cluster in (both, both.with_interfaces(1)):
        seed_everything(3)
        job = told(Wide(512), AutoDDLStrategy(cluster=cluster))
        found.append({"lines": job["lines"], "plan": job["plan"]})
    return found


def wide_plan(**changes: Any) -> HybridPlan:
    """Columns, then rows."""
    size = dist.get_world_size()
    layers = [
        LayerPlan(module="up", signature=("col",)),
        LayerPlan(module="down", signature=("row",), output=("batch",)),
        LayerPlan(module="head", signature=("dp",)),
    ]
    return HybridPlan(**{"mesh": (size,), "layers": tuple(layers), **changes})


def compiled(part: str) -> dict[str, Any]:
    """A part, or the whole module, under torch.compile."""
    job = Wide(compiled=part)
    if not part:
        job.compile(backend="aot_eager")
    found = told(job, AutoDDLStrategy(plan=wide_plan()))
    return {
        "lines": found["lines"],
        "kept": isinstance(getattr(job, part), OptimizedModule) if part else job._compiled_call_impl is not None,
    }


def narrow(precision: str) -> list[float]:
    """Losses in a narrow precision, of DDP and split, where both see the same weights first."""
    found = []
    for strategy in (DDPStrategy(), AutoDDLStrategy(plan=wide_plan())):
        seed_everything(3)
        job = Wide()
        losses: list[float] = []
        step = job.training_step

        def training_step(batch: Any, index: int, step: Any = step, losses: Any = losses) -> Tensor:
            loss = step(batch, index)
            losses.append(float(loss.detach()))
            return loss

        vars(job)["training_step"] = training_step
        make_trainer(strategy, precision=precision).fit(job)
        found += [losses[-1], losses[-4]]
    return found


def doubled() -> dict[str, float]:
    """How far a split model in double precision ends from DDP's, and its precision."""
    theirs, ours = Wide(), Wide()
    ours.load_state_dict(theirs.state_dict())
    make_trainer(DDPStrategy(), precision="64-true").fit(theirs)
    plugins = [TorchElasticEnvironment(), DoublePrecision()]
    make_trainer(AutoDDLStrategy(plan=wide_plan()), plugins=plugins).fit(ours)
    return {"distance": distance(theirs, ours), "bits": 8 * ours.up.weight.itemsize}


class Noisy(Wide):
    """Its step makes a tensor in the default dtype, and notes the dtype in which the head computes."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(lambda part, given, made: DTYPES.add(str(made.dtype)))

    def training_step(self, batch: Any, index: int) -> Tensor:
        noise = torch.randn(len(batch[0]), 64)
        return super().training_step([batch[0] + noise, batch[1]], index)


DTYPES: set[str] = set()


def precise(precision: str) -> dict[str, Any]:
    """A search in a narrow precision, the bytes of a number that the first operator is taken to hand on, and the dtypes
    of all steps.
    """
    sizes = []
    DTYPES.clear()

    def search(graph: Any, *place: Any, **options: Any) -> Any:
        sizes.append(graph.operators[0].output.itemsize)
        return real(graph, *place, **options)

    real, slow = hybrid_choice.search, ClusterSpec.uniform(dist.get_world_size(), bandwidth="10 Mbit/s")
    with mock.patch.object(hybrid_choice, "search", search):
        found = told(Noisy(), AutoDDLStrategy(cluster=slow), precision=precision)
    return {"plan": found["plan"], "lines": found["lines"], "sizes": sizes, "dtypes": list(DTYPES)}


def refused(case: str) -> str:
    """What a job is told that cannot be run so."""
    try:
        _REFUSED[case]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class Odd(Wide):
    """Ranks get batches of different sizes."""

    def train_dataloader(self) -> Any:
        samples = 4 + 2 * dist.get_rank()
        inputs = torch.randn(2 * samples, 64, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, torch.arange(2 * samples) % 8), batch_size=samples)


class Ragged(Wide):
    """One rank's batches are so large that only the other ranks would split operators."""

    def __init__(self, largest: int) -> None:
        super().__init__()
        self.samples = 8192 if dist.get_rank() == largest else 4

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(2 * self.samples, 64), torch.arange(2 * self.samples) % 8)
        return DataLoader(data, batch_size=self.samples)


def ragged(largest: int) -> dict[str, Any]:
    """A search on batches of which rank ``largest`` has the largest."""
    seed_everything(3)
    job, slow = Ragged(largest), ClusterSpec.uniform(dist.get_world_size(), bandwidth="10 Mbit/s")
    found = told(job, AutoDDLStrategy(cluster=slow, timeout=20), use_distributed_sampler=False)
    return {"lines": found["lines"], "plan": found["plan"], "weight": float(job.head.weight.detach().sum())}


def unlike_searches() -> str:
    """The plan of a job whose ranks find other lists of plans, of which the first plan fits on no rank."""
    plans = (_heads(), wide_plan()) if dist.get_rank() == 0 else (_heads(),)
    slow = ClusterSpec.uniform(dist.get_world_size(), bandwidth="10 Mbit/s")
    with mock.patch.object(autoddl, "choose_hybrid_plan", return_value=hybrid_choice.Choice(plans, "as it is")):
        trainer = told(Wide(), AutoDDLStrategy(cluster=slow, timeout=20))["trainer"]
    return trainer.strategy.hybrid_plan.fingerprint


def unlike_models() -> str:
    """What a job is told whose ranks search plans for other models."""
    slow = ClusterSpec.uniform(dist.get_world_size(), bandwidth="10 Mbit/s")
    try:
        told(Wide(width=512 + 256 * dist.get_rank()), AutoDDLStrategy(cluster=slow, timeout=20))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class Damaged(Wide):
    """The last rank cannot read its data."""

    def train_dataloader(self) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("the disk is gone")
        return super().train_dataloader()


class Failing(Wide):
    """Stands for code that fails where operators are split."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        if any("forward" in vars(part) for part in self.children()):
            raise RuntimeError("shapes do not fit")
        return super().training_step(batch, index)


def undone(job: str) -> dict[str, Any]:
    """A refusal under a given plan (``Odd``) or a searched one (``Failing``), and whether the module is whole again."""
    module = {"odd": Odd, "failing": Failing}[job]()
    whole = sum(parameter.numel() for parameter in module.parameters())
    slow = ClusterSpec.uniform(dist.get_world_size(), bandwidth="10 Mbit/s")
    strategy = AutoDDLStrategy(plan=wide_plan()) if job == "odd" else AutoDDLStrategy(cluster=slow)
    lines, error = [], ""
    try:
        lines = told(module, strategy, use_distributed_sampler=job != "odd")["lines"]
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "lines": lines,
        "error": error,
        "whole": whole == sum(parameter.numel() for parameter in module.parameters()),
        "patched": any("forward" in vars(part) for part in module.children()),
    }


class Drifting(Wide):
    """Ranks clip gradients by the norms of their own parts."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


class Tampered(Wide):
    """Rank 1 changes a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.head.bias.add_(0.1 * dist.get_rank())


def drifted(job: str) -> str:
    """What a job is told whose copies of a layer part."""
    seed_everything(3)
    try:
        _fit({"clipping": Drifting, "frozen": Tampered}[job](), wide_plan())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class Gated(Wide):
    """Its output starts at zero, so that no gradient comes to the layers before."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


def gated() -> list[str]:
    return told(Gated(), AutoDDLStrategy(plan=wide_plan()))["lines"]


class Manual(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Coupled(torch.optim.SGD):
    """Steps of a length, which parts of a parameter cannot know."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm()
        return super().step(closure)


def _with_coupled() -> LightningModule:
    job = Wide()
    vars(job)["configure_optimizers"] = lambda: Coupled(job.parameters(), lr=0.1)
    return job


def _with_buffer(buffer: Tensor) -> LightningModule:
    job = Wide()
    job.register_buffer("own", buffer)
    return job


def _fit(job: LightningModule, plan: Any, **options: Any) -> None:
    make_trainer(AutoDDLStrategy(plan=plan, timeout=20), **options).fit(job)


def _search(**options: Any) -> None:
    make_trainer(AutoDDLStrategy(**options, timeout=20)).fit(Wide())


def _heads() -> HybridPlan:
    return wide_plan(layers=(LayerPlan(module="up", signature=("heads",)), *wide_plan().layers[1:]))


_REFUSED: dict[str, Any] = {
    "operator": lambda: _fit(Wide(), _heads()),
    "uneven": lambda: _fit(Wide(width=511), wide_plan()),
    "mesh": lambda: _fit(Wide(), wide_plan(mesh=(dist.get_world_size() + 1,))),
    "model": lambda: _fit(Wide(), wide_plan(workload="0123456789ab")),
    "module": lambda: _fit(Job(), wide_plan()),
    "relaxed": lambda: AutoDDLStrategy(plan="partial_reduce"),
    "synchronous": lambda: AutoDDLStrategy(plan="all_reduce"),
    "batches": lambda: _fit(Odd(), wide_plan(), use_distributed_sampler=False),
    "manual": lambda: _fit(Manual(), wide_plan()),
    "optimizer": lambda: _fit(_with_coupled(), wide_plan()),
    "memory": lambda: make_trainer(AutoDDLStrategy(memory="1 kB")).fit(Wide()),
    "cluster": lambda: make_trainer(AutoDDLStrategy(cluster=ClusterSpec.uniform(7))).fit(Wide()),
    "compressed": lambda: AutoDDLStrategy(plan=wide_plan(gradients=_compressed(), layers=_all_dp())),
    "other plan": lambda: _fit(Wide(), wide_plan() if dist.get_rank() else None),
    "other memory": lambda: _search(memory=f"{dist.get_rank() + 1} GB"),
    "other cluster": lambda: _search(cluster=ClusterSpec.uniform(2, bandwidth=f"{dist.get_rank() + 1} Gbit/s")),
    "data": lambda: _fit(Damaged(), wide_plan()),
    "buffer size": lambda: _fit(_with_buffer(torch.zeros(1000 * (1 + dist.get_rank()))), wide_plan()),
    "buffer dtype": lambda: _fit(_with_buffer(torch.zeros(8).to(_FLOATS[dist.get_rank()])), wide_plan()),
    "scaler": lambda: _fit(Wide(), wide_plan(), plugins=_scaled()),
    "batch norm": lambda: _fit(Wide(), wide_plan(), sync_batchnorm=True),
    "averaging": lambda: _fit(Wide(), wide_plan(), callbacks=[StochasticWeightAveraging(1e-3)]),
    "moving average": lambda: _fit(Wide(), wide_plan(), callbacks=[_Moving()]),
    "averaging on one rank": lambda: _fit(Wide(), wide_plan(), callbacks=[_Moving()] if dist.get_rank() else []),
    "compressed file": lambda: AutoDDLStrategy(plan=_saved(_compressed())),
    "relaxed file": lambda: AutoDDLStrategy(plan=_saved(_sync_plan("periodic"))),
    "served file": lambda: AutoDDLStrategy(plan=_saved(_served())),
    "other file": lambda: _fit(Wide(), _saved(_sync_plan()) if dist.get_rank() else wide_plan()),
}


_FLOATS = (torch.float32, torch.float64)


def _sync_plan(name: str = "ps") -> SyncPlan:
    return builders.build(name, describe(Wide()), ClusterSpec.uniform(dist.get_world_size()))


def _served() -> SyncPlan:
    return SyncPlan.from_dict({**_sync_plan().to_dict(), "consistency": {"served": True}})


def _saved(plan: SyncPlan) -> Path:
    path = Path(tempfile.mkdtemp()) / "plan.yaml"
    plan.save(path)
    return path


def _all_dp() -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan(module=name, signature=("dp",)) for name in ("up", "down", "head"))


def _compressed() -> SyncPlan:
    cluster = ClusterSpec.uniform(dist.get_world_size())
    return builders.all_reduce(describe(Wide()), cluster, compressor="bf16")


class _Moving(WeightAveraging):
    """A user's own kind of weight averaging."""


def averaged() -> float:
    """How far weights that data parallelism of this strategy averages are from DDP's."""
    found = []
    for strategy in (DDPStrategy(), AutoDDLStrategy()):
        seed_everything(3)
        job = Wide()
        make_trainer(strategy, max_epochs=2, callbacks=[_Moving()]).fit(job)
        found.append(job)
    return distance(*found)


def all_data_parallel() -> dict[str, Any]:
    """A plan that splits nothing, with gradients by a parameter server."""
    strategy = AutoDDLStrategy(plan=wide_plan(layers=_all_dp(), gradients="ps"))
    found = told(Wide(), strategy)
    return {"lines": found["lines"], "engine": strategy.plan.to_dict()["groups"][0]["architecture"]}


def synchronization(as_file: bool) -> dict[str, Any]:
    """A plan of gradients, as ``autosync tune parallel=hybrid`` leaves where no split of operators is faster."""
    plan = _sync_plan()
    strategy = AutoDDLStrategy(plan=_saved(plan) if as_file else plan)
    found = told(Wide(), strategy)
    return {"lines": found["lines"], "engine": strategy.plan.to_dict()["groups"][0]["architecture"]}


class Recurrent(LightningModule):
    """A layer that nobody knows, between two that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 16))
        self.middle, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 8)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.head(self.middle(self.up(batch[0][:, None]))[0])[:, 0], batch[1])

    train_dataloader = Job.train_dataloader
    name = "mlp"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def unknown_layer() -> dict[str, Any]:
    seed_everything(3)
    theirs, ours = Recurrent().double(), Recurrent().double()
    ours.load_state_dict(theirs.state_dict())
    make_trainer(DDPStrategy()).fit(theirs)
    cluster = ClusterSpec.uniform(dist.get_world_size(), bandwidth="10 Mbit/s")
    lines = told(ours, AutoDDLStrategy(cluster=cluster))["lines"]
    return {"lines": lines, "distance": distance(theirs, ours)}


def _scaled() -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return [TorchElasticEnvironment(), MixedPrecision("16-mixed", "cpu", scaler=scaler)]


def predictions() -> dict[str, Any]:
    """Fitting, then validation and prediction with the same trainer."""
    job = Job()
    trainer = make_trainer(AutoDDLStrategy(plan=plan_for(job)), limit_val_batches=2)
    trainer.fit(job)
    during = float(trainer.callback_metrics["val"])
    after = float(trainer.validate(job, verbose=False)[0]["val"])
    return {"during": during, "after": after, "predicted": len(trainer.predict(job))}


def other_framework() -> float:
    """pytorch_lightning under its own registry's name and class."""
    import pytorch_lightning
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment as Environment

    from lightning_autosync.strategy.autoddl_pytorch import AutoDDLStrategy as Other

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.head = nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 8)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.head(self.down(torch.tanh(self.up(batch[0])))), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trained = []
    for strategy in ("ddp", "autoddl", Other(plan=wide_plan())):
        pytorch_lightning.seed_everything(3)
        module = Module()
        pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            plugins=[Environment()],
            strategy=strategy,
            max_epochs=1,
            **QUIET,
        ).fit(module, Wide().train_dataloader())
        trained.append(module)
    return max(distance(trained[0], other) for other in trained[1:])

"""What the processes of a `crew.Crew` do in tests that ask who is named when a rank fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy, TuningSettings, builders
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.due_parameter import due_of
from lightning_autosync.strategy import resolution
from lightning_autosync.strategy.resolution import resolve
from lightning_autosync.workload import describe

STRUCK, STRUCK_IN_TRIAL = 3, 10
"""Steps after which the victim meets its fault, the second for jobs that try plans."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("all_reduce", {"topology": "native"}),
    "two-level native": ("hierarchical", {"topology": "hierarchical"}),
    "ring": ("all_reduce", {"topology": "ring"}),
    "tree": ("all_reduce", {"topology": "tree"}),
    "shared memory": ("all_reduce", {"topology": "shared_memory"}),
    "parameter server": ("ps", {"topology": "native"}),
    "parameter server, star": ("ps", {"topology": "star"}),
}
TUNING = "tuning"
"""A job that chooses its plan and tries others. With these settings it tries one in the step of the fault."""
TUNES = TuningSettings(probe=0, search=0.5, warm_up=1, passes=8, cache=None)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


class Fate:
    """Lets one rank fail.

    Args:
        store: to tell the test.
        how: of `SIGNALS`, an exception, or stuck: alive, but busy with something else for an hour.
        victim: the rank.
    """

    def __init__(self, store: dist.Store, how: str, victim: int) -> None:
        self.store, self.how, self.victim = store, how, victim

    def strike(self) -> None:
        self.store.add("reached", 1)
        if dist.get_rank() != self.victim:
            return
        self.store.set("struck", str(time.time()))
        if self.how == "exception":
            raise ValueError("a fault of this rank's own")
        if self.how == "stuck":
            time.sleep(3600.0)
        os.kill(os.getpid(), SIGNALS[self.how])


class Job:
    """A small model of which one rank fails in the middle of a step; beside a framework's ``LightningModule``."""

    def __init__(self, fate: Fate, where: str) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.fate, self.where = fate, where

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == (STRUCK_IN_TRIAL if self.trainer.strategy.report().tuning != "off" else STRUCK):
            self.fate.strike()
            if self.where != "training":
                ask_all(self.trainer.strategy, self.where)
        time.sleep(0.005)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class DueJob:
    """A model that overlaps, whose steps wait for sums that never come; beside a framework's ``LightningModule``.

    The victim fails before its backward pass, but after the others have stepped.
    """

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.fate = fate

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == STRUCK and dist.get_rank() == self.fate.victim:
            while self.fate.store.add("stepped", 0) < dist.get_world_size() - 1:
                time.sleep(0.01)
            self.fate.strike()
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == STRUCK:
            assert all(due_of(each) is not None for each in self.layer.parameters())
            self.fate.store.add("stepped", 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


def ask_all(strategy: Any, how: str) -> None:
    """A call by which Lightning, a metric or the user asks all ranks."""
    value = torch.ones(3)
    calls: dict[str, Callable[[], Any]] = {
        "barrier": strategy.barrier,
        "broadcast": lambda: strategy.broadcast("a word", src=2),
        "all_gather": lambda: strategy.all_gather(value),
        "decision": lambda: strategy.reduce_boolean_decision(True),
        "reduce": lambda: getattr(strategy, "reduce", getattr(strategy, "all_reduce", None))(value),
        "gather_json": lambda: gather_json(dist.get_rank()),
        "metric": lambda: MeanMetric()(value),
        "own call": lambda: dist.all_reduce(value),
    }
    calls[how]()


def cluster_of(kind: str, size: int) -> ClusterSpec:
    nodes = {"shared memory": 1, "two-level native": 2}.get(kind, size)
    return ClusterSpec.uniform(nodes, size // nodes)


def plan_of(kind: str, module: nn.Module, size: int) -> Any:
    builder, options = KINDS[kind]
    return builders.build(builder, describe(module), cluster_of(kind, size), **options)


def in_two_levels(*arguments: Any, **options: Any) -> Any:
    """``resolve``, as it is under NCCL."""
    return resolve(*arguments, **{**options, "two_level_collectives": True})


def framework(name: str) -> tuple[Any, Any, Any, Any]:
    """Module, Trainer, environment and strategy."""
    if name == "lightning":
        from lightning.pytorch import LightningModule, Trainer

        return LightningModule, Trainer, TorchElasticEnvironment, AutoSyncStrategy
    from lightning_fabric.plugins.environments import TorchElasticEnvironment as Environment
    from pytorch_lightning import LightningModule as Module
    from pytorch_lightning import Trainer as OtherTrainer

    from lightning_autosync.strategy.pytorch import AutoSyncStrategy as Strategy

    return Module, OtherTrainer, Environment, Strategy


def join(rank: int, size: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raises, and when."""
    kinds, error = [""], ""
    try:
        call()
    except BaseException as cause:
        kinds, error = [each.__name__ for each in type(cause).__mro__], str(cause)
    return {"kinds": kinds, "error": error, "at": time.time()}


def fit(package: str, job: Callable[[type], Any], size: int, **options: Any) -> dict[str, Any]:
    base, trainer_class, environment, strategy_class = framework(package)
    module = job(base)
    if "kind" in options:
        kind = options.pop("kind")
        if kind == TUNING:
            options |= {"cluster": ClusterSpec.uniform(size, bandwidth="1 Gbit/s"), "tuning": TUNES}
        else:
            options |= {"plan": plan_of(kind, module, size), "cluster": cluster_of(kind, size)}
    trainer = trainer_class(
        accelerator="cpu",
        devices=size,
        plugins=[environment()],
        strategy=strategy_class(**options),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(8000, 8, generator=torch.Generator().manual_seed(0)))
    return outcome(lambda: trainer.fit(module, DataLoader(data, batch_size=4)))


def train(
    store: dist.Store,
    rank: int,
    size: int,
    rejoin: bool,
    port: int,
    kind: str,
    how: str,
    victim: int,
    timeout: float,
    where: str = "training",
    package: str = "lightning",
) -> dict[str, Any]:
    """What ``fit`` raises on this rank, and when."""
    join(rank, size, port)
    fate = Fate(store, how, victim)
    with mock.patch.object(resolution, "resolve", in_two_levels if kind == "two-level native" else resolve):
        return fit(
            package,
            lambda base: type("Faulty", (Job, base), {})(fate, where),
            size,
            kind=kind,
            timeout=timedelta(seconds=timeout),
        )


def train_with_overlap(
    store: dist.Store,
    rank: int,
    size: int,
    rejoin: bool,
    port: int,
    kind: str,
    how: str,
    victim: int,
    timeout: float,
    debug: bool,
) -> dict[str, Any]:
    """What ``fit`` raises on this rank, and what raises when weights are read and saved afterwards."""
    join(rank, size, port)
    made: list[Any] = []

    def job(base: type) -> Any:
        made.append(type("Faulty", (DueJob, base), {})(Fate(store, how, victim)))
        return made[0]

    options = {"overlap": "step", "overlap_debug": debug, "timeout": timedelta(seconds=timeout)}
    found = fit("lightning", job, size, kind=kind, **options)
    readers = (made[0].layer[0].weight.sum, made[0].state_dict)
    return {**found, "read": [outcome(reader) for reader in readers]}


def train_with_fabric(
    store: dist.Store,
    rank: int,
    size: int,
    rejoin: bool,
    port: int,
    how: str,
    victim: int,
    timeout: float,
    where: str,
    modules: int = 1,
) -> dict[str, Any]:
    """What a loop of the user's own, which trains the last of so many modules, raises on this rank, and when."""
    join(rank, size, port)
    strategy = AutoSyncFabricStrategy(plan="all_reduce", timeout=timedelta(seconds=timeout))
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    for _ in range(modules - 1):
        fabric.setup(nn.Linear(8, 1))
    fate, plain = Fate(store, how, victim), nn.Linear(8, 1)
    module, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.01))

    def loop() -> None:
        for step in range(1000):
            if step == STRUCK:
                fate.strike()
                if where != "training":
                    ask_all(strategy, where)
            optimizer.zero_grad()
            fabric.backward(module(torch.ones(4, 8)).square().mean())
            optimizer.step()

    if how == "exception" and rank == victim:
        loop()  # whose error ends the process
    return outcome(loop)

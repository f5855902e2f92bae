"""A user's script that uses the public names. ``mypy --strict`` must accept it, and refuse what is marked as wrong."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from lightning_autosync import (
    AutoDDLStrategy,
    AutoSyncFabricStrategy,
    AutoSyncStrategy,
    ClusterSpec,
    GlobalBatches,
    SyncMonitor,
    SyncPlan,
    TuningSettings,
    Workload,
    builders,
)
from lightning_autosync.cluster import resolve_cluster
from lightning_autosync.workload import describe


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layer(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def clusters(path: Path) -> list[ClusterSpec]:
    star = ClusterSpec.star(bandwidths=["400 Mbit/s", "100 Mbit/s"], latency="50 us")
    return [star, ClusterSpec.uniform(nodes=2, devices=4), ClusterSpec.load(path), resolve_cluster("four_equal")]


def plans(module: nn.Module, cluster: ClusterSpec, path: Path) -> list[SyncPlan]:
    workload: Workload = describe(module)
    made = builders.byteps(workload, cluster)
    made.save(path)
    print(made.describe(workload), made.semantics, made.groups[0].variables)
    return [made, SyncPlan.load(path), builders.build("packed_trees", workload, cluster)]


def train(cluster: ClusterSpec, plan: SyncPlan | None) -> str:
    strategy = AutoSyncStrategy(
        plan=plan,
        cluster=cluster,
        tuning=TuningSettings(plans=2),
        batch_shares=[1, 2],
        find_unused_parameters=True,
        process_group_backend="gloo",
        port_range=(20000, 20100),
        timeout=timedelta(minutes=5),
    )
    trainer = L.Trainer(strategy=strategy, num_nodes=2, callbacks=[SyncMonitor(every_n_steps=10)])
    trainer.fit(Model())
    report = strategy.report()
    steps = strategy.step_figures()
    print(strategy.plan, strategy.schedule, steps)
    return "" if report is None else str(report)


def split() -> L.Trainer:
    return L.Trainer(strategy=AutoDDLStrategy(memory="4GB", cluster="four_equal", timeout=60.0))


def loop(module: nn.Module) -> None:
    strategy = AutoSyncFabricStrategy(plan="byteps", overlap="step", static_graph=True)
    fabric = Fabric(strategy=strategy, devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(model(torch.zeros(1, 4)).sum())
    optimizer.step()
    if strategy.measure_steps()[0] and (figures := strategy.step_figures()[0]) is not None:
        fabric.log_dict(figures.metrics())
    strategy.settle()
    for report in strategy.report():
        print(report)


def batches(data: TensorDataset) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(data, batch_sampler=GlobalBatches(BatchSampler(RandomSampler(data), 64, drop_last=True)))


# What mypy must refuse: in strict mode, a comment that is not needed is an error itself.
AutoSyncStrategy(find_unused=True)  # type: ignore[call-arg]
AutoSyncStrategy(semantics="loose")  # type: ignore[arg-type]
AutoSyncStrategy(timeout="soon")  # type: ignore[arg-type]
AutoSyncFabricStrategy(port_range=20000)  # type: ignore[arg-type]
AutoDDLStrategy(batch_shares=[1, 2])  # type: ignore[arg-type]
SyncMonitor(every_n_steps="10")  # type: ignore[arg-type]

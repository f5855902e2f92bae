"""What ranks do in tests of batch shares: train with unequal parts of global batches, and compare with one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Thread
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import tuning_jobs
from jobs import QUIET
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy, ClusterSpec, GlobalBatches, GlobalStream
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import OWN_GROUP, gather_json
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Group, SyncPlan
from lightning_autosync.strategy.shares import auto
from lightning_autosync.strategy.shares.batch_shares import BatchShares
from lightning_autosync.strategy.shares.direct_calls import DirectCalls

FEATURES, CLASSES = 6, 3
SHARES = (1, 1, 2, 4)
EPOCHS = 17
"""Of trainings that are compared, if no plans are tried in them: with two batches in a step, they make 51 steps."""
SAMPLES = 82
"""Of global batches of 16, the last one has 2 samples: ranks 0 and 1 get none of them."""
BATCH = 4


class Numbered(Dataset[Any]):
    """Samples that know their numbers."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(samples, FEATURES, generator=generator)
        self.labels = torch.randint(0, CLASSES, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.inputs[index], self.labels[index]


class Stream(IterableDataset[Any]):
    """The same samples in order, dealt out to the workers of a data loader."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        worker, data = get_worker_info(), Numbered(self.samples)
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (data[number] for number in range(first, len(data), step))

    def __len__(self) -> int:
        return self.samples


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def make_module(
    framework: str = "lightning.pytorch",
    sampler: str = "shuffle",
    workers: int = 0,
    samples: int = SAMPLES,
    rate: float = 0.1,
    ignored: int = -100,
    logs: bool = False,
) -> Any:
    """A LightningModule of either framework that notes the samples that it counts.

    With ``logs``, it logs losses, for which all ranks wait for each other in each step.
    """
    module_class: type = import_module(framework).LightningModule

    class Noting(module_class):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.seen: list[tuple[int, list[int], int]] = []
            self.compute: Any = None

        def training_step(self, batch: Any, index: int) -> Tensor:
            numbers, inputs, labels = batch
            cut = self.trainer.strategy._shares.cut
            if self.compute is not None:
                self.compute(len(self.seen), len(numbers))
            self.seen.append((self.current_epoch, numbers[: cut.samples].tolist(), cut.total))
            loss = F.cross_entropy(self.network(inputs), labels, ignore_index=ignored)
            if logs:
                self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
                self.log("own", numbers.float().mean())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9)

        def train_dataloader(self) -> DataLoader[Any]:
            data, options = Numbered(samples), {"num_workers": workers, "persistent_workers": workers > 0}
            if sampler == "weighted":
                weights = torch.linspace(1.0, 2.0, len(data))
                return DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights, 40, replacement=False))
            if sampler == "stream":
                return DataLoader(GlobalStream(Stream(samples)), BATCH, drop_last=True, **options)
            if sampler == "global":
                batches = GlobalBatches(BatchSampler(SequentialSampler(data), 16, drop_last=False))
                return DataLoader(data, batch_sampler=batches)
            return DataLoader(data, BATCH, shuffle=True, drop_last=sampler == "drop_last", **options)

    return Noting()


def fit(
    module: Any,
    framework: str = "lightning.pytorch",
    strategy: Any = None,
    ckpt_path: str | None = None,
    loader: Any = None,
    **arguments: Any,
) -> Any:
    """The trainer after training with unequal shares."""
    flavour = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch"}[framework]
    if not hasattr(strategy, "setup"):
        strategies = import_module(f"lightning_autosync.strategy.{flavour}")
        strategy = strategies.AutoSyncStrategy(**{"batch_shares": SHARES, **(strategy or {})})
    environments = "lightning.fabric" if flavour == "lightning" else "lightning_fabric"
    environment = import_module(f"{environments}.plugins.environments").TorchElasticEnvironment()
    options = {"devices": dist.get_world_size(), "plugins": [environment], **QUIET, **arguments}
    trainer = import_module(framework).Trainer(accelerator="cpu", strategy=strategy, **options)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def one_process(
    epochs: int, accumulate: int, clip: float, samples: int = SAMPLES, ignored: int = -100, thaws: int = 0
) -> nn.Module:
    """The model of one process that computes global batches; its first layer trains from batch ``thaws`` on."""
    data, model = Numbered(samples), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        batches = order.split(16)
        for index, batch in enumerate(batches):
            model[0].requires_grad_(index >= thaws or epoch > 0)  # type: ignore[index]
            loss = F.cross_entropy(model(data.inputs[batch]), data.labels[batch], ignore_index=ignored)
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(batches):
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine.detach() - theirs.detach()).abs().max()) for mine, theirs in pairs)


def trainer_against_one_process(
    framework: str = "lightning.pytorch", pause: float = 0.0, epochs: int = EPOCHS, **strategy: Any
) -> dict[str, float]:
    """Each forward pass takes ``pause`` seconds longer."""
    module = make_module(framework)
    module.compute = lambda *_: time.sleep(pause)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer = fit(module, framework, strategy, max_epochs=epochs, **options)
    reference = one_process(epochs, 2, 0.5)
    return {
        "steps": trainer.global_step,
        "distance": distance(module.network, reference),
        "moved": distance(reference, network()),
        "largest": max(len(numbers) for _, numbers, _ in module.seen),
    }


def tuned_against_one_process(**strategy: Any) -> dict[str, float]:
    """Another plan every three steps; most plans are opened while a forward pass runs."""
    cluster = ClusterSpec.uniform(4, bandwidth="1 Gbit/s", name="four")
    with tuning_jobs.scripted_switches(every=3) as switches:
        options = {"cluster": cluster, "tuning": tuning_jobs.SHORT, **strategy}
        found = trainer_against_one_process(pause=0.02, epochs=6, **options)
    return {**found, "switches": len(switches)}


def fabric_against_one_process(plain_backward: bool, micro_batch: int | None = None) -> dict[str, float]:
    strategy = AutoSyncFabricStrategy(batch_shares=SHARES, micro_batch=micro_batch)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    model = network()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(Numbered(), BATCH, shuffle=True))
    largest = 0
    for _ in range(EPOCHS):
        for index, batch in enumerate(loader):
            steps = (index + 1) % 2 == 0 or index + 1 == len(loader)
            for _, inputs, labels in [batch] if micro_batch is None else strategy.micro_batches(batch):
                with fabric.no_backward_sync(wrapped, enabled=not steps):
                    loss = F.cross_entropy(wrapped(inputs), labels) / 2
                    loss.backward() if plain_backward else fabric.backward(loss)
                largest = max(largest, len(inputs))
            if steps:
                fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    fabric.strategy.teardown()
    reference = one_process(EPOCHS, 2, 0.5)
    return {"distance": distance(model, reference), "moved": distance(reference, network()), "largest": largest}


def samples_by_epoch(sampler: str = "shuffle", workers: int = 0, epochs: int = 2, **arguments: Any) -> list[list[int]]:
    """The numbers of the samples that all ranks counted, by epoch, in ascending order."""
    module = make_module(sampler=sampler, workers=workers)
    torch.manual_seed(dist.get_rank())  # generators of ranks are in different states after unequal batches
    fit(module, max_epochs=epochs, **arguments)
    return gathered(module, epochs)


def gathered(module: Any, epochs: int) -> list[list[int]]:
    ranks = gather_json(module.seen)
    return [
        sorted(number for rank in ranks for epoch, numbers, _ in rank if epoch == this for number in numbers)
        for this in range(epochs)
    ]


def logged(**strategy: Any) -> dict[str, list[float]]:
    """Logged losses of a model that does not change, and those of one process: of the last batch, and of all."""
    module = make_module(rate=0.0, logs=True)
    trainer = fit(module, strategy=strategy, max_epochs=1, log_every_n_steps=1)
    data, order = Numbered(), torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))
    losses = F.cross_entropy(module.network(data.inputs), data.labels, reduction="none").detach()
    found = trainer.callback_metrics
    return {
        "step": [float(found["loss_step"]), float(losses[order[-2:]].mean())],
        "epoch": [float(found["loss_epoch"]), float(losses.mean())],
    }


def means_over_terms(counts: bool = True, **strategy: Any) -> dict[str, Any]:
    """Training with a loss that leaves out samples with label 0, which the module ``counts`` or does not.

    Returns:
        The distance from one process, and the warnings.
    """
    module = make_module(ignored=0)
    if counts:
        type(module).loss_weight = lambda _, batch: (batch[2] != 0).sum()
    with warned() as texts:
        fit(module, strategy=strategy, max_epochs=3, accumulate_grad_batches=2)
    return {"distance": distance(module.network, one_process(3, 2, 1e9, ignored=0)), "warnings": texts}


@contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings of AutoSync within the block, after it."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [text for each in caught if (text := str(each.message)).startswith("AutoSync: ")]


def trains_with_batch_norm(synchronized: bool = False, fabric: bool = False, **strategy: Any) -> list[str]:
    """The warnings of a job with batch norm, whose last rank is half as fast as the others.

    It trains under a Trainer only. ``SyncBatchNorm``, which needs GPUs, can be set up everywhere.
    """
    clock, rank = Clock(), dist.get_rank()

    def compute(_: int, samples: int) -> None:
        clock.seconds += 0.05 * samples * (2.0 if rank == dist.get_world_size() - 1 else 1.0)

    normed = nn.Sequential(network(), nn.BatchNorm1d(CLASSES))
    with warned() as texts, mock.patch.object(auto, "now", clock):
        if fabric:
            each = Fabric(
                accelerator="cpu",
                devices=4,
                strategy=AutoSyncFabricStrategy(**strategy),
                plugins=[TorchElasticEnvironment()],
            )
            each.launch()
            each.setup_module(nn.SyncBatchNorm.convert_sync_batchnorm(normed) if synchronized else normed)
            each.strategy.teardown()
        else:
            module = make_module(samples=16 * 12, sampler="drop_last")
            module.network, module.compute = normed, compute
            fit(module, strategy=strategy, max_epochs=1)
    return texts


def thaws_while_gradients_accumulate() -> dict[str, float]:
    """The distance from one process of a model whose first layer trains from the third batch on."""
    module = make_module()
    module.network[0].requires_grad_(False)
    module.on_train_batch_start = lambda _, index: module.network[0].requires_grad_(index >= 2) and None
    fit(module, max_epochs=1, accumulate_grad_batches=2)
    reference = one_process(1, 2, 1e9, thaws=2)
    return {"distance": distance(module.network, reference), "moved": distance(reference[0], network()[0])}  # type: ignore[index]


def gathers_within_a_step() -> str:
    """The error for an all-gather of tensors with one entry for each sample."""
    module = make_module()
    return error_of_step(module, lambda _, samples: module.all_gather(torch.zeros(samples)))


def calls_within_a_micro_batch(direct: bool) -> str:
    """The error for a collective operation in a step that is computed in parts."""
    module = make_module()
    value = torch.zeros(1)
    call = dist.all_reduce if direct else module.all_gather
    return error_of_step(module, lambda *_: call(value) and None, micro_batch=2)


def calls_on_another_thread() -> dict[str, int]:
    """The number of direct calls after a gather of this package on another thread, and after one of the user's."""
    own, users = dist.new_group(group_desc=OWN_GROUP), dist.new_group()
    calls = DirectCalls()
    calls.begin()
    numbers = {}
    for name, group in (("own", own), ("user", users)):
        thread = Thread(target=gather_json, args=(name, group))
        thread.start()
        thread.join()
        numbers[name] = calls.number
    dist.destroy_process_group(own)
    dist.destroy_process_group(users)
    return numbers


def error_of_step(module: Any, compute: Any, **strategy: Any) -> str:
    module.compute = compute
    try:
        fit(module, strategy=strategy, max_epochs=1)
    except PlanError as error:
        return str(error)
    return ""


def forgets_micro_batches() -> str:
    """The error under Fabric for a gradient of a batch that was not divided."""
    strategy = AutoSyncFabricStrategy(batch_shares=SHARES, micro_batch=2)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    wrapped = fabric.setup_module(network())
    try:
        for _, inputs, labels in fabric.setup_dataloaders(DataLoader(Numbered(), BATCH)):
            F.cross_entropy(wrapped(inputs), labels).backward()
    except PlanError as error:
        return str(error)
    finally:
        fabric.strategy.teardown()
    return ""


def micro_batches_follow_speed() -> dict[str, Any]:
    """Samples by batch of the last rank, whose computation takes four times as long."""
    clock, rank, made = Clock(), dist.get_rank(), []

    def compute(_: int, samples: int) -> None:
        clock.seconds += (0.1 + 0.05 * samples) * (4.0 if rank == dist.get_world_size() - 1 else 1.0)

    module = make_module(samples=16 * 30, sampler="drop_last")
    module.compute = compute
    module.on_train_batch_end = lambda *_: made.append(module.trainer.strategy._shares.cut.samples)
    with mock.patch.object(auto, "now", clock):
        fit(module, max_epochs=1, strategy={"batch_shares": "auto", "micro_batch": 2})
    return {
        "samples": gather_json(made)[-1],
        "lost": gathered(module, 1) != [list(range(16 * 30))],
        "shares": module.trainer.strategy.report().to_dict()["batch_shares"],
        "report": str(module.trainer.strategy.report()),
    }


def micro_batch_that_does_not_divide() -> dict[str, Any]:
    """The error for a loader that is given to ``fit``, and whether a plan was chosen before it."""
    strategy = AutoSyncStrategy(batch_shares="auto", micro_batch=3)
    try:
        fit(make_module(), strategy=strategy, loader=DataLoader(Numbered(), BATCH), max_epochs=1)
    except PlanError as error:
        return {"error": str(error), "chosen": strategy.plan is not None}
    return {}


def batch_samplers_of_different_lengths() -> str:
    """The error for a batch sampler that has one batch more on rank 0."""
    batches = BatchSampler(SequentialSampler(range(17 if dist.get_rank() == 0 else 16)), 16, drop_last=False)
    loader = DataLoader(Numbered(), batch_sampler=GlobalBatches(batches))
    BatchShares((1.0,) * dist.get_world_size(), dist.get_rank()).cut_loader(loader)
    try:
        list(loader)
    except PlanError as error:
        return str(error)
    return ""


class Clock:
    """A clock that computation moves, at a pace that tests set."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def slows_down_in_trials(**arguments: Any) -> dict[str, Any]:
    """`slows_down` with overlap, while the job tries plans all the time."""
    strategy = {"cluster": ClusterSpec.uniform(4, bandwidth="1 Gbit/s", name="four"), "tuning": tuning_jobs.SHORT}
    with tuning_jobs.scripted_switches(every=9) as switches:
        found = slows_down(overlap="step", **strategy, **arguments)
    return {**found, "switches": len(switches)}


def slows_down_waiting(**arguments: Any) -> dict[str, Any]:
    """`slows_down` with overlap and a plan that waits."""
    plan = SyncPlan(
        world_size=4, waits=True, groups=(Group(name="all", variables=tuple(dict(make_module().named_parameters()))),)
    )
    return slows_down(overlap="step", plan=plan, **arguments)


def slows_down(
    workers: int = 0,
    begin: int = 0,
    fabric: bool = False,
    sampler: str = "shuffle",
    overlap: str | None = None,
    **strategy: Any,
) -> dict[str, Any]:
    """Samples of the last rank by batch, whose computation takes four times as long from batch ``begin`` on.

    With overlap, the other ranks wait for each message, the less the fewer samples the last rank has. Other options are
    those of the strategy of a Trainer.
    """
    clock, rank = Clock(), dist.get_rank()

    def compute(batch: int, samples: int) -> None:
        slow = rank == dist.get_world_size() - 1 and batch >= begin
        clock.seconds += (0.1 + 0.05 * samples) * (4.0 if slow else 1.0)

    finish = Engine.finish_message

    def finish_later(engine: Engine, index: int) -> None:
        if overlap and rank < dist.get_world_size() - 1:
            method: Any = engine.on_backward
            shares = method.__self__._shares.shares  # the replica's
            clock.seconds += 4.0 * shares[-1] / sum(shares)
        finish(engine, index)

    with mock.patch.object(auto, "now", clock), mock.patch.object(Engine, "finish_message", finish_later):
        if fabric:
            seen, lost = slows_down_in_fabric(compute, workers, overlap)
        else:
            batches = max(begin, (begin + 24) // 2)  # of an epoch, so that the shares have changed before two are over
            seen, lost = slows_down_in_trainer(compute, batches, workers, sampler, overlap=overlap, **strategy)
    return {"samples": seen, "lost": lost}


def slows_down_in_trainer(
    compute: Any, batches: int, workers: int, sampler: str, **strategy: Any
) -> tuple[list[int], float]:
    samples = 16 * batches + (0 if sampler == "stream" else 3)
    module = make_module(sampler=sampler, workers=workers, samples=samples)
    module.compute = compute
    fit(module, max_epochs=2, strategy={"batch_shares": "auto", **strategy})
    made = [len(numbers) if total == 16 else -1 for _, numbers, total in module.seen]
    return gather_json(made)[-1], float(gathered(module, 2) != [list(range(samples))] * 2)


def slows_down_in_fabric(compute: Any, workers: int, overlap: Any) -> tuple[list[int], float]:
    strategy = AutoSyncFabricStrategy(batch_shares="auto", overlap=overlap)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    model = network()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(Numbered(16 * 40), BATCH, shuffle=True, num_workers=workers))
    made, numbers = [], []
    for batch, inputs, labels in loader:
        compute(len(made), len(batch))
        made.append(len(batch))
        numbers += batch.tolist()
        F.cross_entropy(wrapped(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    fabric.strategy.teardown()
    everyone = sorted(number for rank in gather_json(numbers) for number in rank)
    return gather_json(made)[-1], float(everyone != list(range(16 * 40)))


class Breaks(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory for more than one sample."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradients: Tensor) -> Tensor:
        if len(gradients) > 1:
            raise torch.OutOfMemoryError("no room for gradients")
        return gradients


def runs_out_of_memory(where: str, micro_batch: int | None = None) -> dict[str, Any]:
    """Training with memory for a single sample on the last rank, found out in steps: for four, for two, for one.

    With micro-batches, that is for two and for one. ``share`` is the number of samples of this rank at the end.
    """
    last = dist.get_rank() == dist.get_world_size() - 1
    module = make_module(samples=16 * 12, logs=True)

    def compute(batch: int, samples: int) -> None:
        clock.seconds += 0.1 * samples
        if last and samples > 1 and where == "forward":
            raise MemoryError("no room for activations")

    clock = Clock()
    module.compute = compute
    if last and where == "backward":
        module.network[0].register_forward_hook(lambda _, __, output: Breaks.apply(output))
    with mock.patch.object(auto, "now", clock):
        strategy = {"batch_shares": "auto", "micro_batch": micro_batch}
        trainer = fit(module, max_epochs=1, strategy=strategy, accumulate_grad_batches=2)
    counted = [len(numbers) for _, numbers, _ in module.seen]
    return {
        "distance": distance(module.network, one_process(1, 2, 1e9, 16 * 12)),
        "samples": gather_json(counted)[-1][-3:],
        "share": gather_json(trainer.strategy._shares.cut.samples)[-1],
        "loss": float(module.trainer.callback_metrics["loss_epoch"]),
    }


def synchronized_batch_norm_in_fabric() -> str:
    """The error for a module that needs all ranks in each forward pass of a micro-batch."""
    strategy = AutoSyncFabricStrategy(batch_shares=SHARES, micro_batch=2)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    try:
        fabric.setup_module(nn.Sequential(network(), nn.SyncBatchNorm(CLASSES)))
    except PlanError as error:
        return str(error)
    finally:
        fabric.strategy.teardown()
    return ""


def groups_of_two_trainings() -> int:
    """How many groups of this package's the second of two trainings that overlap leaves beside those of the first."""

    def number() -> int:
        fit(make_module(), strategy={"batch_shares": "auto", "overlap": "step"}, max_epochs=1)
        return sum(group.group_desc == OWN_GROUP for group in dist.distributed_c10d._world.pg_map)

    return -number() + number()


def second_module() -> str:
    """The error for a second module, whose times would be mixed up with those of the first one."""
    strategy = AutoSyncFabricStrategy(batch_shares="auto")
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    fabric.setup_module(network())
    try:
        fabric.setup_module(network())
    except PlanError as error:
        return str(error)
    finally:
        fabric.strategy.teardown()
    return ""

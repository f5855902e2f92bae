"""Trainer, callbacks, checkpoints, data, logging."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from models import CLASSES, FEATURES, loader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from parity.case import Family
from parity.parts import HIDDEN, Task, adamw, mlp, sgd

if TYPE_CHECKING:
    from parity.side import Side

family = Family("trainer, callbacks, data", plans=("default", "native", "ring"))


def normed() -> nn.Module:
    return mlp(nn.BatchNorm1d(HIDDEN))


# Trainer's arguments -------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "two epochs": {},
    "some steps": {"max_epochs": -1, "max_steps": 6},
    "accumulation": {"accumulate_grad_batches": 3},
    "accumulation over the epoch's end": {"accumulate_grad_batches": 5, "max_epochs": 3},
    "few batches": {"limit_train_batches": 2, "limit_val_batches": 1},
    "validation within epochs": {"val_check_interval": 2},
    "validation of some epochs": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "validation by steps": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "sanity checks": {"num_sanity_val_steps": 2},
    "one batch over and over": {"overfit_batches": 1},
    "fast run": {"fast_dev_run": True},
    "no gradients where inference mode is off": {"inference_mode": False},
    "anomalies watched": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "loaders made anew": {"reload_dataloaders_every_n_epochs": 1},
    "loaders left alone": {"use_distributed_sampler": False},
    "simple profiler": {"profiler": "simple"},
    "barebones": {"barebones": True},
}
for _name, _arguments in ARGUMENTS.items():
    family.add(
        f"trainer: {_name}",
        lambda side, arguments=_arguments: side.fit(Task(normed()), **arguments),
    )
family.add("batch norm, validation", lambda side: side.fit(Task(normed()), val_check_interval=2, max_epochs=2))


@family()
def fitted_twice(side: Side) -> None:
    module = Task()
    trainer = side.fit(module, max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    side.note_trained(trainer, module)


@family()
def two_modules_one_after_the_other(side: Side) -> None:
    for _ in range(2):
        side.fit(Task(normed()), max_epochs=1)


@family()
def all_loops(side: Side) -> None:
    module = Task(normed())
    trainer = side.trainer(max_epochs=1)
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    side.note_trained(trainer, module)
    side.note("val", trainer.validate(module, verbose=False))
    side.note("test", trainer.test(module, verbose=False))
    side.note("predicted", trainer.predict(module))


@family()
def evaluation_of_buffers_that_differ(side: Side) -> None:
    module = Task(normed())
    module.net[2].running_mean.fill_(float(side.rank))
    trainer = side.trainer()
    side.note("val", trainer.validate(module, verbose=False))
    side.note("test", trainer.test(module, verbose=False))
    side.note("predicted", trainer.predict(module))
    side.note_module(module)


# Callbacks -----------------------------------------------------------------------------------------------------------


class Thaw(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.05)


class ForHead(Task):
    """Its optimizer begins with what is not frozen."""

    def __init__(self) -> None:
        super().__init__(normed())
        self.backbone = self.net[0]

    def configure_optimizers(self) -> Any:
        return sgd([parameter for parameter in self.parameters() if parameter.requires_grad])


CALLBACKS: dict[str, Any] = {
    "stochastic weight averaging": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    "exponential averages": lambda: EMAWeightAveraging(decay=0.5),
    "exponential averages by steps": lambda: EMAWeightAveraging(decay=0.5, update_every_n_steps=2),
    "weight averaging": lambda: WeightAveraging(use_buffers=True),
    "weight averaging without buffers": lambda: WeightAveraging(use_buffers=False),
    "accumulation by epochs": lambda: GradientAccumulationScheduler({0: 2, 1: 1, 2: 4}),
    "early stopping": lambda: EarlyStopping("val_loss", patience=0, min_delta=0.05),
    "early stopping in training": lambda: EarlyStopping("loss", patience=1, check_on_train_epoch_end=True),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.3, verbose=0),
    "checkpoints": lambda: ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
    "gradient lambda": lambda: LambdaCallback(
        on_after_backward=lambda trainer, module: [p.grad.mul_(0.5) for p in module.parameters()]
    ),
}
for _name, _callback in CALLBACKS.items():
    family.add(
        f"callback: {_name}",
        lambda side, callback=_callback: side.fit(
            Task(normed()), max_epochs=3, callbacks=[callback()], enable_checkpointing=True
        ),
    )
family.add("callback: parts thawed", lambda side: side.fit(ForHead(), max_epochs=3, callbacks=[Thaw()]), unused=True)
family.add(
    "callback: backbone thawed",
    lambda side: side.fit(ForHead(), max_epochs=3, callbacks=[BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)]),
    unused=True,
)


@family(unused=True)
def layers_thawed_by_hand(side: Side) -> None:
    class Gradual(Task):
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch > 0)

    side.fit(Gradual(normed()))


@family()
def weights_swapped_for_validation(side: Side) -> None:
    class Swap(Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self.kept = {name: value.clone() for name, value in module.state_dict().items()}
            with torch.no_grad():
                for value in module.state_dict().values():
                    value.mul_(0.5) if value.is_floating_point() else None

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            module.load_state_dict(self.kept)

    side.fit(Task(normed()), callbacks=[Swap()], val_check_interval=2)


@family()
def weights_loaded_in_training(side: Side) -> None:
    class Restart(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                torch.manual_seed(11)
                module.load_state_dict(Task(normed()).state_dict())

    side.fit(Task(normed()), callbacks=[Restart()])


@family()
def learning_rate_finder(side: Side) -> None:
    class Found(Task):
        lr = 0.01

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = Found(samples=64)
    finder = LearningRateFinder(num_training_steps=12, early_stop_threshold=None)
    side.fit(module, callbacks=[finder], max_epochs=1)
    side.note("lr", module.lr)


@family(raises="not supported")
def batch_size_finder(side: Side) -> None:
    module = Task()
    module.batch_size = 2
    side.fit(module, callbacks=[BatchSizeFinder(max_trials=2)], max_epochs=1)


@family(raises="not supported")
def tuner(side: Side) -> None:
    module = Task()
    module.batch_size = 2
    Tuner(side.trainer(max_epochs=1)).scale_batch_size(module, max_trials=2)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def _resumed(side: Side, first: str | None, second: str | None, **arguments: Any) -> None:
    """Train for an epoch under one strategy, and go on from the checkpoint under another; None is the job's own."""
    trainer = side.fit(Task(normed(), adamw), first, max_epochs=1, **arguments)
    path = side.folder / "kept.ckpt"
    trainer.save_checkpoint(path)
    side.fit(Task(normed(), adamw), second, max_epochs=3, ckpt_path=path, weights_only=False, **arguments)


family.add("resumed under the same strategy", lambda side: _resumed(side, None, None))
family.add("written by DDP, resumed by AutoSync", lambda side: _resumed(side, "ddp", None))
family.add("written by AutoSync, resumed by DDP", lambda side: _resumed(side, None, "ddp"))
family.add("resumed with accumulation", lambda side: _resumed(side, None, None, accumulate_grad_batches=3))
family.add("resumed in bf16-true", lambda side: _resumed(side, None, None, precision="bf16-true"))


@family()
def resumed_within_an_epoch(side: Side) -> None:
    trainer = side.fit(Task(normed(), adamw), max_epochs=-1, max_steps=2)
    path = side.folder / "kept.ckpt"
    trainer.save_checkpoint(path)
    side.fit(Task(normed(), adamw), max_epochs=2, ckpt_path=path, weights_only=False)


@family()
def best_checkpoint_tested(side: Side) -> None:
    trainer = side.fit(
        Task(normed(), adamw),
        callbacks=[ModelCheckpoint(monitor="val_loss", dirpath=side.folder)],
        enable_checkpointing=True,
    )
    side.note("tested", trainer.test(ckpt_path="best", verbose=False, weights_only=False))


@family()
def checkpoint_of_a_step_in_the_middle(side: Side) -> None:
    keeper = ModelCheckpoint(dirpath=side.folder, every_n_train_steps=3, save_top_k=-1)
    side.fit(Task(normed(), adamw), callbacks=[keeper], enable_checkpointing=True)
    files = sorted(path.name for path in side.folder.glob("*.ckpt"))
    side.note("files", files)
    kept = torch.load(side.folder / files[-1], weights_only=False)
    side.note("state", kept["state_dict"])
    side.note("keys", sorted(kept))


@family()
def loaded_from_a_checkpoint_without_a_trainer(side: Side) -> None:
    path = side.folder / "kept.ckpt"
    side.fit(Task(normed()), max_epochs=1).save_checkpoint(path, weights_only=True)
    module = Task(normed())
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    side.note_module(module)


# Data ----------------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        own = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(own)
        for _ in range(self.count):
            yield torch.randn(FEATURES, generator=generator), int(torch.randint(0, CLASSES, (), generator=generator))


def shuffled(count: int = 17, batch: int = 3, **options: Any) -> DataLoader:
    return DataLoader(loader(count, batch).dataset, batch_size=batch, **options)


LOADERS: dict[str, Any] = {
    "last batches that are smaller": lambda: loader(19, 4),
    "shuffled": lambda: shuffled(shuffle=True),
    "last batch dropped": lambda: shuffled(drop_last=True),
    "weighted": lambda: shuffled(sampler=torch.utils.data.WeightedRandomSampler([1.0] * 17, 12)),
    "iterable": lambda: DataLoader(Numbers(12), batch_size=3),
    "several at once": lambda: {"a": loader(8, 2), "b": loader(12, 2)},
    "a list": lambda: [loader(8, 2), loader(12, 2)],
    "worker processes": lambda: DataLoader(loader(12, 2).dataset, batch_size=2, num_workers=1),
    "a plain list of batches": lambda: list(loader(12, 2)),
}


class AnyBatch(Task):
    """Takes one batch, or several in whatever container."""

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            batch = list(batch.values())
        if isinstance(batch[0], Tensor):
            return super().loss(batch)
        return sum(super(AnyBatch, self).loss(part) for part in batch if part is not None)


for _name, _loader in LOADERS.items():
    family.add(
        f"data: {_name}",
        lambda side, make=_loader: side.fit(AnyBatch(), train_dataloaders=make()),
    )


@family()
def several_validation_loaders(side: Side) -> None:
    class Several(Task):
        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

        def val_dataloader(self) -> Any:
            return [loader(8, 2), loader(6, 2)]

    side.fit(Several(normed()))


@family()
def ranks_with_batches_of_other_sizes(side: Side) -> None:
    own = range(side.rank * 10, side.rank * 10 + 8 + 4 * side.rank)
    data = DataLoader(loader(24).dataset, batch_size=2 + side.rank, sampler=own)
    side.fit(Task(), train_dataloaders=data, use_distributed_sampler=False)


@family()
def data_module(side: Side) -> None:
    class Data(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.data = TensorDataset(torch.randn(18, FEATURES), torch.randint(0, CLASSES, (18,)))

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=3, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=4)

    side.fit(Task(normed()), datamodule=Data())


@family()
def random_augmentation(side: Side) -> None:
    class Augmented(Task):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]

    side.fit(Augmented(mlp(nn.Dropout(0.2))))


# Logging -------------------------------------------------------------------------------------------------------------


@family()
def metrics_logged_in_all_ways(side: Side) -> None:
    class Logs(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.loss(batch)
            own = loss.detach() * (self.global_rank + 1)
            self.log("own", own, on_step=True, on_epoch=True)
            self.log("mean", own, on_step=True, on_epoch=True, sync_dist=True)
            self.log("largest", own, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
            self.log("least", own, reduce_fx=torch.min, on_step=False, on_epoch=True, sync_dist=True)
            self.log("sum", own, reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
            self.log("whole", index, sync_dist=True, batch_size=2)
            self.log("first", own, rank_zero_only=True) if self.global_rank == 0 else None
            self.log_dict({"a": own, "b": 1.0}, sync_dist=True)
            return loss

    side.fit(Logs())


@family()
def metrics_of_torchmetrics(side: Side) -> None:
    class Measured(Task):
        def __init__(self) -> None:
            super().__init__(normed())
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
            self.kept = torchmetrics.MetricCollection([torchmetrics.F1Score("multiclass", num_classes=CLASSES)])

        def training_step(self, batch: Any, index: int) -> Any:
            self.accuracy(self(batch[0]), batch[1])
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            return super().training_step(batch, index)

        def validation_step(self, batch: Any, index: int) -> None:
            self.kept.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.kept.compute())
            self.kept.reset()

    side.fit(Measured())


@family()
def collectives_of_the_strategy(side: Side) -> None:
    class Talks(Task):
        def on_train_epoch_end(self) -> None:
            strategy = self.trainer.strategy
            own = torch.tensor([1.0, 2.0]) * (self.global_rank + 1)
            side.note("gathered", self.all_gather({"x": own, "y": [own * 2]}))
            side.note("sum", strategy.reduce(own.clone(), reduce_op="sum"))
            side.note("mean", strategy.reduce(own.clone()))
            side.note("told", strategy.broadcast({"rank": self.global_rank}, src=1))
            side.note(
                "decisions",
                [strategy.reduce_boolean_decision(bool(self.global_rank), all=every) for every in (True, False)],
            )
            strategy.barrier("here")
            place = [strategy.global_rank, strategy.world_size, strategy.local_rank, strategy.num_nodes]
            side.note("place", [*place, strategy.is_global_zero, strategy.is_distributed, str(strategy.root_device)])
            side.note("sampler", {key: str(value) for key, value in strategy.distributed_sampler_kwargs.items()})

    side.fit(Talks())


@family()
def gradients_through_a_gathering(side: Side) -> None:
    class Gathers(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            everyone = self.all_gather(self(batch[0]), sync_grads=True)
            return everyone.square().mean() + F.cross_entropy(everyone[self.global_rank], batch[1])

    side.fit(Gathers())


@family()
def what_modules_see_of_the_trainer(side: Side) -> None:
    class Looks(Task):
        def on_train_start(self) -> None:
            side.note("names", [name for name, _ in self.trainer.lightning_module.named_parameters()])
            side.note("same", self.trainer.lightning_module is self)
            side.note("world", [self.trainer.world_size, self.trainer.num_devices, self.trainer.num_nodes])
            side.note("batches", [self.trainer.estimated_stepping_batches, self.trainer.num_training_batches])
            side.note("sampler", type(self.trainer.train_dataloader.sampler).__name__)
            side.note("state", sorted(self.trainer.strategy.lightning_module_state_dict()))

    side.fit(Looks(normed()))


@family(raises="stop here")
def errors_of_the_users(side: Side) -> None:
    class Fails(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 2:
                raise ValueError("stop here")
            return super().training_step(batch, index)

    side.fit(Fails())


@family()
def training_stopped_by_the_user(side: Side) -> None:
    class Stops(Task):
        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.trainer.should_stop = index == 1

    side.fit(Stops())


@family()
def stopped_by_one_batch_hook(side: Side) -> None:
    class Stops(Task):
        def on_train_batch_start(self, batch: Any, index: int) -> Any:
            return -1 if index == 2 else None

    side.fit(Stops())

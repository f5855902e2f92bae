"""What Lightning's own tests of its DDP strategy check, rewritten: its source distributions come without tests.

Each case asserts what Lightning's test asserts, under DDP too, and then compares. Left out are tests that need GPUs,
and those of DDP's own machinery (communication hooks, bucket dtypes); ways of launching are in ``test_launch.py``.
"""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from parity.case import PLANS, Family
from parity.parts import Task, mlp

if TYPE_CHECKING:
    from parity.side import Side

family = Family("Lightning's own", plans=("default", "native", "servers", "ring"))
SHORT: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 2}


def launcher_of(strategy: Any, kind: type) -> bool:
    strategy.cluster_environment = LightningEnvironment()
    strategy._configure_launcher()
    return isinstance(strategy.launcher, kind)


@family()
def fit_only(side: Side) -> None:
    side.fit(BoringModel(), **SHORT)


@family()
def test_only(side: Side) -> None:
    trainer = side.trainer(**SHORT)
    trainer.test(BoringModel(), verbose=False)
    side.note("ended", [str(trainer.state.status), trainer.global_step])


@family()
def fit_then_test(side: Side) -> None:
    model = BoringModel()
    trainer = side.fit(model, datamodule=BoringDataModule(), **SHORT)
    side.note("tested", trainer.test(model, datamodule=BoringDataModule(), verbose=False))


@family()
def loaders_passed_to_fit(side: Side) -> None:
    model = BoringModel()
    side.fit(
        model,
        max_epochs=1,
        limit_train_batches=0.2,
        limit_val_batches=0.2,
        train_dataloaders=model.train_dataloader(),
        val_dataloaders=model.val_dataloader(),
    )


@family()
def torch_distributed_is_there_in_setup(side: Side) -> None:
    class Model(BoringModel):
        def setup(self, stage: str) -> None:
            assert _distributed_is_initialized()
            side.note("stage", str(stage))

    side.fit(Model(), **SHORT)


@family()
def the_device_is_the_cpu(side: Side) -> None:
    class Model(BoringModel):
        def on_train_start(self) -> None:
            assert self.device == torch.device("cpu")
            assert self.trainer.strategy.root_device == torch.device("cpu")
            assert isinstance(self.trainer.strategy, DDPStrategy)

    side.fit(Model(), **SHORT)


@family()
def configure_ddp_follows_setup(side: Side) -> None:
    """The model is wrapped, or taken over, for training only, and only after hooks have made it whole."""

    class Model(BoringModel):
        def configure_model(self) -> None:
            assert self.trainer.strategy.model is self
            side.note("stage", str(self.trainer.state.fn))

    for verb in ("fit", "test", "validate", "predict"):
        trainer = side.trainer(**SHORT)
        getattr(trainer, verb)(Model())
        assert trainer.strategy.lightning_module is not None


@family()
def the_module_is_itself_again_afterwards(side: Side) -> None:
    model = BoringModel()
    trainer = side.fit(model, **SHORT)
    assert trainer.model is model
    assert trainer.lightning_module is model
    assert trainer.strategy.model is model


@family()
def early_stopping(side: Side) -> None:
    class Model(Task):
        def on_train_epoch_end(self) -> None:
            self.log("own", float(self.global_rank), sync_dist=True)

    trainer = side.fit(Model(), callbacks=[EarlyStopping("own", patience=1)], max_epochs=10)
    assert trainer.current_epoch < 10


@family()
def metrics_arrive(side: Side) -> None:
    class Model(BoringModel):
        def validation_step(self, batch: Any, index: int) -> Any:
            self.log("val_acc", 1.0)
            return super().validation_step(batch, index)

    trainer = side.fit(Model(), datamodule=BoringDataModule(), fast_dev_run=True)
    assert trainer.callback_metrics["val_acc"] == torch.tensor(1.0)


@family()
def parameters_are_there_for_optimizers(side: Side) -> None:
    class Model(BoringModel):
        def configure_optimizers(self) -> Any:
            assert all(parameter.device.type == "cpu" for parameter in self.parameters())
            return super().configure_optimizers()

    side.fit(Model(), fast_dev_run=True)


@family(unused=True)
def intermediate_layer_without_gradients(side: Side) -> None:
    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.intermediate = nn.Linear(32, 32)

        def training_step(self, batch: Any, index: int) -> Any:
            with torch.no_grad():
                batch = self.intermediate(batch)
            return super().training_step(batch, index)

    side.fit(Model(), **SHORT)


@family(plans=("default",))
def names_are_registered(side: Side) -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    ways = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for ending, method in ways.items():
        name = ("ddp" if side.is_ddp else "autosync") + ending
        assert name in StrategyRegistry
        assert name in STRATEGY_REGISTRY
        made = StrategyRegistry.get(name)
        assert isinstance(made, DDPStrategy)
        assert made._start_method == method
        kind = _SubprocessScriptLauncher if method == "popen" else _MultiProcessingLauncher
        assert launcher_of(made, kind)
    side.note("checked", len(ways))


@family(plans=("default",))
def the_trainer_takes_the_name(side: Side) -> None:
    """Accelerators and devices are as the connector has them for DDP."""
    for devices in (1, 2, 3):
        name = "ddp" if side.is_ddp else "autosync"
        with mock.patch.dict(os.environ):
            for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"):
                os.environ.pop(variable, None)
            trainer = Trainer(strategy=name, accelerator="cpu", devices=devices, logger=False, num_nodes=2)
        assert isinstance(trainer.strategy, DDPStrategy)
        assert isinstance(trainer.strategy.cluster_environment, LightningEnvironment | TorchElasticEnvironment)
        side.note("sizes", [trainer.num_devices, trainer.num_nodes, trainer.strategy.num_processes])


@family(plans=("default",))
def processes_made_elsewhere_are_not_launched_again(side: Side) -> None:
    trainer = side.trainer(**SHORT)
    assert isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher)
    with mock.patch.object(trainer.strategy.launcher, "_call_children_scripts") as children:
        trainer.fit(BoringModel())
    children.assert_not_called()
    side.note("world", trainer.world_size)


@family(plans=("default", "native"))
def strategies_can_be_pickled(side: Side) -> None:
    strategy = side.strategy(check_replicas=10) if not side.is_ddp else DDPStrategy()
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is type(strategy)
    side.note("backend", str(again.process_group_backend))


@family(plans=("default",))
def arguments_reach_the_strategy(side: Side) -> None:
    from datetime import timedelta

    strategy = side.strategy(process_group_backend="gloo", timeout=timedelta(seconds=90), start_method="spawn")
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout == timedelta(seconds=90)
    assert strategy._start_method == "spawn"
    side.note("done", True)


@family()
def checkpoint_equals_the_trained_weights(side: Side) -> None:
    model = BoringModel()
    trainer = side.fit(model, max_steps=1, max_epochs=-1)
    path = trainer.strategy.broadcast(str(side.folder / "model.pt"))
    trainer.save_checkpoint(path)
    saved = BoringModel.load_from_checkpoint(path, weights_only=False)
    for trained, loaded in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(trained, loaded)


@family()
def one_rank_writes_checkpoints(side: Side) -> None:
    writer = ModelCheckpoint(dirpath=side.folder, save_top_k=-1, every_n_epochs=1)
    with mock.patch.object(torch, "save", wraps=torch.save) as save:
        side.fit(BoringModel(), callbacks=[writer], enable_checkpointing=True, max_epochs=2, limit_train_batches=2)
    assert (save.call_count > 0) == (side.rank == 0)
    assert len(list(side.folder.glob("*.ckpt"))) == 2


@family(unused=True)
def manual_optimization_with_toggles(side: Side) -> None:
    """Gradients are equal on all ranks where they are synchronized, and differ where they are not."""

    class Model(ManualOptimBoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 2)
            self.other = nn.Linear(32, 2)

        def training_step(self, batch: Any, index: int) -> None:
            for turn, (optimizer, layer) in enumerate(zip(self.optimizers(), (self.layer, self.other), strict=True)):
                sync = (index + turn) % 2 == 0
                with optimizer.toggle_model(sync_grad=sync):
                    self.manual_backward((layer(batch) * (self.global_rank + 1)).square().mean())
                    parts = self.all_gather(layer.weight.grad)
                    assert bool(torch.allclose(parts[0], parts[1])) == sync
                    if sync:
                        optimizer.step()
                        optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layer, self.other)]

    side.fit(Model(), **SHORT)


@family()
def step_of_the_optimizer_is_called_once_a_batch(side: Side) -> None:
    class Model(ManualOptimBoringModel):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            loss = self.step(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    with mock.patch.object(torch.optim.SGD, "step", autospec=True, side_effect=torch.optim.SGD.step) as step:
        side.fit(Model(), **SHORT)
    assert step.call_count == 4


@family()
def no_synchronization_while_accumulating(side: Side) -> None:
    class Looks(Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()])
            parts = trainer.strategy.all_gather(flat)
            last = (trainer.fit_loop.epoch_loop.batch_idx + 1) % 2 == 0
            assert bool(torch.allclose(parts[0], parts[1])) == last

    side.fit(Task(), callbacks=[Looks()], accumulate_grad_batches=2, max_epochs=1)


@family()
def samplers_are_distributed(side: Side) -> None:
    class Looks(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            for found, shuffles in ((trainer.train_dataloader, True), (trainer.val_dataloaders, False)):
                assert isinstance(found.sampler, DistributedSampler)
                assert found.sampler.shuffle == shuffles
                side.note("sampler", [found.sampler.rank, found.sampler.num_replicas, found.sampler.drop_last])

    data = DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 6), torch.zeros(8).long()), shuffle=True)
    side.fit(Task(), train_dataloaders=data, callbacks=[Looks()], max_epochs=1)


@family()
def samplers_are_left_alone_if_so_asked(side: Side) -> None:
    class Looks(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            assert isinstance(trainer.train_dataloader.sampler, SequentialSampler)

    side.fit(Task(), callbacks=[Looks()], max_epochs=1, use_distributed_sampler=False)


@family()
def predictions_of_all_ranks(side: Side) -> None:
    trainer = side.trainer(**SHORT)
    found = trainer.predict(BoringModel(), return_predictions=True)
    assert len(found) > 0
    side.note("predicted", found)


@family()
def gathering_keeps_gradients(side: Side) -> None:
    class Model(BoringModel):
        def on_train_start(self) -> None:
            own = torch.ones(8, requires_grad=True)
            gathered = self.all_gather(own, sync_grads=True)
            gathered.sum().backward()
            assert torch.equal(own.grad, torch.full((8,), 2.0))
            side.note("collections", self.all_gather({"a": own.detach(), "b": [torch.zeros(1), 3]}))

    side.fit(Model(), **SHORT)


@family()
def reduced_values_are_those_of_all_ranks(side: Side) -> None:
    class Model(BoringModel):
        def training_step(self, batch: Any, index: int) -> Any:
            own = torch.tensor(float(self.global_rank + 1))
            for kind in ("sum", "mean", "max", "min"):
                self.log(kind, own, on_step=False, on_epoch=True, sync_dist=True, reduce_fx=kind)
            return super().training_step(batch, index)

    trainer = side.fit(Model(), **SHORT)
    expected = {"sum": 12.0, "mean": 1.5, "max": 2.0, "min": 1.0}
    for name, value in expected.items():
        assert float(trainer.callback_metrics[name]) == value


@family()
def only_rank_0_logs(side: Side) -> None:
    from lightning.pytorch.loggers import CSVLogger

    class Model(Task):
        pass

    logger = CSVLogger(side.folder, flush_logs_every_n_steps=1)
    side.fit(Model(), logger=logger, log_every_n_steps=1, max_epochs=1)
    dist.barrier()
    files = list(side.folder.rglob("metrics.csv"))
    assert len(files) == 1
    side.note("lines", files[0].read_text().count("\n"))


@family()
def gradients_of_all_precisions_are_clipped(side: Side) -> None:
    class Model(Task):
        def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
            super().configure_gradient_clipping(optimizer, **settings)
            norm = torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()
            assert float(norm) < 0.05 + 1e-4

    for precision in ("32-true", "bf16-mixed", "64-true"):
        side.fit(Model(), precision=precision, gradient_clip_val=0.05, max_epochs=1)


@family()
def gradient_scaler_steps_and_updates(side: Side) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    side.fit(Task(), plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], max_epochs=1)
    assert scaler.get_scale() > 2.0**8
    side.note("scale", scaler.get_scale())


@family()
def steps_are_estimated(side: Side) -> None:
    for accumulate in (1, 2, 3):
        trainer = side.trainer(max_epochs=2, accumulate_grad_batches=accumulate)
        trainer.fit(Task())
        side.note("steps", trainer.estimated_stepping_batches)


@family()
def an_error_in_one_hook_ends_training(side: Side) -> None:
    class Model(Task):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            raise RuntimeError("boom")

    trainer = side.trainer(max_epochs=1)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(Model())
    side.note("state", [str(trainer.state.status), str(trainer.state.fn), trainer.interrupted])


@family(plans=("default", "native"))
def saved_by_the_strategy_strictly(side: Side) -> None:
    model = Task(mlp(nn.BatchNorm1d(8)))
    path = side.folder / "kept.ckpt"
    side.fit(model, max_epochs=1).save_checkpoint(path)
    kept = torch.load(path, weights_only=False)["state_dict"]
    assert set(kept) == set(model.state_dict())
    assert not any(name.startswith("module.") for name in kept)
    trainer = side.trainer(max_epochs=1)
    trainer.fit(Task(mlp(nn.BatchNorm1d(8))), ckpt_path=path, weights_only=False)
    side.note("resumed", [trainer.global_step, str(trainer.state.fn is TrainerFn.FITTING)])


@family()
def shared_parameters(side: Side) -> None:
    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.second.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(self.second(self.first(inputs)))

    model = Model()
    side.fit(model, **SHORT)
    assert model.second.weight is model.first.weight


@family(plans=("default",))
def plans_are_named(side: Side) -> None:
    """Each of our names in the place of ``ddp``."""
    for given in PLANS.values():
        if isinstance(given, str):
            trainer = Trainer(
                strategy="ddp" if side.is_ddp else given,
                accelerator="cpu",
                devices=2,
                plugins=[TorchElasticEnvironment()],
                fast_dev_run=True,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            torch.manual_seed(3)
            model = BoringModel()
            trainer.fit(model)
            side.note_module(model)

"""`AutoSyncFabricStrategy`: the strategy for Fabric."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_autosync.engine.collectives import gather_json, new_group
from lightning_autosync.engine.cpu_scheduling import set_batch_scheduling
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Semantics
from lightning_autosync.ports import PortRange, listening_within
from lightning_autosync.strategy.agreement import checked_formation, compare_ranks
from lightning_autosync.strategy.base import SynchronizedModule, accumulation
from lightning_autosync.strategy.checkpoint import KEY
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.launching import CheckedLaunch
from lightning_autosync.strategy.overlap import defer_steps_of
from lightning_autosync.strategy.settings import (
    CHECK_REPLICAS,
    DEFAULT_TIMEOUT,
    ClusterArgument,
    Overlap,
    PlanArgument,
    Scheduling,
    StartMethod,
    Timeout,
    names_class,
    read_settings,
)
from lightning_autosync.strategy.shares.auto import AutoShares, open_shares
from lightning_autosync.strategy.shares.batch_shares import BatchCutter, BatchShares
from lightning_autosync.strategy.shares.cuts import SharesArgument
from lightning_autosync.strategy.shares.loaders import is_global
from lightning_autosync.strategy.shares.losses import loss_weight_of
from lightning_autosync.strategy.shares.micro_batches import check_norms
from lightning_autosync.strategy.shares.sampler import is_distributed
from lightning_autosync.strategy.trainer import frameworks_own
from lightning_autosync.strategy.tuning.proposals import JobLinks
from lightning_autosync.strategy.tuning.report import TuningReport
from lightning_autosync.strategy.tuning.settings import TuningArgument
from lightning_autosync.strategy.tuning.step_meter import StepFigures


class FabricModule(SynchronizedModule):
    """The wrapper that Fabric calls instead of the user's module.

    Attributes:
        scaler: Fabric's loss scaler; None if there is none.
        shares: the shares of the job; None if batches are not shared out.
    """

    replica: ExactReplica

    def __init__(
        self, module: nn.Module, replica: ExactReplica, scaler: GradScaler | None, shares: BatchShares | None
    ) -> None:
        super().__init__(module, replica)
        self.scaler, self.shares = scaler, shares

    @torch.compiler.disable
    def _before_forward(self) -> None:
        self.replica.before_forward(self.replica.enabled and torch.is_grad_enabled())
        if torch.is_grad_enabled():  # a module trains in evaluation too, for instance with fixed statistics
            self.replica.note_changes()
            if self.shares is not None:
                self.shares.begin_forward(self.module)
        # The scale changes only between steps, so it can be read in the forward pass. A strategy with its own backward
        # method could read it later, but Fabric would then forbid a plain `loss.backward()`.
        self.replica.follow_scaler(self.scaler)


class AutoSyncFabricStrategy(DDPStrategy):
    """``Fabric(strategy="autosync")``: each module that is set up gets its own engine.

    For arguments and errors, see `AutoSyncMixin`. ``fabric.backward(loss)`` and a plain ``loss.backward()`` both leave
    synchronized gradients. ``fabric.save`` and ``fabric.load`` include the state of compressors with each module.
    """

    @names_class
    def __init__(
        self,
        plan: PlanArgument = None,
        semantics: Semantics = "exact",
        cluster: ClusterArgument = None,
        scheduling: Scheduling = None,
        *,
        tuning: TuningArgument = "auto",
        batch_shares: SharesArgument = None,
        micro_batch: int | None = None,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        check_replicas: int = CHECK_REPLICAS,
        overlap: Overlap = None,
        overlap_debug: bool = False,
        port_range: PortRange | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
    ) -> None:
        self._settings, launch = read_settings(locals())
        if not self._settings.scheduled:
            raise PlanError(
                f"{self._settings.source}: Fabric supports synchronous plans without `served` only; for other plans "
                "use the Trainer, or `lightning_autosync.relaxed` in your own loop"
            )
        super().__init__(**launch)
        self._backward_sync_control = _AccumulationControl()  # type: ignore[assignment]  # of other modules than DDP's
        self._replicas: list[ExactReplica] = []
        self._wrappers: weakref.WeakSet[FabricModule] = weakref.WeakSet()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._set_up = 0
        """Number of modules that were set up. Unlike those that live, it is the same on all ranks."""
        self._links: JobLinks | None = None
        self._farewell: Callable[[], Any] | None = None
        self._shares: BatchShares | None = None
        self._ports = ExitStack()

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        assert self._launcher is not None
        self._launcher.launch = CheckedLaunch(self, self._settings)  # type: ignore[method-assign]

    def setup_environment(self) -> None:
        self._ports.enter_context(listening_within(self._settings.port_range))
        if self._settings.scheduling == "batch" and self.root_device.type == "cpu":
            set_batch_scheduling()
        self._set_world_ranks()
        with checked_formation(self.cluster_environment, self._settings):
            super().setup_environment()
            line = compare_ranks(self._settings)
        if line is not None:
            # Fabric has no hook for the end of a script.
            self._farewell = weakref.finalize(self, line.close)
        self._shares = open_shares(self._settings, self.global_rank, self.world_size, self.root_device)

    def setup_module(self, module: nn.Module) -> FabricModule:  # type: ignore[override]  # in place of DDP's module
        # Only the replica of the first module measures links again when they change, so only its links are up to date.
        first = (each.links for each in self._replicas if each.may_measure_again and each.links is not None)
        self._links = next(first, self._links)
        self._close_unused(module)
        others = self._set_up - (module in self._modules)
        if others and isinstance(self._shares, AutoShares):
            raise PlanError(
                "batch_shares='auto': a batch is timed for one module, but this is the second one; give a share for "
                "each rank"
            )
        if self._shares is not None and self._settings.micro_batch is not None:
            check_norms(module)
        # Each module has its own group, because ranks may complete messages of two modules in different orders.
        # A group takes the backend's own time-out unless it is told one.
        group = new_group(timedelta(seconds=self._settings.timeout)) if others else None
        links = self._links if others else None
        replica = ExactReplica(module, self._settings, self.num_nodes, self.num_processes, group, True, links)
        self._replicas.append(replica)
        if others:
            for each in self._replicas:
                each.join_others()
        if self._shares is not None:
            replica.share(self._shares)
        wrapped = FabricModule(module, replica, getattr(self.precision, "scaler", None), self._shares)
        self._wrappers.add(wrapped)
        self._modules.add(module)
        self._set_up, self._links = others + 1, replica.links
        return wrapped

    def process_dataloader(self, dataloader: Any) -> Any:
        if self._shares is None:
            return dataloader
        # A loader without a distributed sampler is the user's own: one for validation on a single rank, for example.
        cuts = is_global(dataloader) or is_distributed(dataloader)
        return SharedLoader(dataloader, self._shares.cut_loader(dataloader) if cuts else None, self._shares)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        optimizer = super().setup_optimizer(optimizer)
        if self._settings.overlap is not None:
            defer_steps_of([optimizer], self._settings)
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        with self._unscaling():
            self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        if norm_type == 2.0 and self._alone and frameworks_own(self.precision, "unscale_gradients"):
            norm = self._replicas[0].clip_by_norm(parameters, float(max_norm), error_if_nonfinite)
            if norm is not None:
                return norm
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        with self._unscaling():
            super().clip_gradients_value(module, optimizer, clip_val)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        with self._unscaling():
            return super().optimizer_step(optimizer, **kwargs)

    @property
    def _alone(self) -> bool:
        """Whether there is one module. With two, ranks may complete messages of both in different orders."""
        return len(self._replicas) == 1

    def _unscaling(self) -> AbstractContextManager[None]:
        scaler = getattr(self.precision, "scaler", None)
        return self._replicas[0].unscaling(scaler) if self._alone else nullcontext()

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """The parts of the loader's last batch that this rank computes one after another, with ``micro_batch``::

            for batch in loader:
                for part in fabric.strategy.micro_batches(batch):
                    fabric.backward(compute_loss(model, part))
                optimizer.step()
                optimizer.zero_grad()

        Each part has a forward and a backward pass. Losses are means over samples of the part, or over the terms that
        ``loss_weight`` of the module counts, and are not divided by the number of parts. Gradients are synchronized in
        the last part's backward pass. Without ``micro_batch``, or if the loader is not cut, the only part is the batch.

        Args:
            batch: the batch.

        Raises:
            PlanError: the batch cannot be cut.
        """
        if self._shares is None:
            return iter([batch])
        modules = (replica.module for replica in self._replicas)
        weighed = next((module for module in modules if loss_weight_of(module) is not None), None)
        return self._shares.divide(batch, weighed, self._accumulation)

    @contextmanager
    def _accumulation(self) -> Iterator[None]:
        """A context in which backward passes only accumulate gradients on this rank."""
        with ExitStack() as contexts:
            for replica in self._replicas:
                contexts.enter_context(accumulation(replica))
            yield

    def settle(self) -> None:
        """Complete all parameters whose last step is still due; see `AutoSyncMixin.settle`."""
        for replica in self._replicas:
            replica.settle()

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        self._notice_changes()
        return super().all_reduce(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._notice_changes()
        return super().all_gather(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._notice_changes()
        super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        self._notice_changes()
        return super().broadcast(*args, **kwargs)

    def _notice_changes(self) -> None:
        """Let this rank compare parameters before a collective call, if other ranks do so already."""
        for replica in self._replicas:
            replica.notice_change()

    def report(self) -> list[TuningReport]:
        """For each module that is set up: how its gradients are synchronized, why, and which plans were tried."""
        return [replica.report() for replica in self._replicas]

    def measure_steps(self) -> list[bool]:
        """For each module that is set up: like `Replica.measure_steps`; later modules have no figures."""
        return [replica.measure_steps() for replica in self._replicas]

    def step_figures(self) -> list[StepFigures | None]:
        """For each module that is set up: like `Replica.step_figures`."""
        return [replica.step_figures() for replica in self._replicas]

    def _close_unused(self, module: nn.Module) -> None:
        """Close the engine of ``module``, which is set up again, and those of modules that the user has deleted.

        The former would exchange gradients twice. The latter would keep their modules in memory. All ranks close the
        same ones, because they destroy process groups together: a rank may notice later than others what is deleted.
        """
        if not self._replicas:  # on all ranks
            return
        wrapped = {wrapper.replica for wrapper in self._wrappers}
        deleted = [replica not in wrapped and not replica.awaits_backward for replica in self._replicas]
        self._notice_changes()
        everywhere = [all(ranks) for ranks in zip(*gather_json(deleted), strict=True)]
        used = []
        for replica, unused in zip(self._replicas, everywhere, strict=True):
            if replica.module is module:
                replica.replace()
            elif unused:
                replica.close_together()
            else:
                used.append(replica)
        self._replicas = used

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return super().get_module_state_dict(_unwrap(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(_unwrap(module), state_dict, strict=strict)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.settle()  # the state of compressors is that of passes that have ended
        entries = {name: replica.gather_state() for name, replica in _replicas_in(state).items()}
        held = {name: entry for name, entry in entries.items() if entry is not None}
        super().save_checkpoint(path, {**state, KEY: held} if held else state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        replicas = _replicas_in(state)
        entries = rest.pop(KEY, {}) if replicas else {}
        for name, entry in entries.items():
            if name in replicas:
                replicas[name].restore_state(entry)
        return rest

    def teardown(self) -> None:
        with ExitStack() as closing:
            closing.callback(self._ports.close)
            closing.callback(super().teardown)
            if self._farewell is not None:
                closing.callback(self._farewell)
            for replica in reversed(self._replicas):
                closing.callback(replica.close)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: importing `lightning_autosync` registers the names."""


class SharedLoader:
    """A data loader that tells the shares of the job when it returns a batch. Its attributes are the data loader's.

    A pass over it may interrupt one over another loader, in an evaluation for example. When it ends, gradients belong
    to the other loader's batch again.

    Args:
        loader: a data loader.
        sampler: its sampler, which cuts its batches; None if it is not cut.
        shares: the shares of the job.
    """

    def __init__(self, loader: Any, sampler: BatchCutter | None, shares: BatchShares) -> None:
        self.__dict__.update(vars(loader))  # Fabric copies them to the loader that users see
        self._own, self._own_sampler, self._own_shares, self._own_passes = loader, sampler, shares, 0

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[Any]:
        shares = self._own_shares
        interrupted, latest = shares.present if shares.open_passes else None, None
        self._own_passes = number = self._own_passes + 1
        shares.open_passes += 1
        try:
            for batch in self._own:
                if self._own_sampler is None:
                    shares.begin_uncut_batch()
                elif number == self._own_passes:
                    shares.begin_batch(batch, self._own_sampler)
                else:
                    raise PlanError(
                        "batch_shares: a second pass over a data loader began before this one ended; end a pass "
                        "before the next one, or use two data loaders"
                    )
                latest = shares.present
                yield batch
        finally:
            shares.open_passes -= 1
            if interrupted is not None and shares.present is latest:
                shares.resume(interrupted)


class _AccumulationControl:
    """Fabric's ``no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not isinstance(module, FabricModule):
            raise TypeError(f"no_backward_sync: expected a module that Fabric set up, got {type(module).__name__}")
        return accumulation(module.replica) if enabled else nullcontext()


def refuse_autoddl() -> None:
    """What ``Fabric(strategy="autoddl")`` calls.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        "strategy: 'autoddl' splits operators under the Trainer only; allowed with Fabric: 'autosync' "
        "(AutoSyncFabricStrategy), which is data-parallel"
    )


def _unwrap(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, FabricModule) else module


def _replicas_in(state: Any) -> dict[str, ExactReplica]:
    """Replicas of the modules in a checkpoint's state, by name."""
    if not isinstance(state, dict):
        return {}
    return {name: value.replica for name, value in state.items() if isinstance(value, FabricModule)}

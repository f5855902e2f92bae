"""A replica for plans without a schedule: ranks exchange when they are ready; epochs end with a barrier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_autosync.documents import bytes_text, counted
from lightning_autosync.engine.collectives import BufferBroadcast, broadcast_tensors
from lightning_autosync.engine.replicas import ParameterTracker
from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.relaxed.base import Synchronizer
from lightning_autosync.relaxed.factory import open_synchronizer
from lightning_autosync.strategy.base import Replica
from lightning_autosync.strategy.checkpoint import RelaxedCheckpoint
from lightning_autosync.strategy.intercepted_steps import intercepted_steps
from lightning_autosync.strategy.job import (
    RunningJob,
    announce_job,
    check_rejoin_secret,
    find_job,
    open_mesh,
    rejoin_enabled,
    withdraw_job,
)
from lightning_autosync.strategy.log import rank_zero_info
from lightning_autosync.strategy.process_group import JobMembers, refused_collectives
from lightning_autosync.strategy.resolution import resolve_together
from lightning_autosync.strategy.schedules import estimated_epochs
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.shared_data import SharedWork, batch_size, describe_equal_shares, share_data
from lightning_autosync.strategy.trainer import (
    EpochBarrier,
    check_closure,
    check_finders,
    check_module,
    check_one_loader,
    check_rejoin,
    check_shared_epoch,
    check_trainer,
    put_first,
)
from lightning_autosync.strategy.trainer_state import TrainerProgress, TrainerStateServer, request_trainer_state
from lightning_autosync.strategy.tuning.step_meter import RelaxedMeter, StepFigures
from lightning_autosync.workload import IGNORED, variable_names

UNEVEN = ("partial_reduce", "asynchronous")
"""Modes in which fast ranks do not wait for slow ones, and should therefore get larger shares of the data."""
AVERAGING = ("partial_reduce", "periodic")
"""Modes in which each rank steps its own optimizer. In other modes, servers step and keep the optimizer's state."""


class RelaxedReplica(Replica):
    """Synchronizes a module by partial reduce, periodic averaging or parameter servers.

    Between two barriers (`drain`), ranks may take different numbers of steps.

    Args:
        module, settings, nodes, devices, rank: as for `Replica.for_trainer`; the plan has no schedule.
        job: the result of `find_job` if this rank returns to a job, otherwise None. A returning process must be alone
            in its process group.

    Attributes:
        rejoined: whether this process returned after its rank was lost.

    Raises:
        DocumentError: (or a subclass, on every rank) plan, model, cluster and job do not fit each other.
        ExchangeError: ranks cannot connect to each other.
    """

    enabled = True
    detects_failures = True

    def __init__(
        self,
        module: nn.Module,
        settings: StrategySettings,
        nodes: int,
        devices: int,
        rank: int,
        job: RunningJob | None = None,
    ) -> None:
        self._module, self._settings = module, settings
        self._resolution = found = resolve_together(settings, module, nodes, devices)
        self._check_module()
        broadcast_tensors([tensor.data for tensor in (*module.parameters(), *module.buffers())])
        opened = open_mesh(found, settings, rank, job)
        self._mesh = opened.mesh
        self._store: dist.TCPStore | None = opened.store
        size, timeout = found.plan.world_size, settings.timeout
        self._members = JobMembers(self._mesh, opened.store, size, self._served, timeout)
        if rank == 0 and not self._served:
            announce_job(opened)
        self._work = SharedWork(self._mesh, size, timeout)
        self._share: int | None = None
        """Batches per epoch and rank, on average; None if the data is not dealt out."""
        self._checkpoint = RelaxedCheckpoint(self._mesh, self._mode, self._served, timeout)
        self._buffers = BufferBroadcast(module) if self._in_step and settings.broadcast_buffers else None
        self._watch = ParameterTracker(module)
        self._frozen: list[nn.Parameter] = []
        self._synchronizer: Synchronizer | None = None
        """The synchronizer; None before the first step and after `close`."""
        self._trainer: Any = None
        self._progress: TrainerProgress | None = None
        self._state_server: TrainerStateServer | None = None
        self.rejoined = job is not None
        self._rejoining = self.rejoined
        """Whether this rank returned and has passed no barrier since; the others may be in the middle of an epoch."""
        self._drained = True
        self._has_stepped = False
        """Whether this rank has begun a step since the last barrier."""
        self._refusals = ExitStack()
        """Refusals of collective calls, which other ranks would not join between two barriers."""
        self._interception = ExitStack()
        """Where steps of the optimizer come here during training."""
        self._samples = 0
        self._computing = self._stepping = False
        self._meter: RelaxedMeter | None = None
        mode = found.plan.consistency
        options = [f"{name} {value}" for name, value in mode if name != "mode" and value is not None]
        differs = "" if mode.mode == "synchronous" else "; the result differs from DDP's"
        rank_zero_info(
            f"AutoSync: plan {found.plan.fingerprint} ({', '.join([mode.mode, *options])}; {counted(size, 'rank')}, "
            f"{bytes_text(found.workload.bytes)}{differs}): {found.reason}"
        )

    def _check_module(self) -> None:
        if not self._in_step:
            check_module(self._module)
        if ignored := getattr(self._module, IGNORED, ()):
            raise PlanError(
                f"model: {IGNORED} names '{next(iter(ignored))}', but mode '{self._mode}' averages all parameters and "
                f"buffers; remove {IGNORED}, or use a plan that synchronizes gradients"
            )

    @classmethod
    def for_trainer(
        cls, module: nn.Module, settings: StrategySettings, nodes: int, devices: int, rank: int, job: RunningJob | None
    ) -> RelaxedReplica:
        return cls(module, settings, nodes, devices, rank, job)

    @classmethod
    def find_job(cls, host: str, timeout: float, first: bool) -> RunningJob | None:
        check_rejoin_secret()
        return None if first else find_job(host, timeout)

    @property
    def plan(self) -> SyncPlan:
        return self._resolution.plan

    @property
    def _mode(self) -> str:
        return self.plan.consistency.mode

    @property
    def _in_step(self) -> bool:
        """Whether all ranks make each step together, because servers wait for all of them."""
        return self._mode == "synchronous"

    @property
    def _served(self) -> bool:
        """Whether servers step the optimizer and keep its state."""
        return self._mode not in AVERAGING

    def measure_steps(self) -> bool:
        if self._meter is None:
            self._meter = RelaxedMeter()
        return True

    def step_figures(self) -> StepFigures | None:
        return None if self._meter is None else self._meter.take()

    def _steps(self) -> int:
        """Number of steps that this rank's model represents."""
        return 0 if self._synchronizer is None else self._synchronizer.progress

    # Training

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        check_finders(trainer, self._mode)
        put_first(trainer, EpochBarrier())

    def share_data(self, dataloader: object) -> object:
        if self._mode in UNEVEN and self._trainer.training:
            share = share_data(dataloader, self._work, self.plan.world_size, self._trainer.current_epoch)
            if share is not None:
                check_shared_epoch(self._trainer)
                self._share = share
        return dataloader

    def estimating_steps(self) -> AbstractContextManager[None]:
        return estimated_epochs(self._trainer.fit_loop, lambda: self._share)

    def start_training(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        """Begin training, from rank 0's model or from the state given to `restore_state`.

        Raises:
            PlanError: there is not exactly one optimizer, servers cannot run it, the Trainer has a setting that needs
                all ranks at the same step, or training has begun before.
        """
        self._check_training(optimizers, scaler)
        self._frozen = [parameter for parameter in self._module.parameters() if not parameter.requires_grad]
        self._watch.accept()
        found = self._resolution
        self._synchronizer = open_synchronizer(
            found.plan,
            found.workload,
            self._module,
            self._mesh,
            optimizer=optimizers[0],
            cluster=found.cluster,
            timeout=self._settings.timeout,
            stall=self._settings.stall,
            source=self._settings.source,
        )
        self._checkpoint.begin(self._synchronizer, optimizers[0], variable_names(self._module))
        if not self.rejoined and not self._in_step:
            # Before the start, after which the progress may include steps of ranks that began earlier.
            self._follow_progress()
        self._synchronizer.start()
        if self.rejoined and not self._in_step:
            drain = self._synchronizer.joined_after
            self._follow_progress(request_trainer_state(self._mesh, drain, self._settings.timeout))
        self._intercept_steps(optimizers[0])

    def _intercept_steps(self, optimizer: Optimizer) -> None:
        stepping, make = partial(self.stepping, optimizer), partial(self._step, optimizer)
        self._interception.enter_context(intercepted_steps(optimizer, stepping, make))

    def _check_training(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        trainer = self._trainer
        if self._synchronizer is not None:
            raise PlanError(f"training begins twice within one fit(); mode '{self._mode}' allows that once")
        check_trainer(trainer, self.plan.consistency, scaler)
        if self._share is not None:
            check_one_loader(trainer)
        elif self._mode in UNEVEN:
            rank_zero_warn(describe_equal_shares(trainer.train_dataloader))
        if self.rejoined:
            check_rejoin(trainer)
        if len(optimizers) != 1:
            raise PlanError(
                f"plan: consistency.mode '{self._mode}' needs exactly one optimizer, but the model has "
                f"{len(optimizers)}; use one with several parameter groups"
            )
        if not self._served:
            check_closure(optimizers[0], self._mode)

    def _follow_progress(self, state: dict[str, Any] | None = None) -> None:
        """Let schedules and ``trainer.global_step`` follow the job's progress, and send it to ranks that return.

        Args:
            state: rank 0's, if this rank returned to the job.
        """
        self._progress = TrainerProgress(self._trainer, self._share, self._steps, state)
        if not self._served and self._mesh.rank == 0 and rejoin_enabled():
            self._state_server = TrainerStateServer(self._mesh, self._progress.describe)

    def resume(self) -> None:
        """Leave the last barrier, on all ranks, even on one that gets no batch before the next one."""
        if not self._drained or self._synchronizer is None:
            return
        if self._state_server is not None:
            drain = self._synchronizer.last_drain
            # Only this rank calls the callbacks' `state_dict`, so a collective call in it would hang.
            with refused_collectives(self._refused_call), self._computation():
                self._state_server.resume(0 if drain is None else drain.number)
        self._synchronizer.resume()
        self._drained = False
        if self._meter is not None:
            self._meter.begin(self._mesh.bytes_sent)

    def begin_batch(self) -> None:
        if self._progress is not None:
            self._progress.skip_missed_batches()

    @contextmanager
    def training_step(self, batch: Any) -> Iterator[None]:
        """The context of the user's training step, which refuses collective calls, because no other rank would join.

        Raises:
            PlanError: a parameter was unfrozen, added, removed or replaced since training began.
        """
        self._check_parameters()
        self.resume()
        if not self._has_stepped and not self._in_step:
            self._refusals.enter_context(refused_collectives(self._refused_call))
        self._has_stepped = True
        self._samples += batch_size(batch)
        with self._computation():
            yield

    def before_forward(self, synchronizes: bool) -> None:
        if self._buffers is not None:
            self._buffers.before_forward(synchronizes)

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """The context of ``optimizer.step(closure)``, which passes gradients to the synchronizer."""
        before, self._stepping = self._stepping, True
        try:
            with self._computation():
                yield
        finally:
            # With manual optimization, this runs within a training step, which continues.
            self._stepping = before

    def _step(self, optimizer: Optimizer) -> None:
        synchronizer = self._synchronizer
        assert synchronizer is not None
        before = synchronizer.seconds_waited
        synchronizer.step(optimizer, self._samples)
        self._samples = 0
        if self._meter is not None:
            self._meter.add(synchronizer.seconds_waited - before, self._mesh.bytes_sent)

    def drain(self) -> None:
        """Wait for all ranks, which then have the same model; do nothing if this rank has not left the last barrier."""
        if self._drained or self._synchronizer is None:
            return
        self._synchronizer.drain()
        self._drained, self._has_stepped, self._rejoining = True, False, False
        self._refusals.close()
        if self._state_server is not None:
            self._state_server.pause()
        assert self._synchronizer.last_drain is not None
        self._members.follow(self._synchronizer.last_drain)
        if self._progress is not None:
            self._progress.follow()

    @contextmanager
    def _computation(self) -> Iterator[None]:
        """The context of a rank's own work within a step."""
        before, self._computing = self._computing, not self._in_step
        try:
            yield
        finally:
            self._computing = before

    def _check_parameters(self) -> None:
        if self._watch.changed() and (replaced := self._watch.replaced() or self._watch.reformed()):
            raise PlanError(
                f"model: parameter '{replaced[0]}' was added, removed, replaced or converted. Mode '{self._mode}' "
                "does not allow this during training: change the model before fit(), or call fit() again"
            )
        if any(parameter.requires_grad for parameter in self._frozen):
            raise PlanError(
                f"model: a parameter was unfrozen. Mode '{self._mode}' does not allow this during training: unfreeze "
                "before fit(), or call fit() again"
            )

    # Collective calls and checkpoints

    @contextmanager
    def collective(self, what: str, each_step: bool = False) -> Iterator[None]:
        """The context of a collective call, before which all ranks wait for each other.

        The call is refused inside a training step, because other ranks may be elsewhere. Between two steps, it is
        refused if ranks take different numbers of steps, or if it follows every step (``each_step``): ranks would then
        wait for each other in every step, and synchronization would no longer be relaxed.

        Raises:
            ExchangeError: the call is refused, this rank was expelled, or a rank that the call needs is lost.
        """
        self._drain_for(what, each_step)
        if self._synchronizer is not None:
            self._members.check(what)
        with self._members.collective(what):
            yield

    def before_checkpoint(self) -> None:
        self._drain_for("a checkpoint")

    def _drain_for(self, what: str, each_step: bool = False) -> None:
        """Wait for all ranks before ``what``, or raise if it is not certain that all ranks come here."""
        if self._synchronizer is None or (self._stepping and self._in_step):
            return
        if self._rejoining and not self._drained:
            raise ExchangeError(
                f"{what}: this rank rejoined, and must wait for the other ranks at the end of the epoch before any "
                "collective call"
            )
        # Outside of training, for example around validation, all ranks come, however many batches each has taken.
        between = self._has_stepped and self._trainer.training
        if self._computing or (between and (self._share is not None or (each_step and not self._in_step))):
            raise self._refusal(what, "log with on_step=False and on_epoch=True, or without sync_dist")
        self.drain()

    def _refusal(self, what: str, instead: str) -> ExchangeError:
        where = "inside a training step" if self._computing else "between training steps"
        return ExchangeError(
            f"{what} {where}: under mode '{self._mode}' other ranks are at different steps, so a collective call "
            f"would deadlock or make them wait; {instead}, and make other collective calls at the end of an epoch"
        )

    def _refused_call(self, name: str) -> ExchangeError:
        return self._refusal(name, "do what needs no other rank")

    def optimizer_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        return self._checkpoint.optimizer_state(saved)

    def gather_state(self) -> dict[str, Any] | None:
        """The checkpoint's entry, on rank 0. Call this after `optimizer_state`."""
        self.drain()
        return self._checkpoint.gather()

    def restore_state(self, entry: dict[str, Any] | None, steps: int) -> None:
        self._checkpoint.restore(entry, steps)

    # The end

    def fail(self, error: BaseException) -> None:
        self._members.announce(error)

    def close(self) -> None:
        """Stop synchronizing, and leave the mesh."""
        self._refusals.close()
        self._interception.close()
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._synchronizer = None
            self._checkpoint.end()
        if self._state_server is not None:
            self._state_server.close()
        if self._store is not None and not self._served and self._mesh.rank == 0:
            withdraw_job(self._store)
        self._work.close()
        self._mesh.close()
        self._store = self._state_server = self._progress = None

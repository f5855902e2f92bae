"""One rank's replica of a module under a plan without a schedule: ranks talk when they are ready, not in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_autosync.engine.collectives import BufferBroadcast, broadcast_tensors
from lightning_autosync.engine.watch import ParameterWatch
from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.relaxed.averaging_worker import AveragingWorker
from lightning_autosync.relaxed.base import Synchronizer
from lightning_autosync.relaxed.factory import open_synchronizer
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.strategy.checkpoint import RelaxedCheckpoint
from lightning_autosync.strategy.job import Underway, announce_job, can_return, open_mesh, withdraw_job
from lightning_autosync.strategy.process_group import Others, World, refused_collectives, told_of_loss
from lightning_autosync.strategy.resolution import resolve_together
from lightning_autosync.strategy.settings import Settings
from lightning_autosync.strategy.shared_data import SharedWork, batch_size
from lightning_autosync.strategy.trainer import check_module
from lightning_autosync.strategy.trainer_state import PositionDesk, ask_position
from lightning_autosync.workload import IGNORED, variable_names

UNEVEN = ("partial_reduce", "asynchronous")
"""Modes in which a fast rank is not held up by a slow one, so that they should not have equal shares of the data."""
AVERAGING = ("partial_reduce", "periodic")
"""Modes in which each rank steps its own optimizer; in the others servers step, and keep the optimizer's state."""

_FAILED = "rank failed"
"""Message of a rank that ends with an error."""
_LONGEST_REASON = 4096
"""Characters of an error that others are told."""


class RelaxedReplica:
    """Parameters and buffers of ``module`` that partial reduces, averages or servers keep together.

    Ranks meet only in `settle`; between two of them each may take another number of steps.

    Args:
        module: on its device and in its dtype.
        settings: what the user asked for; the plan has no schedule.
        nodes: number of the job's nodes.
        devices: ranks on each.
        rank: this process's in the job.
        job: of `find_job`, where this rank comes back to it; this process is alone in its process group then.

    Attributes:
        share: batches of an epoch, divided by ranks, where they are dealt out; None where they are not.
        after_meeting: what follows the job's progress, called after each meeting, if anything does.
        returning: whether this process came back after its rank was lost.

    Raises:
        DocumentError: (or a subclass, on every rank) plan, model, cluster and job do not fit each other.
        ExchangeError: ranks cannot connect to each other.
    """

    engine = None
    schedule = None

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        nodes: int,
        devices: int,
        rank: int,
        job: Underway | None = None,
    ) -> None:
        self._module = module
        self._settings = settings
        self._resolution = found = resolve_together(settings, module, nodes, devices)
        if not self.in_step:
            check_module(module)
        if ignored := getattr(module, IGNORED, ()):
            raise PlanError(
                f"model: {IGNORED} names '{next(iter(ignored))}', but '{found.plan.consistency.mode}' averages all "
                "parameters and buffers; allowed with plans that synchronize gradients"
            )
        broadcast_tensors([tensor.data for tensor in (*module.parameters(), *module.buffers())])
        self.returning = job is not None
        opened = open_mesh(found, settings, rank, job)
        self._mesh, store = opened.mesh, opened.store
        self._lost: dict[int, str] = {}
        self._others = Others(rank, self._lost_now, self.fail, settings.timeout)
        self._world: World | None = None
        if not self.served:
            self._world = World(store, found.plan.world_size, self._lost, self._others)
            if rank == 0:
                announce_job(opened)
        self._store: dist.TCPStore | None = store
        self._desk: PositionDesk | None = None
        self._absent: set[int] = set()
        """As at the last meeting."""
        self._mesh.on_loss(self._lost.__setitem__)
        self._mesh.on_join(self._forget_loss)
        self._mesh.subscribe(_FAILED, self._hear_of_failure)
        self.work = SharedWork(self._mesh, found.plan.world_size, settings.timeout)
        self.share: int | None = None
        self.after_meeting: Callable[[], None] | None = None
        self._synchronizer: Synchronizer | None = None
        self._buffers = BufferBroadcast(module) if self.in_step and settings.broadcast_buffers else None
        self.enabled = True
        """Whether a backward pass ends a step, and does not only accumulate gradients."""
        self._frozen: list[nn.Parameter] = []
        self._watch = ParameterWatch(module)
        self._checkpoint = RelaxedCheckpoint(self._mesh, found.plan.consistency.mode, self.served, settings.timeout)
        self._settled = True
        self._unmet = self.returning
        """Whether this rank came back and has not met the others yet, which may be in the midst of an epoch."""
        self._apart = False
        """Whether this rank has begun a step since all met."""
        self._guard = ExitStack()
        """From then on, while ranks are at steps of their own, a collective call would not be answered."""
        self._samples = 0
        self._busy = self._stepping = False
        rank_zero_info(
            f"AutoSync: plan {found.plan.fingerprint} ({found.plan.consistency.mode}, {found.plan.world_size} ranks, "
            f"{found.workload.bytes / 1e6:.3g} MB): {found.reason}"
        )

    @property
    def plan(self) -> SyncPlan:
        return self._resolution.plan

    @property
    def synchronizer(self) -> Synchronizer | None:
        """What runs; None before the first step and after `close`."""
        return self._synchronizer

    @property
    def shares_data(self) -> bool:
        """Whether an epoch should be dealt out among the ranks as they are ready for more."""
        return self.plan.consistency.mode in UNEVEN

    @property
    def dealt_out(self) -> bool:
        """Whether an epoch's data is dealt out, so that each rank takes another number of batches."""
        return self.share is not None

    @property
    def in_step(self) -> bool:
        """Whether ranks march in step after all, for their servers wait for all of them."""
        return self.plan.consistency.mode == "synchronous"

    @property
    def served(self) -> bool:
        """Whether servers make the steps and keep the optimizer's state."""
        return self.plan.consistency.mode not in AVERAGING

    @property
    def progress(self) -> int:
        """Steps that the model held here stands for."""
        return 0 if self._synchronizer is None else self._synchronizer.progress

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin to train, from rank 0's model or from what `restore_state` was given; all ranks do.

        Raises:
            PlanError: the optimizers are not one, or the servers cannot do what it does.
        """
        if self._synchronizer is not None:
            return
        if len(optimizers) != 1:
            raise PlanError(
                f"plan: consistency.mode '{self.plan.consistency.mode}' trains with one optimizer, the model has "
                f"{len(optimizers)}; allowed: one, with parameter groups"
            )
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
        )
        self._checkpoint.begin(self._synchronizer, optimizers[0], variable_names(self._module))
        self._synchronizer.start()

    def tell_position(self, describe: Callable[[], bytes]) -> None:
        """From now on, tell ranks that come back where training is: ``describe`` of the Trainer, at each pass."""
        if self._world is not None and self._mesh.rank == 0 and can_return():
            self._desk = PositionDesk(self._mesh, describe)

    def ask_position(self) -> dict[str, Any]:
        """Where the others are, for a rank that came back; after `start`. See `position.ask_position`."""
        assert isinstance(self._synchronizer, AveragingWorker)
        return ask_position(self._mesh, self._synchronizer.entered, self._settings.timeout)

    def begin_pass(self) -> None:
        """Training goes on from here, on all ranks, even on one that will get no batch before they meet again."""
        if self._settled and self._synchronizer is not None:
            if self._desk is not None:
                assert isinstance(self._synchronizer, AveragingWorker)
                meeting = self._synchronizer.meeting
                # States of callbacks are asked for on this rank alone.
                with refused_collectives(self._refused_call), self.forward():
                    self._desk.open(0 if meeting is None else meeting.number)
            self._synchronizer.resume()
            self._settled = False

    def before_training(self, batch: Any) -> None:
        """Call before each forward pass of training.

        Raises:
            PlanError: a parameter was unfrozen, added, removed or replaced since `start`.
        """
        if self._watch.changed() and (replaced := self._watch.replaced() or self._watch.reformed()):
            raise PlanError(
                f"model: parameter '{replaced[0]}' was added, removed, replaced or converted; under "
                f"'{self.plan.consistency.mode}' those that train are the same from the beginning: change the model "
                "before fit(), or fit() again"
            )
        if any(parameter.requires_grad for parameter in self._frozen):
            raise PlanError(
                f"model: a parameter was unfrozen; under '{self.plan.consistency.mode}' those that train are the same "
                "from the beginning: unfreeze before fit(), or fit() again"
            )
        self.begin_pass()
        if not self._apart and not self.in_step:
            self._guard.enter_context(refused_collectives(self._refused_call))
        self._apart = True
        self._samples += batch_size(batch)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the user's training step, in which collective calls would never be answered."""
        before, self._busy = self._busy, not self.in_step
        try:
            yield
        finally:
            self._busy = before

    def meet(self, what: str, at_meeting: bool, each_step: bool = False) -> None:
        """Settle, for something is about to be done on all ranks together.

        Args:
            what: that which errors name.
            at_meeting: whether all ranks come here in any case, however many batches each has taken.
            each_step: whether it is done after every step, if after one at all; then all would settle each time, and
                little would be left of what is relaxed.

        Raises:
            ExchangeError: it comes from inside a training step, or between two of them where ranks take unequal
                numbers of steps, for there the others need not be; or between two and after ``each_step``.
        """
        if self._synchronizer is None or (self._stepping and self.in_step):
            return
        if self._unmet and not self._settled:
            raise ExchangeError(
                f"{what}: this rank came back, and meets the others at the end of an epoch only, before anything else"
            )
        between = self._apart and not at_meeting
        if self._busy or (between and (self.dealt_out or (each_step and not self.in_step))):
            raise self._refusal(what, "log with on_step=False and on_epoch=True, or without sync_dist")
        self.settle()

    def _refusal(self, what: str, instead: str) -> ExchangeError:
        where = "inside a training step" if self._busy else "between training steps"
        return ExchangeError(
            f"{what} {where}: under '{self.plan.consistency.mode}' the other ranks are at other steps, and would not "
            f"answer, or only by waiting for each other; {instead}, and do the rest at the end of an epoch"
        )

    def _refused_call(self, name: str) -> ExchangeError:
        return self._refusal(name, "do what needs no other rank")

    def before_collective(self, what: str, at_meeting: bool, each_step: bool = False) -> None:
        """As `meet`, for they are about to make a collective call together: all who met, or where servers step, all.

        Raises:
            ExchangeError: as `meet`; this rank was given up; or one is lost under servers.
        """
        self.meet(what, at_meeting, each_step)
        if self._synchronizer is None:
            return
        if self._mesh.error is not None:
            raise self._mesh.error
        if self._lost and self.served:
            lost = "; ".join(f"rank {rank} is lost ({why})" for rank, why in sorted(self._lost.items()))
            # Lightning's callback for checkpoints asks all ranks before it writes.
            raise ExchangeError(
                f"{what} needs all ranks: {lost}; a checkpoint that is due now may be missing: go on from the last "
                "that there is"
            )

    @contextmanager
    def together(self, what: str, at_meeting: bool, each_step: bool = False) -> Iterator[None]:
        """Around a collective call; see `before_collective`."""
        self.before_collective(what, at_meeting, each_step)
        with told_of_loss(what, self._others):
            yield

    def before_forward(self, synchronizes: bool) -> None:
        """Call before each forward pass; ``synchronizes`` if a step may follow."""
        if self._buffers is not None:
            self._buffers.before_forward(synchronizes)

    @contextmanager
    def backward(self, scaler: Any = None) -> Iterator[None]:
        """Around a backward pass, which stays on this rank."""
        yield

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, ``optimizer.step(closure)`` computes gradients and hands them to the synchronizer."""
        own = optimizer.step
        wrapped = "step" in vars(optimizer)

        def step(closure: Any = None, **_: Any) -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            # The synchronizer may step the optimizer itself.
            optimizer.step = own  # type: ignore[method-assign]
            assert self._synchronizer is not None
            self._synchronizer.step(optimizer, self._samples)
            self._samples = 0
            return loss

        optimizer.step = step  # type: ignore[method-assign]
        before = self._stepping, self._busy
        self._stepping, self._busy = True, not self.in_step
        try:
            yield
        finally:
            # With manual optimization, the training step goes on.
            self._stepping, self._busy = before
            if wrapped:
                optimizer.step = own  # type: ignore[method-assign]
            else:
                del optimizer.step

    def settle(self) -> None:
        """Meet all ranks and leave with the same model on each; nothing if no step was made since."""
        if self._settled or self._synchronizer is None:
            return
        self._synchronizer.drain()
        self._settled, self._apart, self._unmet = True, False, False
        self._guard.close()
        if self._desk is not None:
            self._desk.shut()
        self._note_absence(self._synchronizer.met)
        if self._world is not None and isinstance(self._synchronizer, AveragingWorker):
            assert self._synchronizer.meeting is not None
            self._world.follow(self._synchronizer.meeting)
        if self.after_meeting is not None:
            self.after_meeting()

    def fail(self, error: BaseException) -> None:
        """This rank ends with an error: let the others name it, unless it is they who caused it."""
        if self._mesh.closed or (self._lost_now() and isinstance(error, ExchangeError)):
            return
        why = f"it ended with {type(error).__name__}: {error}"[:_LONGEST_REASON]
        for peer in self._mesh.live - {self._mesh.rank}:
            with suppress(ExchangeError):  # it is lost as well
                self._mesh.send(peer, _FAILED, {"why": why})

    def _lost_now(self) -> dict[int, str]:
        """Ranks that collective calls wait for, and are lost."""
        return self._lost.copy() if self._world is None else self._world.lost()

    def _hear_of_failure(self, mail: Mail) -> None:
        self._lost.setdefault(mail.sender, str(mail.header.get("why")))

    def _forget_loss(self, rank: int) -> None:
        self._lost.pop(rank, None)

    def _note_absence(self, met: frozenset[int]) -> None:
        """Keep count of who is lost, and say so where that has changed."""
        absent = set(range(self.plan.world_size)) - met
        # A loss may be known there before this rank hears of it; and who leaves in good order is not lost at all.
        for rank in absent if self.served else ():
            self._lost.setdefault(rank, "it did not come to the meeting of all")
        if absent != self._absent:
            self._absent = absent
            ranks = ", ".join(map(str, sorted(absent)))
            gone = f"without {'rank' if len(absent) == 1 else 'ranks'} {ranks}, which did not come, the others go on"
            rank_zero_warn(gone if absent else "all ranks are back")

    # Checkpoints

    def optimizer_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's own state (``saved``) with what servers keep of it, on rank 0; all ranks must have met."""
        return self._checkpoint.optimizer_state(saved)

    def gather_state(self) -> dict[str, Any] | None:
        """The checkpoint's entry on rank 0, None elsewhere: what every rank needs to go on; collective.

        Plain values and tensors, readable with ``torch.load(weights_only=True)``. Comes after `optimizer_state`.
        """
        self.settle()
        return self._checkpoint.gather()

    def restore_state(self, entry: dict[str, Any] | None, steps: int) -> None:
        """Go on from what `gather_state` returned; see `RelaxedCheckpoint.restore`."""
        self._checkpoint.restore(entry, steps)

    def close(self) -> None:
        """Leave the others."""
        self._guard.close()
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._synchronizer = None
            self._checkpoint.end()
        if self._desk is not None:
            self._desk.close()
            self._desk = None
        if self._world is not None and self._mesh.rank == 0 and self._store is not None:
            withdraw_job(self._store)
        self.work.close()
        self._mesh.close()
        self._store = self._world = self.after_meeting = None

"""The common code of `AutoDDLStrategy` for the Trainers of lightning and pytorch_lightning."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_autosync.cluster import parse_bytes
from lightning_autosync.documents import is_path, read_data, shown
from lightning_autosync.engine.replicas import require_equal_structures
from lightning_autosync.errors import AutoSyncError, DocumentError, EquivalenceError, PeerLost, PlanError, WorkloadError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.compiled import Uncompiled, takes_home_values
from lightning_autosync.hybrid.execution.equivalence import ComparedStep
from lightning_autosync.hybrid.validation import check_plan
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.ports import PortRange
from lightning_autosync.strategy.agreement import agree
from lightning_autosync.strategy.autoddl_checkpoint import SplitCheckpoints
from lightning_autosync.strategy.base import SynchronizedModule
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.first_batch import FirstBatch
from lightning_autosync.strategy.hybrid_choice import Choice, choose_hybrid_plan, common_choice
from lightning_autosync.strategy.log import rank_zero_info
from lightning_autosync.strategy.mixin import AutoSyncMixin
from lightning_autosync.strategy.replica_comparison import follow_rank_zero
from lightning_autosync.strategy.resolution import check_size, with_connected_interfaces
from lightning_autosync.strategy.settings import (
    CHECK_REPLICAS,
    DEFAULT_TIMEOUT,
    ClusterArgument,
    Scheduling,
    StrategySettings,
    Timeout,
    names_class,
    read_settings,
    reason_of_given,
)
from lightning_autosync.strategy.split import SplitReplica
from lightning_autosync.strategy.trainer import kinds

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object

HybridPlanArgument = HybridPlan | SyncPlan | str | os.PathLike[str] | None

_ALLOWED = "allowed: a HybridPlan, an exact SyncPlan (a plan for gradients), or the file of one"
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")
"""Lightning's callbacks that copy the model before it is split; by name, as not every version has both."""


class AutoDDLMixin(SplitCheckpoints, AutoSyncMixin, _Base):
    """Splits operators of an unmodified model over ranks (tensor parallelism); other layers are data parallel.

    Each rank loads its own batches, as with DDP. Before training, one step of the split model is compared with the same
    step of the unsplit model. If no operator is split, gradients are synchronized as by `AutoSyncStrategy`::

        trainer = Trainer(strategy=AutoDDLStrategy(memory="4GB"), accelerator="cpu", devices=1, num_nodes=4)

    Args:
        plan: how operators are split: a `HybridPlan` or the path of its file. An exact `SyncPlan` (or its file, as
            ``autosync tune`` may leave) means data parallelism by this plan. None (default): a search by the cost
            model, which needs ``memory`` or a cluster with known rates. Without both, nothing is split.
        cluster: nodes and links of the job: a `ClusterSpec`, the path of its file, or the name of a shipped cluster.
            None (default): unknown.
        memory: limit of the search on a rank's memory for the model, its optimizer and activations: bytes, or text such
            as "4GB". None (default): no limit.
        save_distributed_checkpoint: True: each rank writes its parts into a folder (``torch.distributed.checkpoint``).
            False (default): rank 0 writes one file with the unsplit model.
        scheduling: as of `AutoSyncStrategy`; None (default) or ``batch``.
        bucket_cap_mb: size of a fused message in MiB. None (default): the builder's own size.
        broadcast_buffers: whether all ranks get rank 0's buffers, at the start and before forward passes. None
            (default) means True.
        check_replicas: number of synchronized backward passes between comparisons of all copies of a weight. Default:
            1000; 0 turns comparisons off.
        port_range: as of `AutoSyncStrategy`. None (default): any free port.
        timeout: how long ranks wait for each other, in seconds or as a ``timedelta``. Default: 30 minutes.
        batch_shares: refused, because ranks that split operators compute the same batch sizes. Default: None.
        accelerator: as of `AutoSyncStrategy`, like ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``,
            ``precision_plugin`` and ``process_group_backend``.

    Raises:
        DocumentError: (or a subclass) a plan or cluster is wrong, or an argument has a value that is not allowed.
    """

    strategy_name = "autoddl"
    combined_loader: type
    """The framework's ``CombinedLoader``."""

    @names_class
    def __init__(
        self,
        plan: HybridPlanArgument = None,
        cluster: ClusterArgument = None,
        memory: str | float | None = None,
        *,
        save_distributed_checkpoint: bool = False,
        scheduling: Scheduling = None,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool | None = None,
        check_replicas: int = CHECK_REPLICAS,
        port_range: PortRange | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        batch_shares: None = None,
    ) -> None:
        if batch_shares is not None:
            raise DocumentError(
                "batch_shares: AutoDDLStrategy splits operators over ranks, which compute batches of one size; allowed "
                "with AutoSyncStrategy"
            )
        self._given, self._source = _read_given(plan)
        absent = {"forward_sync_buffers": None, "gradient_as_bucket_view": False, "static_graph": False}
        gradients = self._given if isinstance(self._given, SyncPlan) else None
        settings, launch = read_settings({**locals(), **absent, "plan": gradients, "semantics": "exact"})
        # Skips AutoSyncMixin's constructor, whose arguments are for DDPStrategy. ModelParallelStrategy takes no
        # accelerator, devices or plugins, so these are set as attributes.
        super(AutoSyncMixin, self).__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=launch["timeout"],
        )
        self.accelerator, self.parallel_devices = accelerator, parallel_devices
        self.cluster_environment, self.checkpoint_io = cluster_environment, checkpoint_io
        self.precision_plugin = precision_plugin
        self._settings: StrategySettings = settings
        self._ports = ExitStack()
        self._memory = None if memory is None else _read_memory(memory)
        self._resumed_from: Path | None = None

    @property
    def hybrid_plan(self) -> HybridPlan | None:
        """The plan by which operators are split; None if no operator is split."""
        return self._replica.hybrid_plan if isinstance(self._replica, SplitReplica) else None

    def setup_environment(self) -> None:
        # Each rank draws its own samples, whatever the plan splits, so Lightning's sampler must see plain data
        # parallelism.
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        self.prepare_trainer(trainer)
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.barrier()
        if fitting:
            self._replicate(trainer)
            self.setup_optimizers(trainer)
        else:
            follow_rank_zero(self.model, buffers=True)  # as under DDP
        self.setup_precision_plugin()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return bring_home(super().training_step(*args, **kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation(args):
            return bring_home(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation(args):
            return bring_home(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation(args):
            return bring_home(super().predict_step(*args, **kwargs))

    def _evaluation(self, args: Any) -> AbstractContextManager[None]:
        return self._replica.training_step(args) if isinstance(self._replica, SplitReplica) else nullcontext()

    # The choice of a plan

    def _replicate(self, trainer: Any) -> None:
        """Choose a plan and make the replica that runs it."""
        self._close()
        self._replica = None
        assert self.model is not None
        if self._given is None:  # a plan of the user may need each interface
            self._settings = with_connected_interfaces(self._settings, None)
        replica = self._split_replica(trainer) or ExactReplica(
            self.model, self._data_parallel_settings(), self.num_nodes, self.num_processes, watched=True
        )
        self._replica = replica
        replica.attach(trainer)
        self.model = SynchronizedModule(self.model, replica)

    def _data_parallel_settings(self) -> StrategySettings:
        """The settings with the plan for gradients that the user gave, if there is one."""
        if self._given is None or isinstance(self._given, SyncPlan):
            return replace(self._settings, source=self._source)
        if self._given.gradients == "all_reduce":
            return self._settings
        return replace(self._settings, plan=self._given.gradients, source=f"{self._source}: gradients")

    def _split_replica(self, trainer: Any) -> SplitReplica | None:
        assert self.model is not None
        uncompiled = Uncompiled(self.model)
        replica = None
        try:
            choice, first = self._choose(trainer)
            if choice.plans:
                replica = self._first_that_is_right(choice, self._task(trainer, first), trainer)
        finally:
            self._compile_again(uncompiled, replica)
        if replica is None:
            rank_zero_info(f"AutoDDL: data parallelism: {choice.reason}")
        else:
            mesh = " x ".join(map(str, replica.hybrid_plan.mesh))
            rank_zero_info(
                f"AutoDDL: plan {replica.hybrid_plan.fingerprint} on a mesh of {mesh}: {choice.reason}; a training "
                "step gave the same loss, gradients and weights as the unsplit model"
            )
            if replica.untested:
                rank_zero_warn(
                    "AutoDDL: the comparison with the unsplit model does not test "
                    f"{', '.join(map(repr, replica.untested))}: their gradients are zero in the first step, for "
                    "example because a later weight starts at zero"
                )
            for note in choice.notes:
                rank_zero_info(f"AutoDDL: {note}")
        return replica

    def _choose(self, trainer: Any) -> tuple[Choice, FirstBatch | None]:
        """The plans to try, and the batch on which to try them."""
        agree(self._check_arguments, lambda _: self._arguments())
        if isinstance(self._given, SyncPlan):
            return Choice(reason=reason_of_given(self._source)), None
        if self._given is not None:
            return self._as_given(self._given, trainer)
        cluster, world = self._settings.cluster, self.num_nodes * self.num_processes
        if self._layer_sync is not None and self._memory is None:
            return Choice(reason="sync_batchnorm=True needs unsplit layers"), None
        if world == 1 or (self._memory is None and not (cluster and cluster.measured)):
            # Without rates there is no prediction, so no batch is needed.
            return choose_hybrid_plan(None, cluster, None, self.num_nodes, self.num_processes), None
        try:
            first = self._first_batch(trainer)
        except WorkloadError as error:
            if self._memory is not None:
                raise
            return Choice(reason=str(error)), None
        place = cluster, self._memory, self.num_nodes, self.num_processes
        # Ranks may search for batches of other shapes, and must still try the same plans in the same order.
        return common_choice(agree(lambda: choose_hybrid_plan(first, *place), lambda _: {})), first

    def _check_arguments(self) -> None:
        if self._settings.error is not None:
            raise self._settings.error
        if self._settings.cluster is not None:
            check_size(self._settings.cluster, self.num_nodes, self.num_processes)

    def _arguments(self) -> dict[str, str]:
        """The arguments on which it depends what ranks tell each other, by their name in errors."""
        given, cluster = self._given, self._settings.cluster
        return {
            "plan": "none" if given is None else given.fingerprint,
            "memory": "none" if self._memory is None else f"{self._memory:.0f} bytes",
            "cluster": "none" if cluster is None else cluster.fingerprint,
        }

    def _as_given(self, given: HybridPlan, trainer: Any) -> tuple[Choice, FirstBatch | None]:
        world = self.num_nodes * self.num_processes
        agree(lambda: check_plan(given, self._plain, world, self._source), lambda _: {})
        if given.is_data_parallel:
            return Choice(reason=reason_of_given(self._source)), None
        return Choice((given,), reason_of_given(self._source)), self._first_batch(trainer)

    def _first_batch(self, trainer: Any) -> FirstBatch:
        """This rank's first batch; an error if any rank has none."""
        return agree(lambda: FirstBatch(trainer, self, self.combined_loader), lambda _: {})

    def _first_that_is_right(self, choice: Choice, task: ComparedStep, trainer: Any) -> SplitReplica | None:
        """A replica for the first plan that passes the check; None if none does. A plan of the user must pass."""
        require_equal_structures(self._plain)  # broadcasts of unlike tensors end the process
        self._refuse_loss_scaling()
        if self._layer_sync is not None:
            raise PlanError(
                "sync_batchnorm=True: it is for whole layers, but this plan splits operators; allowed with "
                "data-parallel plans and strategy='autosync'"
            )
        agree(lambda: _refuse_averaging(trainer.callbacks), lambda _: {})
        follow_rank_zero(self._plain, self._settings.initial_buffers)
        for plan in choice.plans:
            try:
                return SplitReplica(self._plain, plan, self._settings, task, self._source)
            except PeerLost:
                raise  # no plan can be tried without a rank
            except AutoSyncError as error:
                if self._given is not None:
                    raise
                rank_zero_warn(f"AutoDDL: plan {plan.fingerprint} was rejected: {error}")
        if not choice.fits:
            raise EquivalenceError(
                "memory: every plan that fits was rejected, and data parallelism needs more memory than is allowed"
            )
        return None

    def _task(self, trainer: Any, first: FirstBatch | None) -> ComparedStep:
        assert first is not None

        def optimizers() -> Sequence[Optimizer]:
            self.setup_optimizers(trainer)
            made: list[Optimizer] = list(self.optimizers)
            return made

        return ComparedStep(first.step, optimizers, first.batch, first.narrowed)

    def _compile_again(self, uncompiled: Uncompiled, replica: SplitReplica | None) -> None:
        split = set() if replica is None else replica.split.operators
        left = uncompiled.compile_again(lambda part: not split.intersection(part.modules()))
        if replica is None:
            return
        for part in uncompiled.compiled:
            takes_home_values(part)
        if left:
            told = ", ".join(repr(path) if path else "the model" for path in left)
            rank_zero_info(f"AutoDDL: torch.compile is disabled for {told}, because operators in them are split")

    def _refuse_loss_scaling(self) -> None:
        if self._scaler is not None and self._scaler.is_enabled():
            raise PlanError(
                "precision: a loss scaler could skip a step on some ranks only, because ranks hold different parts "
                "of the model; allowed with split operators: '32-true', 'bf16-mixed', 'bf16-true', '16-true', and "
                "'64-true' as plugins=[DoublePrecision()]"
            )

    def teardown(self) -> None:
        super().teardown()
        module = self.lightning_module
        # An error may end training before the module has its Trainer.
        fitted = module is not None and module._trainer is not None and module._trainer.state.fn == "fit"
        if fitted and self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)


def _refuse_averaging(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        if not kinds(callback).isdisjoint(_AVERAGING):
            raise PlanError(
                f"callbacks: {type(callback).__name__} averages a copy of the whole model, but each rank holds parts "
                "of it; remove it, or train data-parallel (strategy='autosync')"
            )


def _read_memory(value: Any) -> float:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise DocumentError(
            f"memory: {shown(value)} is not a size above 0: {error}; allowed: None, bytes, or text such as '4GB'"
        ) from None


def _read_given(value: HybridPlanArgument) -> tuple[HybridPlan | SyncPlan | None, str]:
    """The plan, and its name in errors."""
    if value is None or isinstance(value, HybridPlan | SyncPlan):
        found, source = value, "plan"
    elif isinstance(value, str | os.PathLike):
        source = os.fspath(value)
        if not is_path(value):
            known = source in (*builders.names(), *builders.relaxed_names())
            why = "is a builder's name; AutoSyncStrategy takes these" if known else "is not a file (.yaml, .yml, .json)"
            raise PlanError(f"plan: '{source}' {why}; {_ALLOWED}")
        found = _load(source)
    else:
        raise PlanError(f"plan: got {type(value).__name__}; {_ALLOWED}")
    _check_exact(found, source)
    return found, source


def _load(path: str) -> HybridPlan | SyncPlan:
    data = read_data(path, PlanError)
    if SyncPlan.describes(data):
        return SyncPlan.load(path)
    if HybridPlan.describes(data) or not isinstance(data, dict):
        return HybridPlan.load(path)
    found = f"{shown(data['format'])} cannot be read" if "format" in data else "missing"
    raise PlanError(f"{path}: format: {found}; expected '{HybridPlan.FORMAT}' or '{SyncPlan.FORMAT}'")


def _check_exact(plan: HybridPlan | SyncPlan | None, source: str) -> None:
    if isinstance(plan, SyncPlan):
        if plan.semantics != "exact" or not plan.has_schedule:
            how = f"its semantics are '{plan.semantics}'" if plan.semantics != "exact" else "its servers step"
            raise PlanError(
                f"{source}: {how}; allowed: a hybrid plan, or an exact one with a schedule; use AutoSyncStrategy"
            )
    elif plan is not None and not isinstance(plan.gradients, str) and plan.gradients.semantics != "exact":
        raise PlanError(
            f"{source}: gradients: semantics are '{plan.gradients.semantics}'; allowed with split operators: 'exact'"
        )

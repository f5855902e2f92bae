"""`AutoSyncStrategy` for the Trainers of lightning and pytorch_lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.engine.cpu_scheduling import set_batch_scheduling
from lightning_autosync.engine.failure_detector import FailureDetector
from lightning_autosync.engine.waiting import count_batch
from lightning_autosync.plan import Semantics
from lightning_autosync.ports import PortRange, listening_within
from lightning_autosync.strategy.agreement import checked_formation, compare_ranks
from lightning_autosync.strategy.base import Replica, SynchronizedModule, accumulation
from lightning_autosync.strategy.checkpoint import KEY
from lightning_autosync.strategy.collectives import CollectiveCalls, ReplicaViews
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.job import RunningJob
from lightning_autosync.strategy.launching import CheckedLaunch
from lightning_autosync.strategy.overlap import reading_past_failures
from lightning_autosync.strategy.process_group import begin_alone
from lightning_autosync.strategy.settings import (
    CHECK_REPLICAS,
    DEFAULT_TIMEOUT,
    ClusterArgument,
    HeartbeatArgument,
    Overlap,
    PlanArgument,
    Scheduling,
    StartMethod,
    StrategySettings,
    Timeout,
    names_class,
    read_settings,
)
from lightning_autosync.strategy.shares.auto import open_shares
from lightning_autosync.strategy.shares.batch_shares import BatchShares
from lightning_autosync.strategy.shares.cuts import SharesArgument
from lightning_autosync.strategy.shares.memory import PartialSteps
from lightning_autosync.strategy.trainer import (
    EndOfTraining,
    ErrorReport,
    check_one_loader,
    clip_by_replica,
    given_loader,
    handle_sigterm_locally,
    put_first,
    skip_signal_broadcast,
)
from lightning_autosync.strategy.tuning.settings import TuningArgument


class AutoSyncMixin(ReplicaViews, CollectiveCalls):
    """Data-parallel training like ``DDPStrategy``, but a plan says how gradients are synchronized.

    The model is not wrapped in ``DistributedDataParallel``::

        trainer = Trainer(strategy=AutoSyncStrategy(cluster="cluster.yaml"), accelerator="cpu", devices=1, num_nodes=4)

    Args:
        plan: how gradients are synchronized: a `SyncPlan`, the path of a plan's file, or the name of a builder. None
            (default): the strategy chooses.
        semantics: how far the plan may change the mathematics of training: ``exact`` (default), ``compressed`` or
            ``relaxed``. A plan that goes further is refused. Jobs that tune themselves try compressed plans only if
            this allows them, and never relaxed ones.
        cluster: nodes and links of the job: a `ClusterSpec`, the path of its file, or the name of a shipped cluster.
            None or ``auto`` (default): unknown, so links are measured before training.
        scheduling: None (default) keeps the system's scheduling policy. ``batch`` runs ranks that compute on CPUs
            under Linux's SCHED_BATCH, which helps small messages where ranks share cores and no other program runs, and
            costs where one does.
        tuning: how a job on several nodes that gives no plan finds one. ``auto`` (default): it measures links if no
            cluster is given, searches by simulation, and then tries plans on training steps. `TuningSettings` sets its
            limits. ``off``: the plan follows from the cluster alone.
        batch_shares: how many samples of each global batch a rank computes: a number for each rank, such as
            ``[1, 1, 2, 4]``, or ``auto``: as many as its measured speed allows. The result is DDP's with the same
            global batch. None (default): each rank computes a batch of the loader.
        micro_batch: number of samples that a rank computes at once, with batch shares. Shares are then multiples of it,
            and each rank computes its part of a batch in parts of this size, one after another. None (default): a rank
            computes its part at once.
        bucket_cap_mb: size of a fused message in MiB. None (default): the builder's own size.
        broadcast_buffers: whether all ranks get rank 0's buffers, at the start and before forward passes. None
            (default) means True.
        forward_sync_buffers: overrides ``broadcast_buffers`` before forward passes. None (default): no override.
        find_unused_parameters: has no effect, because unused parameters are always found. Default: False.
        gradient_as_bucket_view: whether gradients are views of message buffers, as in DDP. Default: False.
        static_graph: whether all backward passes use the same graph, as in DDP. Default: False.
        check_replicas: number of synchronized backward passes between comparisons of the weights of all ranks.
            Default: 1000; 0 turns comparisons off.
        heartbeat: times in seconds after which a silent rank counts as lost, by name (see `HeartbeatSettings`). Only
            for plans whose ranks do not make their steps together. None (default): the default times.
        stall: seconds without progress after which the average of a group fails, for the same plans. None (default):
            60.
        overlap: ``step``: gradients travel beside the next forward pass, and the optimizer steps each parameter before
            it is read (see docs/overlap.md). None (default): training waits for gradients at the end of backward.
        overlap_debug: whether to raise an error where memory of a parameter is read past that, by another tensor or by
            an extension (not by ``torch.func``), or its part of ``optimizer.state``. Slow. Default: False.
        port_range: first and last port on which ranks listen for each other, for example ``(20000, 20100)``, where a
            firewall closes others (see docs/clusters.md). None (default): those of the environment variable
            ``AUTOSYNC_PORT_RANGE``, or any free port.
        timeout: how long ranks wait for each other, in seconds or as a ``timedelta``. Default: 30 minutes.
        accelerator: the accelerator. None (default): the Trainer's.
        parallel_devices: the devices of this node's ranks. None (default): the Trainer's.
        cluster_environment: where ranks and addresses come from. None (default): the Trainer finds it.
        checkpoint_io: how checkpoints are written and read. None (default): Lightning's ``TorchCheckpointIO``.
        precision_plugin: the precision of training. None (default): as the Trainer's ``precision`` says.
        process_group_backend: backend of ``torch.distributed``, for example ``gloo`` or ``nccl``. None (default):
            ``nccl`` on GPUs, otherwise ``gloo``.
        start_method: how the Trainer starts processes on this node: ``popen`` (default), ``spawn``, ``fork`` or
            ``forkserver``.
        ddp_comm_hook: refused, because plans state compression. Default: None.
        ddp_comm_state: refused, like ``ddp_comm_hook``. Default: None.
        ddp_comm_wrapper: refused, like ``ddp_comm_hook``. Default: None.
        model_averaging_period: refused, because plans state averaging. Default: None.

    Raises:
        DocumentError: (or a subclass) a plan or cluster is wrong, an argument has a value that is not allowed, or it
            has no effect with this plan.
    """

    strategy_name = "autosync"
    model: nn.Module | None
    _replica_class: type[Replica] = ExactReplica
    _replica: Replica | None = None
    _failure_detector: FailureDetector | None = None
    _job: RunningJob | None = None
    """The job to which this process returns; None if it does not."""
    _shares: BatchShares | None = None

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
        heartbeat: HeartbeatArgument = None,
        stall: float | None = None,
        overlap: Overlap = None,
        overlap_debug: bool = False,
        port_range: PortRange | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        ddp_comm_hook: Any = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
    ) -> None:
        settings, launch = read_settings(locals())
        super().__init__(**launch)
        self._settings: StrategySettings = settings
        if not settings.scheduled:  # late, because few plans need all that this imports
            from lightning_autosync.strategy.relaxed import RelaxedReplica

            self._replica_class = RelaxedReplica
        self._ports = ExitStack()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: importing `lightning_autosync` registers the names."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is not None:
            self._launcher.launch = CheckedLaunch(self, self._settings)  # type: ignore[method-assign]

    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        self._ports.enter_context(listening_within(self._settings.port_range))
        if self._settings.scheduling == "batch" and self.root_device.type == "cpu":
            set_batch_scheduling()
        if not dist.is_initialized():
            first = self.node_rank * self.num_processes + self.local_rank == 0
            host = self.cluster_environment.main_address
            self._job = self._replica_class.find_job(host, self._settings.timeout, first)
            if self._job is not None:
                begin_alone(self._get_process_group_backend())
        # Lightning sets the ranks while it forms the process group, but `checked_formation` needs them before.
        self.set_world_ranks()
        with checked_formation(self.cluster_environment, self._settings):
            super().setup_environment()
            self._failure_detector = compare_ranks(self._settings)
        self._shares = open_shares(self._settings, self.global_rank, self.world_size, self.root_device)
        if self._shares is not None and self._trainer.training:
            self._shares.check_loader(given_loader(self._trainer))

    def setup(self, trainer: Any) -> None:
        self.prepare_trainer(trainer)
        super().setup(trainer)

    def prepare_trainer(self, trainer: Any) -> None:
        """Let the failure detector report signals and errors instead of Lightning's collectives; add callbacks."""
        skip_signal_broadcast(trainer)
        handle_sigterm_locally(trainer, self._on_sigterm)
        put_first(trainer, EndOfTraining())
        put_first(trainer, ErrorReport())  # last, so that it comes before all others

    def _on_sigterm(self) -> None:
        if self._failure_detector is not None:
            self._failure_detector.terminate()

    def configure_ddp(self) -> None:
        assert self.model is not None
        self._close()
        self._replica = None
        place = *self._job_shape(), self.global_rank
        replica = self._replica_class.for_trainer(self.model, self._settings, *place, self._job)
        self._replica, self._job = replica, None
        if self._shares is not None and isinstance(replica, ExactReplica):
            replica.share(self._shares)
        replica.attach(self._trainer)
        if replica.detects_failures:  # its mesh lets the others go on; the detector would end the job
            self._close_failure_detector()
        self.model = SynchronizedModule(self.model, replica)

    def _job_shape(self) -> tuple[int, int]:
        """The number of nodes in the job, and of ranks per node; called by all ranks together."""
        return self.num_nodes, self.num_processes

    def setup_optimizers(self, trainer: Any) -> None:
        with nullcontext() if self._replica is None else self._replica.estimating_steps():
            super().setup_optimizers(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self._shares is not None and self._trainer.training:
            self._shares.cut_loader(dataloader)
        return dataloader if self._replica is None else self._replica.share_data(dataloader)

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self._replica is not None
        self._replica.start_training(self.optimizers, self._scaler)
        clip_by_replica(self.precision_plugin, self._replica)
        if self._shares is not None:
            check_one_loader(self._trainer)
            self._shares.begin_training(self._trainer.lightning_module, self._replica, self._accumulate_part)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch is None and self._shares is not None and self._trainer.training:
            self._shares.skip_batch()  # Lightning passes over it, and calls no other hook
            count_batch()
        return super().batch_to_device(batch, *args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self._replica is not None
        self._replica.begin_batch()
        if self._shares is not None:
            self._shares.begin_batch(batch)
            if self._shares.cut is not None and not self._shares.cut.samples:
                self._trainer._results.batch_size = 0  # weight in metrics over the epoch of a sample of another rank

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._replica is not None
        with self._replica.training_step(args):
            if self._shares is None:
                return super().training_step(*args, **kwargs)
            assert isinstance(self.model, SynchronizedModule)
            whole, prepare = partial(super().training_step, *args, **kwargs), self.model.prepare_forward
            precision, module = self.precision_plugin.train_step_context, self._trainer.lightning_module
            return self._shares.training_step(module, whole, prepare, precision, *args, **kwargs)

    def resume(self) -> None:
        """Begin an epoch of training on this rank."""
        if self._replica is not None:
            self._replica.resume()

    def drain(self) -> None:
        """Wait for all live ranks, after this rank's part of an epoch."""
        if self._replica is not None:
            self._replica.drain()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.settle()
        self.drain()

    def end_batches(self) -> None:
        """Tell the other ranks that this one begins no further batch."""
        if self._failure_detector is not None:
            self._failure_detector.end_batches()

    def end_training(self) -> None:
        """End training on this rank, before the user's hooks at its end, which may change the model on some ranks."""
        self.drain()
        self.settle()  # a batch more than other ranks' may be under way
        if self._failure_detector is not None:
            self._failure_detector.end_training()
        if self._replica is not None:
            self._replica.end_training()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Like ``Strategy.backward``, but gradients are synchronized before ``on_after_backward`` runs."""
        assert self._replica is not None
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self._replica.backward(self._scaler):
            divided = None if self._shares is None else self._shares.before_backward()
            if divided is not None:
                self._backward_in_parts(divided, closure_loss, optimizer, *args, **kwargs)
            else:
                self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _backward_in_parts(
        self, partial: PartialSteps, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        """The backward pass of a step that may be divided, because memory may not suffice for its batch."""

        def run(part: Tensor, **also: Any) -> None:
            self.precision_plugin.backward(part, self._trainer.lightning_module, optimizer, *args, **kwargs, **also)

        partial.backward(run, loss, self._loss_factor)

    def _accumulate_part(self, loss: Tensor, **also: Any) -> None:
        """Make the backward pass of the loss of a part of a batch, which is not synchronized."""
        assert self._replica is not None
        with accumulation(self._replica), self._replica.backward(self._scaler):
            self.precision_plugin.backward(loss * self._loss_factor, self._trainer.lightning_module, None, **also)

    @property
    def forward_can_be_timed(self) -> bool:
        """Whether the time from the start of a batch to its backward pass is that of its forward pass.

        With ``micro_batch``, that time includes the backward passes of all parts but the last; with ``overlap="step"``,
        waits for other ranks.
        """
        return self._settings.micro_batch is None and self._settings.overlap is None

    @property
    def _loss_factor(self) -> float:
        """What Lightning's loop and its loss scaler multiply a loss by before the backward pass."""
        scale = self._scaler.get_scale() if self._scaler is not None and self._scaler.is_enabled() else 1.0
        return float(scale / self._trainer.accumulate_grad_batches)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        assert self._replica is not None
        with self._replica.stepping(optimizer), self._replica.unscaling(self._scaler):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._replica is not None:
            self._replica.settle()
            self._replica.before_checkpoint()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        saved: dict[str, Any] = super().optimizer_state(optimizer)
        return saved if self._replica is None else self._replica.optimizer_state(saved)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A context in which backward passes only accumulate gradients on this rank."""
        assert self._replica is not None
        with accumulation(self._replica):
            yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._replica is not None and "optimizer_states" in checkpoint:
            entry = self._replica.gather_state()
            if entry is not None:
                checkpoint[KEY] = entry
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        if self._job is not None:
            # The running job is past this checkpoint, but Lightning's loops would begin where it was made.
            checkpoint.pop("loops", None)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        # Lightning calls this after setup when it resumes training, so the replica exists.
        super().load_optimizer_state_dict(checkpoint)
        if self._replica is not None:
            self._replica.restore_state(checkpoint.get(KEY), checkpoint["global_step"])

    @property
    def _scaler(self) -> Any:
        """The loss scaler of the precision plugin; None if it has none."""
        return getattr(self.precision_plugin, "scaler", None)

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def on_exception(self, exception: BaseException) -> None:
        self.announce_failure(exception)
        super().on_exception(exception)

    def announce_failure(self, exception: BaseException) -> None:
        """Tell the other ranks that this rank ends with an error, so that their errors name it."""
        if self._failure_detector is not None:
            self._failure_detector.fail(exception)
        if self._replica is not None:
            self._replica.fail(exception)

    def teardown(self) -> None:
        clip_by_replica(self.precision_plugin, None)
        try:
            self._close()
        finally:
            self._close_failure_detector()
            self._ports.close()
        if isinstance(self.model, SynchronizedModule):
            self.model = self.lightning_module
        # Parameters without a value after a failure must not hide its cause when the model moves to the CPU.
        with reading_past_failures(self.lightning_module):
            super().teardown()

    def _close_failure_detector(self) -> None:
        if self._failure_detector is not None:
            self._failure_detector.close()
            self._failure_detector = None

    def _close(self) -> None:
        if self._replica is not None:
            self._replica.close()

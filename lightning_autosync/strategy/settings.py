"""The arguments of the strategies, checked before any process is launched."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import wraps
from typing import Any, Literal, ParamSpec

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.documents import did_you_mean, is_path
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.plan import SEMANTICS, Semantics, SyncPlan, builders
from lightning_autosync.ports import PortRange, read_port_range
from lightning_autosync.relaxed.transport.heartbeat import STALL, HeartbeatSettings, read_heartbeat, read_seconds
from lightning_autosync.strategy.shares.cuts import Shares, read_micro_batch, read_shares
from lightning_autosync.strategy.tuning.settings import TuningSettings, read_tuning


@dataclass(frozen=True)
class PlanOfFile:
    """A plan that another process has read from a file.

    Attributes:
        source: name of its file in errors.
    """

    plan: SyncPlan
    source: str


PlanArgument = SyncPlan | str | os.PathLike[str] | None
ClusterArgument = ClusterSpec | str | os.PathLike[str] | None
HeartbeatArgument = HeartbeatSettings | dict[str, float] | None
Scheduling = Literal["batch"] | None
Overlap = Literal["step"] | None
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
Timeout = timedelta | float | None
_Arguments = ParamSpec("_Arguments")

MIB = 1024 * 1024
CHECK_REPLICAS = 1000
"""Default number of synchronized backward passes between comparisons of weights. A comparison reads every weight twice
(measured: 0.05% of the time of steps of 36 ms)."""
DEFAULT_TIMEOUT = timedelta(minutes=30)

_LAUNCH = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "precision",
    "process_group_backend",
    "timeout",
    "start_method",
)
"""Arguments that Lightning's DDPStrategy handles itself."""
_FOR_AUTODDL = "hybrid plans split operators; use AutoDDLStrategy(plan={plan}) for them, under the Trainer"
_RELAXED_ONLY = ("heartbeat", "stall")
"""Arguments that have an effect only under plans without a schedule."""
_REFUSED = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
)


@dataclass(frozen=True)
class StrategySettings:
    """Settings of a strategy. They are plain values, so that launchers can send them to new processes.

    Attributes:
        plan: a plan, the name of a builder, or None for the strategy to choose.
        source: name of the plan in errors: its file, its builder or ``plan``.
        semantics: the highest allowed level of semantics.
        cluster: the cluster of the job; None if unknown.
        bucket_bytes: bytes of a fused message; None for the builder's own size.
        initial_buffers: whether buffers are rank 0's when training begins.
        broadcast_buffers: whether buffers follow rank 0 during training.
        timeout: seconds to wait for other ranks.
        tuning: how the job finds its links and its plan, where the user gives no plan; None: by the cluster alone.
        error: fault of a file, raised when all ranks are there; None if there is none.

    The other fields are arguments of `AutoSyncMixin`.
    """

    plan: SyncPlan | str | None = None
    source: str = "plan"
    semantics: Semantics = "exact"
    cluster: ClusterSpec | None = None
    bucket_bytes: int | None = None
    initial_buffers: bool = True
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    check_replicas: int = CHECK_REPLICAS
    scheduling: Scheduling = None
    timeout: float = DEFAULT_TIMEOUT.total_seconds()
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    stall: float = STALL
    overlap: Overlap = None
    overlap_debug: bool = False
    tuning: TuningSettings | None = None
    batch_shares: Shares | Literal["auto"] | None = None
    micro_batch: int | None = None
    port_range: PortRange | None = None
    error: DocumentError | None = None

    @property
    def fixed(self) -> bool:
        """Whether the user gave a complete plan, which is not adapted to changes of the model."""
        return isinstance(self.plan, SyncPlan)

    @property
    def scheduled(self) -> bool:
        """Whether the plan has, or will have, a schedule."""
        if isinstance(self.plan, SyncPlan):
            return self.plan.has_schedule
        return self.plan not in builders.relaxed_names()


def names_class(constructor: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Decorate a constructor: errors of wrong arguments name the class that was called, and the nearest argument."""
    signature = inspect.signature(constructor)

    @wraps(constructor)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            known = list(signature.parameters)[1:]
            unknown = next((name for name in kwargs if name not in known), "")
            near = did_you_mean(unknown, known)
            hint = f"; {near}" if near else ""
            raise TypeError(f"{type(args[0]).__name__}: {error}{hint}") from None
        constructor(*args, **kwargs)

    return checked


def read_settings(arguments: Mapping[str, Any]) -> tuple[StrategySettings, dict[str, Any]]:
    """The settings, and the ``arguments`` for Lightning's DDPStrategy.

    A file that cannot be used is an error here, unless this process was launched as one of several ranks. Other ranks
    may be able to read their file, and must not wait for a rank that has ended. The error is then raised at setup, on
    every rank.

    Args:
        arguments: arguments of a strategy by name; other names are ignored.

    Raises:
        DocumentError: a plan or cluster is wrong, or an argument has a value that is not allowed, or no effect under
            this plan.
    """
    launch = _read_launch(arguments)
    settings = _read_values(arguments, launch["timeout"] or DEFAULT_TIMEOUT)
    try:
        settings = _read_files(settings, arguments["plan"], arguments["cluster"])
    except DocumentError as error:
        if not _is_launched():
            raise
        return replace(settings, error=error), launch
    _check_combination(settings, {name for name, value in arguments.items() if value is not None})
    if settings.plan is not None and arguments.get("tuning") not in (None, "auto", "off"):
        raise DocumentError("tuning: it has no effect with a plan; remove one of the two arguments")
    return replace(settings, bucket_bytes=_bucket_bytes(arguments["bucket_cap_mb"], settings.plan)), launch


def _read_launch(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for Lightning's DDPStrategy; arguments that it takes and this strategy does not are refused."""
    if refused := [name for name in _REFUSED if arguments.get(name) is not None]:
        raise DocumentError(
            f"{', '.join(refused)}: not supported, because there is no DistributedDataParallel; to compress "
            "gradients, set `compressor` in the plan's groups"
        )
    launch = {name: arguments[name] for name in _LAUNCH if name in arguments}
    if not isinstance(launch["timeout"], timedelta | None):
        launch["timeout"] = timedelta(seconds=read_seconds("timeout", launch["timeout"]))
    return launch


def _read_values(arguments: Mapping[str, Any], timeout: timedelta) -> StrategySettings:
    """The settings without those that come from files or depend on the plan."""
    follows, later = arguments["broadcast_buffers"] is not False, arguments["forward_sync_buffers"]
    stall, overlap = arguments.get("stall"), arguments.get("overlap")
    _check_choice("semantics", arguments["semantics"], SEMANTICS)
    _check_choice("scheduling", arguments["scheduling"], ("batch", None))
    _check_choice("overlap", overlap, ("step", None))
    if arguments.get("overlap_debug") and overlap is None:
        raise DocumentError("overlap_debug: it has no effect without overlap='step'")
    return StrategySettings(
        semantics=arguments["semantics"],
        scheduling=arguments["scheduling"],
        initial_buffers=follows or later is not None,
        broadcast_buffers=follows if later is None else bool(later),
        gradient_as_bucket_view=bool(arguments["gradient_as_bucket_view"]),
        static_graph=bool(arguments["static_graph"]),
        check_replicas=_read_passes(arguments["check_replicas"]),
        timeout=timeout.total_seconds(),
        heartbeat=read_heartbeat(arguments.get("heartbeat")),
        stall=STALL if stall is None else read_seconds("stall", stall),
        overlap=overlap,
        overlap_debug=bool(arguments.get("overlap_debug")),
        tuning=read_tuning(arguments.get("tuning", "off")),
        batch_shares=read_shares(arguments.get("batch_shares")),
        micro_batch=read_micro_batch(arguments.get("micro_batch")),
        port_range=read_port_range(arguments.get("port_range")),
    )


def _check_choice(name: str, value: Any, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        near = did_you_mean(str(value), [each for each in allowed if each is not None])
        names = " or ".join(map(repr, allowed))
        raise DocumentError(f"{name}: {value!r} is not known; {near and f'{near} '}allowed: {names}")


def _read_files(
    settings: StrategySettings, plan: PlanArgument | PlanOfFile, cluster: ClusterArgument
) -> StrategySettings:
    """The settings with the plan and the cluster, which files may hold; a builder stays a name."""
    with _naming("plan"):
        found, source = _read_plan(plan)
    if isinstance(found, SyncPlan):
        check_semantics(found.semantics, settings.semantics, source)
    elif found in builders.relaxed_names():
        check_semantics("relaxed", settings.semantics, source)
    with _naming("cluster"):
        where = None if cluster in (None, "auto") else resolve_cluster(cluster)
    return replace(settings, plan=found, source=source, cluster=where)


@contextmanager
def _naming(argument: str) -> Iterator[None]:
    """A context whose errors of files begin with the name of the argument that names the file."""
    try:
        yield
    except DocumentError as error:
        if str(error).startswith(f"{argument}: "):
            raise
        raise type(error)(f"{argument}: {error}") from None


def _check_combination(settings: StrategySettings, given: Collection[str]) -> None:
    """Refuse arguments that exclude each other, or that have no effect under the plan.

    Args:
        settings: the settings with the plan.
        given: names of the arguments that are not None.

    Raises:
        DocumentError: there is such an argument.
    """
    if settings.batch_shares is not None and not settings.scheduled:
        raise DocumentError(
            f"batch_shares: ranks do not make their steps together under {settings.source}; allowed with synchronous "
            "plans without `served`"
        )
    if settings.overlap is not None and not settings.scheduled:
        raise DocumentError(
            "overlap: it has no effect, because ranks or servers make the steps of this plan; allowed with plans whose "
            "gradients are synchronized in every step"
        )
    if settings.micro_batch is not None and settings.batch_shares is None:
        raise DocumentError("micro_batch: it has no effect without batch_shares; use accumulate_grad_batches instead")
    no_passes = {
        "gradient_as_bucket_view": settings.gradient_as_bucket_view,
        "static_graph": settings.static_graph,
        "check_replicas": settings.check_replicas not in (0, CHECK_REPLICAS),
    }
    if not settings.scheduled and (useless := [name for name, is_set in no_passes.items() if is_set]):
        raise DocumentError(
            f"{useless[0]}: it has no effect, because gradients are not synchronized under {settings.source}; allowed "
            "with plans whose gradients are synchronized in every step"
        )
    relaxed_only = next((name for name in _RELAXED_ONLY if name in given), None)
    if settings.scheduled and relaxed_only is not None:
        raise DocumentError(
            f"{relaxed_only}: it has no effect, because ranks make all steps of this plan together; allowed with "
            "relaxed plans and with plans whose servers make the steps (`served`)"
        )


def _read_passes(value: Any) -> int:
    """The value of ``check_replicas``, a number of passes; 0 or False for never."""
    if not isinstance(value, int) or value < 0 or value is True:
        raise DocumentError(
            f"check_replicas: {value!r} is not a number of backward passes; allowed: 0 (never), 1, 2, ..."
        )
    return int(value)


def check_semantics(found: Semantics, allowed: Semantics, source: str) -> None:
    """Raise ``PlanError`` if a plan changes the mathematics more than the user allows."""
    if SEMANTICS.index(found) > SEMANTICS.index(allowed):
        raise PlanError(
            f"{source}: the plan's semantics are '{found}', but the strategy allows at most '{allowed}'; "
            f"set semantics='{found}' to train with this plan"
        )


def _read_plan(value: PlanArgument | PlanOfFile) -> tuple[SyncPlan | str | None, str]:
    """The plan and its name in errors; text is a file if it looks like one, otherwise the name of a builder."""
    if value is None or isinstance(value, SyncPlan):
        return value, "plan"
    if isinstance(value, PlanOfFile):
        return value.plan, value.source
    if isinstance(value, HybridPlan):
        raise PlanError(f"plan: {_FOR_AUTODDL.format(plan='...')}")
    if not isinstance(value, str | os.PathLike):
        raise PlanError(f"plan: expected a SyncPlan, a file or a builder's name, got {type(value).__name__}")
    text = os.fspath(value)
    if is_path(value):
        if HybridPlan.is_in(text):
            raise PlanError(f"{text}: {_FOR_AUTODDL.format(plan=repr(text))}")
        return SyncPlan.load(text), text
    builders.find(text)
    return text, f"builder '{text}'"


def reason_of_given(source: str) -> str:
    """The reason for a plan that the user gave, from its name in errors."""
    if source.startswith("plan: "):
        return f"given by the field '{source.removeprefix('plan: ')}' of the plan"
    return "given by the argument 'plan'" if source == "plan" else f"read from '{source}'"


def _bucket_bytes(megabytes: float | None, plan: SyncPlan | str | None) -> int | None:
    if megabytes is None:
        return None
    takes = plan is None or (
        isinstance(plan, str) and "bucket_bytes" in inspect.signature(builders.find(plan)).parameters
    )
    if not takes:
        raise DocumentError(
            "bucket_cap_mb: it has no effect, because this plan determines its messages; remove this argument"
        )
    if not isinstance(megabytes, int | float) or not megabytes > 0:
        raise DocumentError(f"bucket_cap_mb: {megabytes!r} is not a number of MiB above 0")
    return max(1, int(megabytes * MIB))


def _is_launched() -> bool:
    """Whether this process looks like one rank of a launched job."""
    return any(name in os.environ for name in _RANK_VARIABLES)

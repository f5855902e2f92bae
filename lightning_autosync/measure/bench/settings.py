"""Settings of a bench: the model, the machines, the contenders, and how long to measure."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lightning_autosync.documents import Count, Record
from lightning_autosync.measure.launches.settings import ClusterSettings, LaunchSettings, StartedLaunch, needs_cluster
from lightning_autosync.measure.models.imported import with_arguments
from lightning_autosync.measure.models.model import Embeddings
from lightning_autosync.measure.models.recipes import AnyModel
from lightning_autosync.measure.workers.devices import Device

BucketCap = Annotated[PositiveFloat | Literal["default"], Field(union_mode="left_to_right")]
Hook = Literal["fp16", "bf16", "powersgd", "post_local_sgd"]
Exactness = Literal["exact", "low precision", "relaxed or lossy"]
"""Contenders of different exactness are not compared, since they compute different gradients."""

HOOK_CLASSES: dict[Hook, Exactness] = {
    "fp16": "low precision",
    "bf16": "low precision",
    "powersgd": "relaxed or lossy",
    "post_local_sgd": "relaxed or lossy",
}
LEAST_WARM_UP, LEAST_ROUNDS, LEAST_STEPS = 5, 5, 8
"""Least numbers of warm-up steps, rounds, and steps per round of a run that may back a claim."""
LEAST_STEADY_WARM_UP, LEAST_STEADY_STEPS = 2, 2
"""The same for paced computation, for which only buckets and connections have to settle."""


class DDPOptions(Record):
    """Arguments of ``DistributedDataParallel``.

    Attributes:
        bucket_cap_mb: MiB of a bucket; ``default`` is DDP's own rule: 25, and 1 for the first bucket.
        hook: communication hook; None is the exact all-reduce.
        rank: rank of PowerSGD's factors.
        period: steps between parameter averages of post-local SGD. In between, gradients are reduced within nodes only.
    """

    bucket_cap_mb: BucketCap = "default"
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    hook: Hook | None = None
    rank: Count = 1
    period: Count = 4

    @property
    def name(self) -> str:
        cap = "" if self.bucket_cap_mb == "default" else f"_{self.bucket_cap_mb:g}"
        view = "_view" if self.gradient_as_bucket_view else ""
        return f"ddp{cap}{view}{'_static' if self.static_graph else ''}"

    @property
    def begins_otherwise(self) -> bool:
        """Whether the first steps are exact all-reduces, unlike later steps."""
        return self.hook in ("powersgd", "post_local_sgd")

    @property
    def exactness(self) -> Exactness:
        return "exact" if self.hook is None else HOOK_CLASSES[self.hook]


class DDPSweep(Record):
    """Values of DDP's arguments. All combinations of them are opponents."""

    bucket_cap_mb: Annotated[tuple[BucketCap, ...], Field(min_length=1)] = ("default",)
    gradient_as_bucket_view: Annotated[tuple[bool, ...], Field(min_length=1)] = (False,)
    static_graph: Annotated[tuple[bool, ...], Field(min_length=1)] = (False,)

    def options(self) -> list[DDPOptions]:
        """DDP's arguments in each combination."""
        return [
            DDPOptions(bucket_cap_mb=cap, gradient_as_bucket_view=view, static_graph=static)
            for cap, view, static in product(self.bucket_cap_mb, self.gradient_as_bucket_view, self.static_graph)
        ]


class ContenderSettings(Record):
    """One way to synchronize: DDP, a builder's plan, or a plan file.

    Attributes:
        ddp: arguments of DDP.
        builder: name of a builder, or ``package.module:function`` of a user's function. It is called with workload and
            cluster, and returns a plan, or a plan and a sentence that explains it.
        arguments: further arguments of the builder. Unknown fields beside ``builder`` are added to them.
        plan: path of a plan file, hybrid plans included.
        embeddings: gradients of embeddings: ``dense``, ``sparse`` (``nn.Embedding(sparse=True)``), or ``rows``, which
            are dense, but of large tables only touched rows are sent, as in jobs (plans only).
        overlap: whether sums travel while the next forward pass computes, as with ``overlap="step"`` (plans only).
        gradient_as_bucket_view: whether gradients become views of buffers (plans; DDP has an option of its own).
    """

    ddp: DDPOptions | None = None
    builder: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    plan: str | None = None
    embeddings: Embeddings = "dense"
    overlap: bool = False
    gradient_as_bucket_view: bool = False

    @model_validator(mode="before")
    @classmethod
    def _collect_arguments(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "builder" not in value:
            return value
        return with_arguments(value, cls.model_fields)

    @model_validator(mode="after")
    def _check(self) -> ContenderSettings:
        kinds = [name for name in ("ddp", "builder", "plan") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"expected exactly one of ddp, builder and plan, got {' and '.join(kinds) or 'none'}")
        if self.ddp is not None and self.overlap:
            raise ValueError("overlap: DDP has none; allowed: false")
        if self.ddp is not None and self.gradient_as_bucket_view:
            raise ValueError("gradient_as_bucket_view: of DDP, set ddp.gradient_as_bucket_view")
        if self.ddp is not None and self.embeddings == "rows":
            raise ValueError("embeddings: DDP does not support 'rows'; allowed: dense, sparse")
        return self

    @property
    def periodic(self) -> int | None:
        """Number of steps after which their kinds repeat; None if all steps are alike."""
        return self.ddp.period if self.ddp is not None and self.ddp.hook == "post_local_sgd" else None


class BenchSettings(ClusterSettings):
    """One bench run; without a cluster on one machine with ``ranks`` devices.

    Attributes:
        model: model to train.
        launch: where the ranks run.
        ranks: number of ranks; None uses the cluster's.
        device: where the ranks train. Ranks of a host share its GPUs if it has fewer.
        scheduling: the kernel's scheduling policy for all contenders.
        warm_up: number of steps of each contender before the first round.
        rounds: number of turns of each contender.
        steps: number of steps in one turn.
        timeout: maximum seconds of one turn.
        timeline: whether to draw a step of the fastest exact plan, measured beside predicted, after the table.
        constants: file of the hosts' constants for the timeline, from a probe; None lets the workers measure them.
        ddp: settings of DDP, the opponents.
        contenders: other contenders by name.
    """

    model: AnyModel
    launch: StartedLaunch = LaunchSettings()
    ranks: PositiveInt | None = None
    device: Device = "cpu"
    scheduling: Literal["none", "batch"] = "batch"
    warm_up: PositiveInt = LEAST_WARM_UP
    rounds: PositiveInt = LEAST_ROUNDS
    steps: PositiveInt = LEAST_STEPS
    timeout: PositiveFloat = 120.0
    timeline: bool = False
    constants: str | None = None
    ddp: DDPSweep = DDPSweep()
    contenders: dict[str, ContenderSettings] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> BenchSettings:
        if self.emulated and self.cluster is None:
            raise ValueError(needs_cluster(self.launch.kind))
        self._check_cluster()
        if self.cluster_scale != 1.0 and self.cluster_fastest is not None:
            raise ValueError("cluster_scale and cluster_fastest exclude each other; set one of them")
        if self.device != "cpu" and (self.timeline or self.model.kind == "paced"):
            which = "timeline" if self.timeline else "model: paced"
            raise ValueError(f"{which}: needs device=cpu, because paced computation is on the CPU")
        self._check_periods()
        taken = {options.name for options in self.ddp.options()} & self.contenders.keys()
        if taken:
            raise ValueError(f"contenders: '{min(taken)}' is the name of a DDP contender; use another name")
        return self

    def all_contenders(self) -> dict[str, ContenderSettings]:
        """Every contender by name, DDP first."""
        opponents = {options.name: ContenderSettings(ddp=options) for options in self.ddp.options()}
        return {**opponents, **self.contenders}

    @property
    def exchange_timeout(self) -> float:
        """Seconds until a plan's exchanges time out: less than for a turn, so that ranks can report what they await."""
        return self.timeout / 2

    @property
    def long_enough(self) -> bool:
        """Whether there are enough steps and rounds to back a claim."""
        steady = self.model.kind in ("flat", "paced")
        warm_up, steps = (LEAST_STEADY_WARM_UP, LEAST_STEADY_STEPS) if steady else (LEAST_WARM_UP, LEAST_STEPS)
        return self.warm_up >= warm_up and self.rounds >= LEAST_ROUNDS and self.steps >= steps

    def _check_periods(self) -> None:
        for name, contender in self.contenders.items():
            if contender.periodic and self.steps % contender.periodic:
                raise ValueError(
                    f"steps: {self.steps} is not a multiple of {contender.periodic}, the period of contender '{name}'"
                )

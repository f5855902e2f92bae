"""Settings of a comparison of convergence: the task, the methods, the speeds of workers, and how long they train."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from typing_extensions import Self

from lightning_autosync.documents import Count, Index, Integer, Record, unknown_name
from lightning_autosync.lab.convergence.tasks import AnyTask
from lightning_autosync.measure.launches.settings import ClusterSettings, LaunchSettings
from lightning_autosync.measure.models.straggler import Slowdown
from lightning_autosync.plan import Consistency

Rates = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]


class MethodSettings(Record):
    """One way to synchronize.

    Attributes:
        kind: ``plan``, ``ddp``, or ``zero``, which is DDP with PyTorch's ``ZeroRedundancyOptimizer``.
        builder: name of the builder of the plan.
        arguments: arguments of the builder.
        consistency: consistency of the plan; None keeps the builder's.
        rates: learning rates to choose from; None uses the common ones.
        seeds: maximum number of trainings; None uses the common number.
    """

    kind: Literal["plan", "ddp", "zero"] = "plan"
    builder: str = "all_reduce"
    arguments: dict[str, Any] = Field(default_factory=dict)
    consistency: Consistency | None = None
    rates: Rates | None = None
    seeds: Count | None = None


class Only(Record):
    """Names of the methods and speeds to run; None means all."""

    methods: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    speeds: Annotated[tuple[str, ...], Field(min_length=1)] | None = None


class Simulation(Record):
    """Settings of a simulation of how groups of partial reduces form. Nothing trains.

    Attributes:
        groups: number of groups to form.
        exchange: seconds of a group's average.
        jitter: maximum relative deviation of a step's computation, in either direction.
    """

    groups: Count = 1000
    exchange: NonNegativeFloat = 0.0
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.02


class ConvergenceSettings(ClusterSettings):
    """One comparison.

    Attributes:
        task: task to learn.
        launch: where the workers run: ``local``, or ``emulated`` behind the links of the cluster.
        workers: number of workers; must match the cluster if there is one.
        methods: methods by name.
        reference: method with which the others are compared.
        speeds: slowdowns of workers by name. A learning rate is chosen under the first, and used under all.
        only: methods and speeds to run.
        pace: seconds of a step's computation, reached by sleeping; None does not sleep.
        steps: steps of each worker; None trains until the time limit or the target.
        limit: maximum seconds of a training without fixed steps.
        target: validation metric, in percent, whose time is measured.
        patience: number of consecutive evaluations in which rank 0's own model must reach the target to end a training.
        interval: minimum seconds between evaluations.
        rates: learning rates to choose from.
        rates_of: result file of an earlier comparison whose chosen rates are used; None chooses rates.
        momentum: momentum of the SGD.
        seeds: number of trainings of each method under each speed, with seeds from 0.
        tuning_seeds: number of trainings per learning rate to choose from, with other seeds.
        scheduling: the kernel's scheduling policy for the workers.
        timeout: maximum seconds of one training, including its set-up and evaluation.
        isolation: settings to simulate, instead of training, how groups form under all speeds: whether they connect all
            workers, and what that costs. None trains.
    """

    task: AnyTask
    launch: LaunchSettings = LaunchSettings()
    workers: Annotated[Integer, Field(ge=2)]
    methods: Annotated[dict[str, MethodSettings], Field(min_length=1)]
    reference: str = "all_reduce"
    speeds: Annotated[dict[str, tuple[Slowdown, ...]], Field(min_length=1)]
    only: Only = Only()
    pace: PositiveFloat | None = None
    steps: Count | None = None
    limit: PositiveFloat | None = None
    target: Annotated[float, Field(gt=0, lt=100)] | None = None
    patience: Count = 5
    interval: PositiveFloat = 0.05
    rates: Rates
    rates_of: str | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    seeds: Count = 5
    tuning_seeds: Index = 1
    scheduling: Literal["none", "batch"] = "none"
    timeout: PositiveFloat = 120.0
    isolation: Simulation | None = None

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.launch.kind == "ssh":
            raise ValueError("launch: 'ssh' is not supported here; allowed: local, emulated")
        if self.emulated and self.cluster is None:
            raise ValueError("cluster: missing; launch=emulated needs one, for example cluster=four_equal")
        self._check_cluster()
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) is (self.limit is None):
            raise ValueError("steps and limit: give exactly one of them")
        for field, chosen, known in (
            ("methods", self.only.methods, self.methods),
            ("speeds", self.only.speeds, self.speeds),
        ):
            for name in chosen or ():
                if name not in known:
                    raise ValueError(f"only.{field}: '{name}' is {unknown_name(name, known)}")
        if self.reference not in self.chosen_methods:
            names = ", ".join(self.chosen_methods)
            raise ValueError(f"reference: '{self.reference}' is not among the methods to run ({names})")
        for name, slowdowns in self.speeds.items():
            for rank in (rank for slowdown in slowdowns for rank in slowdown.ranks or ()):
                if rank >= self.workers:
                    raise ValueError(f"speeds.{name}: rank {rank} is out of range; workers is {self.workers}")
        if self.pace is None and any(self.speeds[name] for name in self.chosen_speeds):
            raise ValueError("pace: missing; slow workers need it as the normal step time")
        if self.pace is None and self.isolation is not None:
            raise ValueError("pace: missing; isolation simulates paced steps")
        if self.tuning_seeds == 0 and self.rates_of is None and any(len(self.grid(name)) > 1 for name in self.methods):
            raise ValueError("tuning_seeds: must be 1 or more to choose among several rates; or give rates_of")
        return self

    @property
    def chosen_methods(self) -> list[str]:
        """The methods to run."""
        return [name for name in self.methods if self.only.methods is None or name in self.only.methods]

    @property
    def chosen_speeds(self) -> list[str]:
        """The speeds to run under."""
        return [name for name in self.speeds if self.only.speeds is None or name in self.only.speeds]

    @property
    def tuning_speed(self) -> str:
        """The speeds under which rates are chosen."""
        return next(iter(self.speeds))

    def grid(self, method: str) -> tuple[float, ...]:
        """The learning rates to choose from for a method."""
        return self.methods[method].rates or self.rates

    def seeds_of(self, method: str) -> int:
        """The number of trainings of a method under each speed."""
        return min(self.seeds, self.methods[method].seeds or self.seeds)

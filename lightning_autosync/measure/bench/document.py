"""``autosync-bench/1``: the result document of a bench."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from lightning_autosync.documents import Record, Result
from lightning_autosync.measure.bench.settings import BenchSettings, Exactness
from lightning_autosync.measure.hosts import Bound
from lightning_autosync.measure.step_time import Interval


class ContenderDocument(Record):
    """The measurement of one contender, and statistics of it.

    Attributes:
        exactness: how exact its training is; the field is called ``class``.
        why: why it is of this class; None if there is nothing to say.
        median_seconds, least_seconds, most_seconds: seconds of a step over rounds.
        seconds_are: how a round's steps become one time.
        ratio_to_best_ddp, ratio_to_first_ddp: its time relative to the best and the first DDP, paired by round.
        bound_share: the bound relative to its median; None without a bound.
        bytes_per_step_and_rank: payload bytes, the median over rounds; None if they cannot be counted.
        gradient_deviation: relative difference of its first gradients from the first DDP's; None where meaningless.
        round_seconds, round_bytes_per_step_and_rank, round_foreign_cores: the same by round.
        step_seconds_by_round_and_rank: seconds by round, rank and step.
    """

    model_config = ConfigDict(populate_by_name=True)

    exactness: Exactness = Field(alias="class")
    why: str | None
    median_seconds: float
    least_seconds: float
    most_seconds: float
    seconds_are: Literal["means", "medians of a round's steps"]
    ratio_to_best_ddp: Interval
    ratio_to_first_ddp: Interval
    bound_share: float | None
    bytes_per_step_and_rank: float | None
    gradient_deviation: float | None = Field(allow_inf_nan=True)
    round_seconds: tuple[float, ...]
    round_bytes_per_step_and_rank: tuple[float, ...] | None
    round_foreign_cores: tuple[float, ...] | None
    step_seconds_by_round_and_rank: tuple[tuple[tuple[float, ...], ...], ...]


class BenchDocument(Result):
    """One bench run.

    Attributes:
        cluster, workload: documents of what was measured; the workload has its ``bytes`` too.
        emulated: whether links and computation are emulated.
        rounds: number of complete rounds.
        meets_protocol: whether the run may back a claim.
        bound: least time of a step; None if it is unknown.
        conditions: versions, load and policies.
        foreign_cores: mean number of cores that other processes kept busy; None if unknown.
        best_ddp: name of the fastest DDP setting.
        best_exact_plan: name of the fastest exact plan; None if there is none.
        contenders: measurements by name.
    """

    FORMAT: ClassVar[str] = "autosync-bench/1"

    settings: BenchSettings
    cluster: dict[str, Any]
    workload: dict[str, Any]
    emulated: dict[str, bool]
    rounds: int
    meets_protocol: bool
    bound: Bound | None
    conditions: dict[str, Any]
    foreign_cores: float | None
    best_ddp: str
    best_exact_plan: str | None
    contenders: dict[str, ContenderDocument]

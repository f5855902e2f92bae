"""``autosync-hybrid-tuning/1``: the result of a tuning run that may split operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from lightning_autosync.documents import (
    RESULT,
    Duration,
    Index,
    PositiveDuration,
    Record,
    Result,
    read_data,
    seconds_text,
)
from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.tuning.comparison import AnyPlan, FinalComparison
from lightning_autosync.search.tuning.records import LENIENT
from lightning_autosync.search.tuning.result import speedup_figures

Origin = Literal["search", "megatron", "builder", "ddp"]


class HybridTrial(Record):
    """One way to run the model, as predicted and measured.

    Attributes:
        number: number of its trial in the study.
        name: name in the final comparison.
        origin: ``search``, ``megatron``, a ``builder`` of synchronization plans, or a setting of ``ddp``.
        state: ``complete``, ``pruned`` (clearly slower), or ``failed``.
        seconds: median seconds of a step; None if it was not measured.
        predicted: seconds of a step by the cost model; None if it has no price.
        memory: predicted bytes of a rank.
        bytes: predicted bytes that a rank sends per step.
        deviation: relative difference of its first gradients from DDP's; None if not compared.
        why: why it failed or was pruned.
        plan: document of the plan; None for DDP.
    """

    model_config = LENIENT

    number: Index
    name: str
    origin: Origin
    state: Literal["complete", "pruned", "failed"]
    seconds: PositiveDuration | None = None
    predicted: PositiveDuration | None = None
    memory: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    bytes: float | None = None
    deviation: float | None = None
    why: str | None = None
    plan: dict[str, Any] | None = None


class HybridTuningResult(Result):
    """The result of a run.

    Attributes:
        settings: settings of the run, as plain data.
        cluster, rates: documents, as plain data.
        model: title of the model.
        weight_bytes: bytes of its parameters.
        search_seconds: seconds of the search by prediction.
        notes: notes of the captured graph about the model.
        trials: all trials, in order.
        final: final comparison, as plain data for `FinalComparison`; None if there was none.
        winner: name of the fastest in the final comparison.
        interrupted: whether a Ctrl-C ended the run.
        failure: error that ended the run after a plan had a time; None if there was none.
    """

    FORMAT: ClassVar[str] = "autosync-hybrid-tuning/1"
    model_config = LENIENT

    settings: dict[str, Any] = Field(default_factory=dict)
    cluster: dict[str, Any]
    rates: dict[str, Any]
    model: str
    weight_bytes: Index
    search_seconds: Duration
    notes: tuple[str, ...] = ()
    trials: tuple[HybridTrial, ...]
    final: dict[str, Any] | None = None
    winner: str | None = None
    interrupted: bool = False
    failure: str | None = None

    @model_validator(mode="after")
    def _check_winner(self) -> Self:
        if self.winner is not None and self.winner not in {t.name for t in self.trials if t.seconds is not None}:
            raise ValueError(f"winner: no measured trial is named '{self.winner}'")
        return self

    @property
    def best(self) -> HybridTrial | None:
        """The winner of the final comparison; without a winner, the fastest complete plan."""
        if self.winner is not None:
            return next(one for one in self.trials if one.name == self.winner and one.seconds is not None)
        return fastest_plan(self.trials)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was tried."""
        return not self.trials

    @property
    def plan(self) -> AnyPlan | None:
        """The plan of the best trial."""
        return None if self.best is None else plan_of(self.best)

    def figures(self) -> dict[str, str]:
        if self.best is None:
            return {}
        found = {"best plan": self.best.name, "step": seconds_text(float(self))}
        return found if self.comparison is None else found | speedup_figures(self.comparison)

    @cached_property
    def comparison(self) -> FinalComparison | None:
        """The final comparison; None if there was none.

        Raises:
            DocumentError: a field of it is missing or wrong.
        """
        return None if self.final is None else FinalComparison.read(self.final, RESULT)

    def __float__(self) -> float:
        """Seconds of a step of the best plan, for sweeps over tuning runs.

        Raises:
            ValueError: no plan has a time.
        """
        if self.comparison is not None:
            return self.comparison.seconds
        if self.best is None or self.best.seconds is None:
            raise ValueError("no plan was measured")
        return self.best.seconds

    def lines(self) -> Iterator[str]:
        """The result for a terminal."""
        yield from self.notes
        best, final = self.best, self.comparison
        if best is None:
            yield "no plan was measured"
            return
        yield f"best plan: {best.name} ({best.origin}), {1e3 * float(self):.2f} ms a step"
        if final is None:
            yield "it was not compared with its opponents side by side; run the same command to resume"
            return
        for name in final.contenders:
            if name != final.winner:
                what, speedup = f"the best DDP, {name}" if name == final.ddp else name, final.speedup(name)
                few = "" if final.has_enough_rounds else ", too few rounds to be sure"
                tied = ", equal within noise" if not few and speedup.low <= 1 <= speedup.high else ""
                yield f"speedup over {what}: {speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]{few or tied}"
        for name, why in final.left_out.items():
            yield f"{name} failed in this comparison and was left out: {why}"


def fastest_plan(trials: Iterable[HybridTrial]) -> HybridTrial | None:
    """The complete trial of a plan with the shortest step; None if there is none."""
    ran = [one for one in trials if one.seconds is not None and one.plan is not None and one.state == "complete"]
    return min(ran, key=lambda one: one.seconds or 0.0, default=None)


def plan_of(trial: HybridTrial) -> AnyPlan | None:
    """The plan of a trial; None for DDP.

    Raises:
        PlanError: the plan cannot be read.
    """
    if trial.plan is None:
        return None
    kind = HybridPlan if HybridPlan.describes(trial.plan) else SyncPlan
    return kind.from_dict(trial.plan, f"trial {trial.number}: plan")


def read_hybrid_result(directory: Path) -> HybridTuningResult:
    """The result of the run in ``directory``.

    Raises:
        DocumentError: there is no result, or it is damaged or of another kind of run.
    """
    path = directory / RESULT
    if not path.is_file():
        raise DocumentError(
            f"{directory}: no {RESULT} in it; expected the directory of 'autosync tune parallel=hybrid'"
        )
    return HybridTuningResult.from_dict(read_data(path, finite=HybridTuningResult.FINITE), source=str(path))


def is_hybrid_run(directory: Path) -> bool:
    """Whether ``directory`` has the result of a tuning run with ``parallel=hybrid``."""
    path = directory / RESULT
    return path.is_file() and HybridTuningResult.is_in(path)

"""Settings of a tuning run: the job, how plans are proposed, and how long each is measured."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from lightning_autosync.cluster import Bytes
from lightning_autosync.documents import Configuration, Count, Index, Record
from lightning_autosync.learned.registry import SimulatorSettings
from lightning_autosync.measure.bench import settings as bench
from lightning_autosync.measure.interleaving import TrialSettings
from lightning_autosync.plan import builders
from lightning_autosync.search.sampler.proposer import SamplerSizes
from lightning_autosync.search.transfer import TransferSettings

SamplerName = Literal["autosync", "random", "tpe", "gp", "horovod"]
PACED = ("paced", "flat")
"""Kinds of models whose times are known: their computation is paced or empty."""
_NONE = TransferSettings()


class SearchSettings(Configuration):
    """How plans are proposed.

    Attributes:
        sampler: ``autosync``; ``random``, ``tpe`` or ``gp`` of Optuna on the same space; or ``horovod``, a Gaussian
            process over only the size of DDP's buckets, as in Horovod's autotuning.
        budget: number of trials of the study, including builders, failed trials and earlier sessions, but without
            interrupted trials.
        batch: number of trials that are proposed at once and measured in turns.
        seed: seed of the sampler in the first session of a run with its own journal. Other sessions must not draw the
            same plans again, so they derive other seeds from it.
        baselines: whether the builders' plans are the first trials. Otherwise they are measured before the trials, like
            DDP. They always are with ``horovod``, since they are not points of its space.
        max_failures: number of consecutive failed trials after which the run ends.
        options: arguments of `AutoSyncSampler`: ``population``, ``batch``, ``startup``, ``refit`` and ``refine``.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"failures": "max_failures"}

    sampler: SamplerName = "autosync"
    budget: Count = 200
    batch: Count = 4
    seed: Index | None = 0
    baselines: bool = True
    max_failures: Count = 10
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> SearchSettings:
        if self.options and self.sampler != "autosync":
            raise ValueError(f"options: allowed with sampler 'autosync' only, not '{self.sampler}'")
        try:
            SamplerSizes.check(self.options)
        except ValueError as error:
            raise ValueError(f"options: {error}") from None
        return self

    @property
    def tries_builders(self) -> bool:
        """Whether builders' plans are trials of the study."""
        return self.baselines and self.sampler != "horovod"


class StudySettings(Record):
    """The address of the study.

    Attributes:
        name: name of the study.
        storage: path of a journal file, or URL of a database; None is a journal file in the run directory.
    """

    name: Annotated[str, Field(min_length=1)] = "tune"
    storage: str | None = None


class ParallelSettings(Record):
    """What a tuning run may change.

    Attributes:
        kind: ``data`` tunes how gradients are synchronized. ``hybrid`` also tunes how operators are split over a mesh.
        memory: maximum bytes of a rank, for ``hybrid``; None for no limit.
        rates: file of rates from an earlier run; None measures them on the live workers.
        trials: number of plans with split operators to measure.
    """

    kind: Literal["data", "hybrid"] = "data"
    memory: Bytes | None = None
    rates: str | None = None
    trials: Count = 8

    @model_validator(mode="after")
    def _check(self) -> ParallelSettings:
        if self.kind == "data":
            for name in ("memory", "rates"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: allowed with parallel=hybrid only")
        return self


class TuningSettings(bench.BenchSettings):
    """One tuning run. The settings of a bench (warm-up, rounds, steps, contenders) are for its final comparison.

    Attributes:
        rounds: number of rounds of the final comparison that judge the winner. The same number before them chooses it.
        semantics: highest level of semantics that plans may have.
        finalists: number of the study's plans in the final comparison, beside the best builder and the best DDP.
        prediction_seconds: seconds to search by prediction alone, as a job does that is not tuned before it starts. The
            plan that is found so takes part in the final comparison. 0 leaves it out.
        search: how plans are proposed.
        trial: how long each plan is measured.
        study: address of the study.
        simulator: simulator that predicts times of plans and learns from the trials.
        transfer: earlier studies, datasets, or a fitted simulator instead of ``simulator``.
        within_job: whether the ranks are those of this process's torchrun job (``launch=torchrun``).
        parallel: whether operators may be split too.
        timeline: not supported.
    """

    warm_up: PositiveInt = 2
    steps: PositiveInt = 2
    timeout: PositiveFloat = 60.0
    timeline: Literal[False] = False
    within_job: bool = False
    semantics: Literal["exact", "compressed"] = "exact"
    finalists: PositiveInt = 3
    prediction_seconds: NonNegativeFloat = 5.0
    search: SearchSettings = SearchSettings()
    trial: TrialSettings = TrialSettings()
    study: StudySettings = StudySettings()
    simulator: SimulatorSettings = SimulatorSettings(kind="replay")
    transfer: TransferSettings = TransferSettings()
    parallel: ParallelSettings = ParallelSettings()

    @property
    def launch_kind(self) -> str:
        """How ranks are started."""
        return "torchrun" if self.within_job else self.launch.kind

    @property
    def is_paced(self) -> bool:
        """Whether the model's times are known. Other models are profiled."""
        return self.model.kind in PACED

    @property
    def _teaches_sampler(self) -> bool:
        """Whether the sampler learns from earlier runs. Rates are for the search of hybrid plans."""
        return self.transfer.model_copy(update={"rates": None}) != _NONE

    @model_validator(mode="after")
    def _check_sampler(self) -> TuningSettings:
        """Refuse sources that the sampler does not use."""
        name = self.search.sampler
        if name != "autosync":
            for field, unused in (("simulator", self.simulator.kind != "replay"), ("transfer", self._teaches_sampler)):
                if unused:
                    raise ValueError(f"{field}: allowed with sampler 'autosync' only, not '{name}'")
        return self

    @model_validator(mode="after")
    def _check_transfer(self) -> TuningSettings:
        """Refuse sources that this kind of run does not use."""
        hybrid = self.parallel.kind == "hybrid"
        if hybrid and self._teaches_sampler:
            raise ValueError("transfer: parallel=hybrid takes transfer=rates only")
        if not hybrid and self.transfer.rates is not None:
            raise ValueError("transfer.rates: allowed with parallel=hybrid only")
        return self

    @model_validator(mode="after")
    def _check_names(self) -> TuningSettings:
        """Names of contenders must differ from names of finalists, which are those of builders or trials."""
        taken = (*builders.names(), "megatron", "predicted")
        for name in self.contenders:
            if name in taken or re.fullmatch(r"trial_\d+|split_[0-9a-f]{6}", name):
                raise ValueError(f"contenders: '{name}' is reserved for finalists; choose another name")
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_groups(cls, value: Any) -> Any:
        """Adapt config groups to these fields.

        ``data`` belongs to the imported model, ``launch=torchrun`` starts no workers, and ``transfer`` may be null.
        """
        if not isinstance(value, dict):
            return value
        kept = {name: field for name, field in value.items() if name != "data"}
        if isinstance(kept.get("launch"), dict) and kept["launch"].get("kind") == "torchrun":
            kept |= {"launch": {}, "within_job": True}
            if kept.get("cluster") is None and kept.get("ranks") is None:
                kept["ranks"] = int(os.environ.get("WORLD_SIZE", "1"))
        kept["transfer"] = kept.get("transfer") or {}
        if value.get("data") is not None and isinstance(kept.get("model"), dict):
            kept["model"] = {**kept["model"], "data": value["data"]}
        return kept

"""What a tuning run is told: the job, how plans are proposed, and how long each is measured."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lightning_autosync.documents import Count, Index, Record
from lightning_autosync.learned.registry import SimulatorSettings
from lightning_autosync.measure.bench import settings as bench
from lightning_autosync.measure.interleaving import TrialSettings
from lightning_autosync.plan import builders
from lightning_autosync.search.sampler.proposer import SamplerSizes
from lightning_autosync.search.transfer import TransferSettings

SamplerName = Literal["autosync", "random", "tpe", "gp", "horovod"]
SIMULATED = ("autosync",)
"""Samplers that ask a simulator."""
_NONE = TransferSettings()


class SearchSettings(Record):
    """How plans are proposed.

    Attributes:
        sampler: ``autosync``; ``random``, ``tpe``, ``gp`` of Optuna on the same space; or ``horovod``, a Gaussian
            process over the size of DDP's buckets and nothing else, as Horovod's autotuning.
        budget: trials of the study, those of builders and failed ones included, interrupted ones not; a resumed run
            counts what was there.
        batch: trials that are proposed at once and measured in turns.
        seed: of the sampler, in the first session of a run with a journal of its own; others, which must not draw the
            same again, derive theirs from it.
        baselines: the builders' plans are the first trials; else, and where they are no points of the sampler's space
            (``horovod``), they are measured before them, as DDP is.
        failures: trials of this run that may fail one after the other before it is given up.
        options: sizes that `AutoSyncSampler` takes as arguments: ``population``, ``batch``, ``startup``, ``refit`` and
            ``refine``.
    """

    sampler: SamplerName = "autosync"
    budget: Count = 200
    batch: Count = 4
    seed: Index | None = 0
    baselines: bool = True
    failures: Count = 10
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> SearchSettings:
        if self.options and self.sampler not in SIMULATED:
            raise ValueError(f"options: are of the sampler 'autosync'; '{self.sampler}' takes none")
        try:
            SamplerSizes.check(self.options)
        except ValueError as error:
            raise ValueError(f"options: {error}") from None
        return self

    @property
    def tries_builders(self) -> bool:
        """Whether builders' plans are trials; where they are not, they are measured beside the study."""
        return self.baselines and self.sampler != "horovod"


class StudySettings(Record):
    """Where the study is kept.

    Attributes:
        name: of the study.
        storage: None is a journal file in the run directory; else the path of one, or the URL of a database.
    """

    name: Annotated[str, Field(min_length=1)] = "tune"
    storage: str | None = None


class Settings(bench.BenchSettings):
    """One tuning run; what a bench is told holds for its last comparison: warm-up, rounds, steps, further contenders.

    Attributes:
        rounds: of the last comparison that judge the winner; as many before them choose it.
        semantics: the highest level that plans may have.
        finalists: plans of the study that are measured again at the end, beside the best builder and the best of DDP.
        search: how plans are proposed.
        trial: how long each is measured.
        study: where trials are kept.
        simulator: what prices plans and learns from the trials.
        transfer: earlier studies, datasets, or a fitted simulator in place of ``simulator``, to start from.
        within_job: the ranks are those of a torchrun job that this process is in (``launch=torchrun``).
        timeline: not drawn here.
    """

    warm_up: PositiveInt = 2
    steps: PositiveInt = 2
    timeout: PositiveFloat = 60.0
    timeline: Literal[False] = False
    within_job: bool = False
    semantics: Literal["exact", "compressed"] = "exact"
    finalists: PositiveInt = 3
    search: SearchSettings = SearchSettings()
    trial: TrialSettings = TrialSettings()
    study: StudySettings = StudySettings()
    simulator: SimulatorSettings = SimulatorSettings(kind="replay")
    transfer: TransferSettings = TransferSettings()

    @model_validator(mode="after")
    def _check_sampler(self) -> Settings:
        """What a sampler would not ask is refused, lest it be taken for a search that started with it."""
        name = self.search.sampler
        if name not in SIMULATED:
            for field, unused in (("simulator", self.simulator.kind != "replay"), ("transfer", self.transfer != _NONE)):
                if unused:
                    raise ValueError(f"{field}: is for the sampler 'autosync'; '{name}' asks none")
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Settings:
        """Contenders meet the finalists, which are called by their builders or their trials."""
        for name in self.contenders:
            if name in builders.names() or re.fullmatch(r"trial_\d+", name):
                raise ValueError(f"contenders: '{name}' is what a finalist may be called; take another name")
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_groups(cls, value: Any) -> Any:
        """What configs say otherwise than these fields: ``data`` beside a model that is imported, as in a training's
        configuration, is the model's; ``launch=torchrun`` starts nothing; without sources, ``transfer`` is none."""
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

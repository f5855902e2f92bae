"""The configuration of a training (model, data, synchronization, launch, the Trainer's arguments), and its result."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, field_validator, model_validator

from lightning_autosync.documents import (
    Count,
    Duration,
    Index,
    Metric,
    Record,
    Result,
    describe_validation_error,
    seconds_text,
)
from lightning_autosync.measure.launches.settings import AnyLaunch, ClusterSettings, LaunchSettings, needs_cluster
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.plan import Semantics

_OURS = {"strategy": "sync", "devices": "ranks or cluster", "num_nodes": "cluster", "default_root_dir": "hydra.run.dir"}
"""Arguments of the Trainer that other keys set, with those keys."""
_CHECKPOINT_WORDS = ("last", "hpc", "registry")
"""Values of the Trainer's ``ckpt_path`` that are no paths."""


class Synchronization(Record):
    """Synchronization of gradients.

    Attributes:
        strategy: ``autosync``, or Lightning's ``ddp`` for comparison.
        plan: path of a plan file, name of a builder, or None for AutoSync to choose.
        semantics: the highest allowed level of semantics.
        arguments: other arguments of the strategy.
    """

    strategy: Literal["autosync", "ddp"] = "autosync"
    plan: str | None = None
    semantics: Semantics = "exact"
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Synchronization:
        if self.strategy == "ddp" and (self.plan is not None or self.semantics != "exact"):
            raise ValueError("strategy: ddp takes neither plan nor semantics")
        return self


class TrainingSettings(ClusterSettings):
    """Settings of one training; without a cluster on one machine with ``ranks`` devices.

    Attributes:
        model: ``_target_`` (a LightningModule) and its arguments, or a bench model (``kind``). A ``data`` key in it has
            the same meaning as the attribute ``data``.
        data: ``_target_`` (a LightningDataModule) and its arguments; None if the model or its module has its own data.
        sync: synchronization of gradients.
        launch: launcher of the ranks.
        ranks: number of ranks without a cluster; None for 2, or the size of an already launched job.
        trainer: arguments of Lightning's Trainer; values with ``_target_`` are instantiated.
        seed: seed of torch, numpy and Python on every rank.
        threads: torch's number of threads per operator.
        checkpoint: path of a checkpoint from which to resume.
        objective: the value that a sweep compares: ``step_seconds``, or a metric that the model logs.
        timeout: seconds to wait for another rank.
    """

    model: dict[str, Any]
    data: dict[str, Any] | None = None
    sync: Synchronization = Synchronization()
    launch: AnyLaunch = LaunchSettings()
    ranks: PositiveInt | None = None
    trainer: dict[str, Any] = Field(default_factory=dict)
    seed: Index = 0
    threads: PositiveInt = 1
    checkpoint: str | None = None
    objective: str = "step_seconds"
    timeout: PositiveFloat = 1800.0

    @property
    def module(self) -> dict[str, Any] | None:
        """``_target_`` of the LightningModule and its arguments; None for a bench model."""
        if "_target_" not in self.model:
            return None
        named = {name: value for name, value in self.model.items() if name not in ("kind", "data", "loss", "arguments")}
        return {**named, **self.model.get("arguments", {})}

    @property
    def data_module(self) -> dict[str, Any] | None:
        """``_target_`` of the LightningDataModule and its arguments; None if the module has its own loaders."""
        return self.data if self.data is not None else self.model.get("data")

    @property
    def paced(self) -> bool:
        """Whether computation is emulated."""
        return self.model.get("kind") == "paced"

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: dict[str, Any]) -> dict[str, Any]:
        if "_target_" in model:
            if model.get("kind") not in (None, "imported"):
                raise ValueError(
                    f"kind: got '{model['kind']}'; leave it out where _target_ names the class, or give the class an "
                    f"argument of this name by model.arguments: +model.arguments.kind={model['kind']}"
                )
            if model.get("loss") is not None:
                raise ValueError("loss: a LightningModule computes its loss in training_step; leave it out")
            return model
        if "kind" not in model:
            raise ValueError("expected _target_, the name of a LightningModule, or kind, a model of the bench")
        try:
            model_of(model)
        except ValidationError as error:
            raise ValueError(describe_validation_error(error, model)) from None
        return model

    @field_validator("data")
    @classmethod
    def _check_data(cls, data: dict[str, Any] | None) -> dict[str, Any] | None:
        if data is not None and "_target_" not in data:
            raise ValueError("expected _target_, the name of a LightningDataModule")
        return data

    @field_validator("trainer")
    @classmethod
    def _check_trainer(cls, trainer: dict[str, Any]) -> dict[str, Any]:
        for name in trainer:
            if name in _OURS:
                raise ValueError(f"{name}: not allowed here; set {_OURS[name]} instead")
        return trainer

    @model_validator(mode="after")
    def _check(self) -> TrainingSettings:
        if self.module is None and self.data is not None:
            raise ValueError(f"data: a model of kind '{self.model['kind']}' makes its own batches; leave data out")
        if self.cluster is None and self.launch.kind in ("emulated", "ssh"):
            raise ValueError(needs_cluster(self.launch.kind))
        self._check_cluster()
        # Other launchers may start ranks where this file is not.
        if self.launch.kind in ("local", "emulated") and _is_missing(self.checkpoint):
            raise ValueError(f"checkpoint: {self.checkpoint}: no such file or directory")
        return self


def _is_missing(checkpoint: str | None) -> bool:
    """Whether a checkpoint is the path of a local file that does not exist."""
    if checkpoint is None or "://" in checkpoint or checkpoint.partition(":")[0] in _CHECKPOINT_WORDS:
        return False
    return not os.path.exists(checkpoint)


class TrainingResult(Result):
    """``autosync-training/1``: the result of a training.

    Attributes:
        emulated: whether ``links`` were emulated and ``compute`` was paced.
        cluster, plan: documents; None if there is none.
        strategy: ``autosync`` or ``ddp``.
        metrics: last values of the metrics that the model logged.
        epochs, steps: numbers of epochs and of optimizer steps.
        seconds: seconds of the whole training.
        median_step_seconds: see `lightning_autosync.training.rank.median_step`.
        step_seconds_by_rank: [ranks][steps] seconds of each step.
        checkpoint: path of the best checkpoint; None if there is none.
    """

    FORMAT: ClassVar[str] = "autosync-training/1"

    settings: TrainingSettings
    emulated: dict[str, bool]
    cluster: dict[str, Any] | None
    world_size: Count
    strategy: str
    plan: dict[str, Any] | None
    metrics: dict[str, Metric]
    epochs: Index
    steps: Index
    seconds: Duration
    median_step_seconds: Duration | None
    step_seconds_by_rank: tuple[tuple[Duration, ...], ...]
    checkpoint: str | None

    def figures(self) -> dict[str, str]:
        found = {"strategy": self.strategy}
        if self.median_step_seconds is not None:
            found["median step"] = seconds_text(self.median_step_seconds)
        return found | {name: f"{value:.4g}" for name, value in sorted(self.metrics.items())}

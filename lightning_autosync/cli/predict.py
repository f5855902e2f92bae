"""``autosync predict``: what a job would gain over DDP, or the time of a step under one plan; without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError

from lightning_autosync.cli.tables import table_console
from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.documents import RESULT, Configuration, Count, describe_validation_error, is_path
from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.hybrid.validation import check_plan
from lightning_autosync.measure.bench.settings import DDPSweep
from lightning_autosync.measure.models.recipes import AnyModel, model_of
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.replay import Constants
from lightning_autosync.report.gain import GainResult, gain_remarks, gain_table
from lightning_autosync.report.hybrid_prediction import predict_hybrid
from lightning_autosync.report.predict import predict as predict_step
from lightning_autosync.strategy.gain import check_ranks, predict_gain
from lightning_autosync.strategy.tuning.settings import TuningSettings
from lightning_autosync.workload import Workload, catalogue

WORKLOAD = "vgg16"
"""The workload if neither a workload nor a model is given."""
WELL_TUNED = DDPSweep(
    bucket_cap_mb=("default", 1, 5, 100), gradient_as_bucket_view=(False, True), static_graph=(False, True)
)
"""The settings of DDP if none are given: those of ``conf/ddp/sweep.yaml``."""


class PredictSettings(Configuration):
    """What to predict.

    Attributes:
        plan: path of a plan file, or name of a builder; None compares DDP, AutoSync's choice and all builders.
        arguments: arguments of the builder.
        workload: path of a workload file, or name of a model in the catalogue; None takes that of ``model``, if it is a
            model of the bench, else `WORKLOAD`.
        model: a model of the bench, or arguments of the workload's model, for example ``batch_size``.
        cluster: cluster document, path of its file, or name of a shipped cluster.
        constants: file of the hosts' constants, from a probe; None uses the defaults.
        module: model for a plan that splits operators, instead of a workload.
        rates: file of rates for such a plan, from a tuning run; None uses the defaults.
        ddp: settings of DDP to compare with, without a plan; sizes of buckets make a difference.
        search_seconds: maximum seconds of the search for AutoSync's choice.
        batch_size: number of samples in a batch of the data loader, whose times the workload has; with ``micro_batch``.
        micro_batch: number of samples that a rank computes at once, to predict batch shares in whole micro-batches.
    """

    plan: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    workload: str | None = None
    model: dict[str, Any] = Field(default_factory=dict)
    cluster: str | dict[str, Any]
    constants: str | None = None
    module: AnyModel | None = None
    rates: str | None = None
    ddp: DDPSweep = WELL_TUNED
    search_seconds: Annotated[float, Field(ge=0.1)] = TuningSettings.search
    batch_size: Count | None = None
    micro_batch: Count | None = None

    @property
    def micro_batches(self) -> tuple[int, int] | None:
        """Samples of a batch and of a micro-batch; None without micro-batches.

        Raises:
            DocumentError: only one of the two is given.
        """
        if (self.batch_size is None) != (self.micro_batch is None):
            missing = "batch_size" if self.batch_size is None else "micro_batch"
            raise DocumentError(f"{missing}: missing; give batch_size and micro_batch together, or none of the two")
        return None if self.batch_size is None or self.micro_batch is None else (self.batch_size, self.micro_batch)


def predict(configuration: dict[str, Any], directory: Path) -> None:
    """Print a prediction, and write ``result.json`` to ``directory``.

    Without a plan it is a table of what the job would gain over DDP. With a plan it is a step of that plan, also as
    figures and as a trace.

    Raises:
        AutoSyncError: a setting is wrong, or plan, workload and cluster do not match.
    """
    settings = PredictSettings.parse(configuration)
    if settings.plan is None:
        _print_gain(_predict_gain(settings), directory)
        return
    if is_path(settings.plan) and HybridPlan.is_in(settings.plan):
        _refuse(
            settings,
            ("workload", "model", "arguments", "constants", "search_seconds", "batch_size", "micro_batch", "ddp"),
            "not for a plan that splits operators",
        )
        print(_predict_hybrid(settings.plan, settings, directory), end="")
        print(f"{directory}: result.json, mesh.svg")
        return
    _refuse(settings, ("module", "rates"), "only for a plan that splits operators")
    _refuse(settings, ("search_seconds", "ddp"), "only without plan=")
    workload, cluster = _workload(settings), _cluster(settings.cluster)
    check_ranks(cluster)
    constants = _constants(settings)
    plan = _plan(settings.plan, settings.arguments, workload, cluster)
    text = predict_step(plan, workload, cluster, directory, constants, settings.plan, settings.micro_batches)
    print(text, end="")
    print(f"{directory}: result.json, timeline.svg, timeline.png, trace.json")


def _refuse(settings: PredictSettings, names: tuple[str, ...], why: str) -> None:
    """Refuse settings that the prediction would ignore; ``why`` says which prediction they are for."""
    for name in names:
        if getattr(settings, name) != PredictSettings.model_fields[name].get_default(call_default_factory=True):
            raise DocumentError(f"{name}: {why}; leave {name} out")


def _predict_gain(settings: PredictSettings) -> GainResult:
    _refuse(settings, ("arguments", "module", "rates"), "only for one plan, with plan=...")
    workload, cluster = _workload(settings), _cluster(settings.cluster)
    tuning = TuningSettings(search=settings.search_seconds)
    return predict_gain(workload, cluster, _constants(settings), settings.ddp, tuning, settings.micro_batches)


def _print_gain(result: GainResult, directory: Path) -> None:
    result.write(directory)
    console = table_console()
    console.print(gain_table(result))
    for line in (*gain_remarks(result), str(directory / RESULT)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _predict_hybrid(path: str, settings: PredictSettings, directory: Path) -> str:
    if settings.module is None:
        raise DocumentError(f"module: missing; '{path}' splits a model's operators; give model@module=NAME")
    with torch.device("meta"):
        module = settings.module.module()
    plan, cluster = HybridPlan.load(path), _cluster(settings.cluster)
    check_plan(plan, module, cluster.world_size, path)
    graph = capture(module, *settings.module.batches(0)[0])
    rates = HybridRates() if settings.rates is None else HybridRates.load(settings.rates)
    return predict_hybrid(plan, graph, cluster, rates, directory)


def _workload(settings: PredictSettings) -> Workload:
    if {"kind", "_target_"} & settings.model.keys():
        if settings.workload is not None:
            raise DocumentError("workload: model=NAME has its own workload; give only one of the two")
        try:
            return model_of(settings.model).workload("rows")
        except ValidationError as error:
            raise DocumentError(f"model: {describe_validation_error(error, settings.model)}") from None
    name = settings.workload or WORKLOAD
    if not is_path(name):
        return catalogue.build(name, **settings.model)
    if settings.model:
        raise DocumentError(f"model: workload '{name}' is a file and takes no arguments; leave model out")
    return Workload.load(name)


def _constants(settings: PredictSettings) -> Constants:
    return Constants() if settings.constants is None else Constants.load(settings.constants)


def _cluster(value: str | dict[str, Any]) -> ClusterSpec:
    return ClusterSpec.from_dict(value) if isinstance(value, dict) else resolve_cluster(value)


def _plan(name: str, arguments: dict[str, Any], workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    if is_path(name):
        if arguments:
            raise DocumentError(f"arguments: plan '{name}' is a file and takes no arguments; leave them out")
        return SyncPlan.load(name)
    return builders.build(name, workload, cluster, **arguments)

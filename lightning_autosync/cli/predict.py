"""``autosync predict``: predict the time of a step under a plan, and explain it, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.documents import Configuration, is_path
from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.hybrid.validation import check_plan
from lightning_autosync.measure.models.recipes import AnyModel
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.replay import Constants
from lightning_autosync.report.hybrid_prediction import predict_hybrid
from lightning_autosync.report.predict import predict as predict_step
from lightning_autosync.workload import Workload, catalogue


class PredictSettings(Configuration):
    """What to predict.

    Attributes:
        plan: path of a plan file, or name of a builder.
        arguments: arguments of the builder.
        workload: path of a workload file, or name of a model in the catalogue.
        model: arguments of the model, for example ``batch_size``.
        cluster: cluster document, path of its file, or name of a shipped cluster.
        constants: file of the hosts' constants, from a probe; None uses the defaults.
        module: model for a plan that splits operators, instead of a workload.
        rates: file of rates for such a plan, from a tuning run; None uses the defaults.
    """

    plan: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    workload: str
    model: dict[str, Any] = Field(default_factory=dict)
    cluster: str | dict[str, Any]
    constants: str | None = None
    module: AnyModel | None = None
    rates: str | None = None


def predict(configuration: dict[str, Any], directory: Path) -> None:
    """Print a prediction; write figures, a trace and ``result.json`` to ``directory``.

    Raises:
        AutoSyncError: a setting is wrong, or plan, workload and cluster do not match.
    """
    settings = PredictSettings.parse(configuration)
    if is_path(settings.plan) and HybridPlan.is_in(settings.plan):
        print(_predict_hybrid(settings, directory), end="")
        print(f"{directory}: result.json, mesh.svg")
        return
    workload, cluster = _workload(settings), _cluster(settings.cluster)
    constants = Constants() if settings.constants is None else Constants.load(settings.constants)
    plan = _plan(settings, workload, cluster)
    print(predict_step(plan, workload, cluster, directory, constants, settings.plan), end="")
    print(f"{directory}: result.json, timeline.svg, timeline.png, trace.json")


def _predict_hybrid(settings: PredictSettings, directory: Path) -> str:
    if settings.module is None:
        raise DocumentError(f"module: missing; '{settings.plan}' splits a model's operators; give model@module=NAME")
    with torch.device("meta"):
        module = settings.module.module()
    plan, cluster = HybridPlan.load(settings.plan), _cluster(settings.cluster)
    check_plan(plan, module, cluster.world_size, settings.plan)
    graph = capture(module, *settings.module.batches(0)[0])
    rates = HybridRates() if settings.rates is None else HybridRates.load(settings.rates)
    return predict_hybrid(plan, graph, cluster, rates, directory)


def _workload(settings: PredictSettings) -> Workload:
    if not is_path(settings.workload):
        return catalogue.build(settings.workload, **settings.model)
    if settings.model:
        raise DocumentError(f"model: workload '{settings.workload}' is a file and takes no arguments; leave model out")
    return Workload.load(settings.workload)


def _cluster(value: str | dict[str, Any]) -> ClusterSpec:
    return ClusterSpec.from_dict(value) if isinstance(value, dict) else resolve_cluster(value)


def _plan(settings: PredictSettings, workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    if is_path(settings.plan):
        if settings.arguments:
            raise DocumentError(f"arguments: plan '{settings.plan}' is a file and takes no arguments; leave them out")
        return SyncPlan.load(settings.plan)
    return builders.build(settings.plan, workload, cluster, **settings.arguments)

"""How near predicted times of split models are to measured ones, over random and searched plans; as root.

``python -m tests.benchmarks.hybrid_predictions [plans a case]`` emulates links, measures the rates of the ranks once a
cluster, measures each plan in turns, and prints the rank correlation and the relative errors.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass

import torch
from scipy.stats import spearmanr

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.cost import LayerCosts, StepSettings, step_seconds
from lightning_autosync.hybrid.exact import exact
from lightning_autosync.hybrid.mesh import Links, near_order, shapes
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.hybrid.pricing import Pricing
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.hybrid.structure import structure
from lightning_autosync.hybrid.tables import ILLEGAL, Tables, plan_of, tables
from lightning_autosync.measure.hybrid.calibration import calibrate
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.models.model import Model
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.measure.session import Contender, MeasurementSession

CLUSTERS = (
    ClusterSpec.uniform(4, 1, "200 Mbit/s", name="four_slow"),
    ClusterSpec.uniform(2, 2, "200 Mbit/s", name="two_by_two"),
)
MODELS = {
    "perceptron": {"kind": "perceptron", "widths": [2048, 1024, 1024, 256], "batch": 16},
    "vgg": {"kind": "vgg", "batch": 16},
    "transformer": {"kind": "transformer", "width": 256, "layers": 2, "length": 32},
}
STEPS, ROUNDS = 2, 3


@dataclass(frozen=True)
class Row:
    """A plan of a case."""

    case: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


def main(count: int) -> None:
    rows: list[Row] = []
    for cluster in CLUSTERS:
        emulated = cluster.as_emulated()
        with MeasurementSession(emulated, LaunchSettings(kind="emulated"), 120.0) as session:
            rates = calibrate(session, emulated)
            for name, data in MODELS.items():
                model = model_of(data)
                found = _measured(session, model, emulated, _plans(model, emulated, rates, count))
                rows += [Row(f"{name} on {cluster.name}", *times) for times in found]
                _show(f"{name} on {cluster.name}", [row for row in rows if row.case == f"{name} on {cluster.name}"])
    _show("all", rows)


def _plans(model: Model, cluster: ClusterSpec, rates: HybridRates, count: int) -> dict[str, tuple[HybridPlan, float]]:
    """The best plan of each mesh, and plans that chance draws; with their predicted seconds."""
    with torch.device("meta"):
        module = model.module()
    of, links, rng = structure(capture(module, *model.batches(0)[0])), Links(cluster), random.Random(0)
    found: dict[str, tuple[HybridPlan, float]] = {}
    meshes = shapes(cluster.world_size)
    for number in range(10 * count):
        mesh = meshes[number % len(meshes)]
        costs = LayerCosts(Pricing(mesh, near_order(cluster), links, rates), StepSettings(slots=0))
        on_mesh = tables(of, costs)
        choice = exact(on_mesh)[0] if number < len(meshes) else _drawn(on_mesh, rng)
        plan = plan_of(on_mesh, choice)
        found.setdefault(plan.fingerprint, (plan, float(step_seconds(on_mesh.total(choice)))))
        if len(found) == count:
            break
    return found


def _drawn(on_mesh: Tables, rng: random.Random) -> list[int]:
    layers = [alternatives.index(("dp",) * len(alternatives[0])) for alternatives in on_mesh.signatures]
    choice = [*layers, *[0] * (len(on_mesh.alone) - on_mesh.layers)]
    for _ in range(6 * len(choice)):
        number = rng.randrange(len(choice))
        other = [*choice[:number], rng.randrange(len(on_mesh.alone[number])), *choice[number + 1 :]]
        if step_seconds(on_mesh.total(other)) < ILLEGAL:
            choice = other
    return choice


def _measured(
    session: MeasurementSession, model: Model, cluster: ClusterSpec, plans: dict[str, tuple[HybridPlan, float]]
) -> list[tuple[float, float]]:
    """Predicted and measured seconds of each plan; plans take turns."""
    order = {"model": model.model_dump(), "sparse": False, "cluster": cluster.to_dict(), "timeout": 60.0}
    contenders = {name: Contender(name, {**order, "hybrid": plan.to_dict()}) for name, (plan, _) in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in plans}
    for contender in contenders.values():
        session.measure(contender, 1)
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            times[name] += [max(step) for step in zip(*session.measure(contender, STEPS), strict=True)]
    for contender in contenders.values():
        session.take_down(contender)
    return [(predicted, statistics.median(times[name])) for name, (_, predicted) in plans.items()]


def _show(case: str, rows: list[Row]) -> None:
    correlation = spearmanr([row.predicted for row in rows], [row.measured for row in rows]).statistic
    errors = [row.error for row in rows]
    print(
        f"{case}: {len(rows)} plans, Spearman {correlation:.3f}, median error {statistics.median(errors):.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)

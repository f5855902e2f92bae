"""Draws the pictures of the documentation into ``docs/images``: ``python docs/pictures.py [RUN]``.

Predictions need nothing else. ``RUN`` is the directory of an ``autosync tune``, whose curve and finalists are drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from matplotlib import rc_context

from lightning_autosync.cluster import ClusterSpec, configuration_directory, resolve_cluster
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.report.figures.cluster import cluster_picture
from lightning_autosync.report.figures.picture import PAPER, Picture, report_style
from lightning_autosync.report.figures.plan import plan_picture
from lightning_autosync.report.figures.tuning import contenders_picture, tuning_curve
from lightning_autosync.report.plan_view import PlanView
from lightning_autosync.report.timeline import steps_picture
from lightning_autosync.report.tuning_run import TuningRun
from lightning_autosync.strategy.choice import choose_plan
from lightning_autosync.workload import Workload

IMAGES = Path(__file__).parent / "images"
MOST_BYTES = 150_000


def main() -> None:
    """Draw all pictures that need no run, and those of a run if one is given."""
    model = yaml.safe_load((configuration_directory() / "model/vgg_like.yaml").read_text())
    workload = model_of(model).workload("dense")
    draw_steps(workload, resolve_cluster("fat_node_star"))
    draw_plan(workload, resolve_cluster("two_racks_2to1"), "plan", "cluster")
    draw_plan(workload, resolve_cluster("two_interfaces"), "plan-interfaces", "cluster-interfaces")
    for directory in sys.argv[1:]:
        draw_run(TuningRun.load(Path(directory)))


def draw_steps(workload: Workload, cluster: ClusterSpec) -> None:
    """A step under DDP's plan beside one under the plan that AutoSync chooses, both predicted."""
    chosen, _ = choose_plan(workload, cluster, known=True)
    plans = {"DDP's all-reduce": builders.all_reduce(workload, cluster), "AutoSync's choice": chosen}
    views = {title: view_of(plan, workload, cluster) for title, plan in plans.items()}
    save(
        steps_picture({title: view.prediction.timeline for title, view in views.items() if view.prediction}), "timeline"
    )


def draw_plan(workload: Workload, cluster: ClusterSpec, messages: str, links: str) -> None:
    """Packed trees: the messages, and what they send over each link in a predicted step."""
    view = view_of(builders.packed_trees(workload, cluster, bucket_bytes=2**20), workload, cluster)
    save(plan_picture(view.plan, view.schedule, workload), messages)
    if view.traffic is not None:
        save(cluster_picture(cluster, view.traffic), links)


def draw_run(run: TuningRun) -> None:
    """The trials of a tuning run, and the finalists in their last comparison."""
    save(tuning_curve(run), "tuning-curve")
    if run.final is not None:
        save(contenders_picture(run.final, None if run.bound is None else run.bound.seconds), "tuning-finalists")


def view_of(plan: SyncPlan, workload: Workload, cluster: ClusterSpec) -> PlanView:
    return PlanView.of(plan, workload, cluster, emulated_hosts(cores=2.0))


def save(picture: Picture | None, name: str) -> None:
    """Write a picture with a light background, and print its size and its text alternative.

    Raises:
        ValueError: there is no picture, or its file is too large for the repository.
    """
    if picture is None:
        raise ValueError(f"{name}: the cluster is too large to draw, or its rates are unknown")
    path = IMAGES / f"{name}.svg"
    with report_style(), rc_context({"svg.hashsalt": name}):
        picture.figure.savefig(path, facecolor=PAPER, metadata={"Date": None})
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB: {picture.description}")
    if size > MOST_BYTES:
        raise ValueError(f"{path}: {size} bytes; at most {MOST_BYTES} are allowed")


if __name__ == "__main__":
    main()

"""Plans for VGG16 on a star with one fat node, priced by the replay in place of a cluster."""

from __future__ import annotations

import optuna

from lightning_autosync.cluster import resolve_cluster
from lightning_autosync.plan import compile_plan
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Replay
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.search.studies import enqueue_baselines, suggest
from lightning_autosync.workload import catalogue

workload, cluster = catalogue.build("vgg16"), resolve_cluster("fat_node_star")
space = PlanSpace(workload, cluster)
replay = Replay(workload, cluster)


def objective(trial: optuna.Trial) -> float:
    """Seconds of a step."""
    plan = space.plan(suggest(trial, space))
    return replay.predict(compile_plan(plan, workload, cluster)).step_time


if __name__ == "__main__":
    builders = len(space.baselines())
    study = optuna.create_study(sampler=AutoSyncSampler(space, seed=0))
    enqueue_baselines(study, space)
    study.optimize(objective, n_trials=30)
    print(study.best_trial.params)
    print(f"{study.best_value:.3f} s a step; the fastest builder {min(t.value for t in study.trials[:builders]):.3f} s")

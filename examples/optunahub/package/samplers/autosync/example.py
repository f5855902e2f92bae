"""Plans for a recommender (NCF) on two nodes of four ranks, priced by the replay in place of a cluster.

Compares the sampler with Optuna's TPE and random samplers, which get as many trials and the same builders' plans first.
"""

from __future__ import annotations

import optuna

from lightning_autosync.cluster import resolve_cluster
from lightning_autosync.plan import compile_plan
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Replay
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.search.studies import enqueue_baselines, suggest
from lightning_autosync.workload import catalogue

TRIALS = 40

workload, cluster = catalogue.build("ncf"), resolve_cluster("two_nodes_of_four")
space = PlanSpace(workload, cluster)
replay = Replay(workload, cluster)


def objective(trial: optuna.Trial) -> float:
    """Seconds of a step."""
    plan = space.plan(suggest(trial, space))
    return replay.predict(compile_plan(plan, workload, cluster)).step_time


def best_of(sampler: optuna.samplers.BaseSampler) -> tuple[float, float]:
    """Seconds of a step by the fastest builder, and by the best plan of all trials."""
    study = optuna.create_study(sampler=sampler)
    enqueue_baselines(study, space)
    study.optimize(objective, n_trials=TRIALS)
    builders = study.trials[: len(space.baselines())]
    return min(trial.value for trial in builders if trial.value is not None), study.best_value


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {
        "autosync": AutoSyncSampler(space, seed=0),
        "tpe": optuna.samplers.TPESampler(seed=0),
        "random": optuna.samplers.RandomSampler(seed=0),
    }
    for name, sampler in samplers.items():
        builder, best = best_of(sampler)
        print(f"{name}: {best:.4f} s a step; speedup over the fastest builder: {builder / best:.3f}")

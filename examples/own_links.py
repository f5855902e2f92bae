"""A model of your own on links of your own: from a probe to a plan that a job is pinned to.

``python examples/own_links.py`` runs all cells. VS Code, Spyder and Jupyter (with jupytext) open this file as a
notebook. As root, it emulates the links on this machine.
"""

# %% [markdown]
# # From a probe to a pinned plan
#
# The model is the CNN of `digits.py`. It stands in a file of its own, because worker processes import it by its name.
# Three nodes have links of 100 Mbit/s and one has 400. Each cell names the command that does the same.

# %%
from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch
from digits import Digits
from rich.console import Console
from where import launch

from lightning_autosync import ClusterSpec
from lightning_autosync.cli.probe import run_probe
from lightning_autosync.measure.bench.output import remarks, result_table
from lightning_autosync.measure.bench.run import run_bench
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.probe.settings import ProbeSettings
from lightning_autosync.search.selection import rank_plans
from lightning_autosync.training.job import run_job
from lightning_autosync.training.settings import TrainingSettings
from lightning_autosync.workload import describe

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
console = Console(width=110)
folder = Path(tempfile.mkdtemp(prefix="autosync-own-links-"))
links = ClusterSpec.star(bandwidths=["400 Mbit/s", "100 Mbit/s", "100 Mbit/s", "100 Mbit/s"], name="mine")
where = {"launch": {"kind": launch()}, "cluster": links.to_dict()}
model = {"_target_": "digits.Digits"}
data = {"_target_": "digits.DigitsData"}

# %% [markdown]
# ## 1. Measure the links
#
# `autosync probe launch=emulated cluster=links.yaml`. On real nodes: `launch=ssh`, or torchrun
# ([how](../docs/clusters.md#measure-a-cluster)). Loopback has no links of its own, so there the description is taken.

# %%
cluster = links
if where["launch"]["kind"] == "emulated":
    short = {"constants": False, "every_pair": False, "head": 0.1, "window": 0.2}
    cluster = ClusterSpec.from_dict(run_probe(ProbeSettings.parse({**where, **short}))["cluster"])
cluster.save(folder / "cluster.yaml")
for link in cluster.links:
    print(f"{link.a} - {link.b}: {8e-6 * link.bandwidth:.0f} Mbit/s")

# %% [markdown]
# ## 2. Rank plans by prediction
#
# This is what a job does that has no plan. `autosync tune` also tries plans on the links
# ([how](../docs/tuning.md#by-live-trials-before-a-job)).

# %%
plans = rank_plans(describe(Digits()), cluster, seconds=3.0)
for plan in plans:
    print(f"{1e3 * plan.seconds:6.1f} ms of synchronization, {plan.origin}")
best = folder / "plan.yaml"
plans[0].plan.save(best)
print(plans[0].plan.describe(describe(Digits())))

# %% [markdown]
# ## 3. Measure the plan beside DDP
#
# `autosync bench launch=emulated cluster=links.yaml model=imported model._target_=digits.Digits
# +model.data._target_=digits.DigitsData +contenders.best.plan=plan.yaml`. Contenders take turns.

# %%
result = run_bench(
    BenchSettings.parse(
        {
            **where,
            "model": {**model, "data": data},
            "ddp": {"bucket_cap_mb": ["default", 1]},
            "contenders": {"best": {"plan": str(best)}},
            "warm_up": 2,
            "rounds": 5,
            "steps": 3,
        }
    )
)
console.print(result_table(result))
for line in remarks(result):
    console.print(line, highlight=False)
speedup = result.speedup("best")
print(f"speedup over the best DDP {speedup.median:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]")

# %% [markdown]
# ## 4. Train with the pinned plan
#
# `autosync train launch=emulated cluster=links.yaml model=imported model._target_=digits.Digits data=imported
# data._target_=digits.DigitsData sync.plan=plan.yaml`. In a script of yours:
# `Trainer(strategy=AutoSyncStrategy(plan="plan.yaml", cluster="cluster.yaml"))`.

# %%
trainer = {
    "max_epochs": 6,
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
settings = {**where, "model": model, "data": data, "sync": {"plan": str(best)}, "trainer": trainer}
training = run_job(TrainingSettings.parse(settings), folder)
assert training is not None
print(f"{training.steps} steps, validation accuracy {training.metrics['val_accuracy']:.3f}")
print(f"cluster.yaml, plan.yaml and result.json are in {folder}")

"""Split operators: from the search for a plan to a step that is checked.

``python examples/hybrid_search.py`` runs all cells. VS Code, Spyder and Jupyter (with jupytext) open this file as a
notebook. As root, it emulates the links on this machine.
"""

# %% [markdown]
# # From a search to a checked step
#
# The network `WideDigits` of `digits.py` has 9 MB of weights, and small activations. On links of 400 Mbit/s, its
# gradients take longer than all else. So it can pay to split its layers over two nodes.

# %%
from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import digits
import torch
from rich.console import Console
from where import launch

from lightning_autosync import ClusterSpec
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.search import search
from lightning_autosync.measure.bench.output import EXACT, remarks, result_table
from lightning_autosync.measure.bench.run import run_bench
from lightning_autosync.measure.bench.settings import BenchSettings

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
console = Console(width=110)
folder = Path(tempfile.mkdtemp(prefix="autosync-hybrid-"))
links = ClusterSpec.uniform(nodes=2, bandwidth="400 Mbit/s", name="two")

# %% [markdown]
# ## 1. Capture the operators of a batch, and search
#
# Nothing is computed: the batch gives shapes only. The search tries all meshes of two ranks by prediction. Rates of the
# hosts have defaults; `autosync tune parallel=hybrid` measures them ([how](../docs/hybrid.md#a-worked-example)).

# %%
images, _ = next(iter(digits.loaders()[0]))
found = search(capture(digits.WideDigits(), images), links)
print(f"data parallel: {1e3 * found.data_parallel.step_seconds:.1f} ms predicted")
print(f"the best plan: {1e3 * found.best.step_seconds:.1f} ms predicted")
print(found.best.plan.describe())
plan = folder / "plan.yaml"
found.best.plan.save(plan)

# %% [markdown]
# ## 2. Check a step, and measure
#
# Before the first round, a bench compares the gradients of each contender with those of DDP. Then they take turns.

# %%
result = run_bench(
    BenchSettings.parse(
        {
            "launch": {"kind": launch()},
            "cluster": links.to_dict(),
            "model": {"_target_": "digits.WideDigits", "data": {"_target_": "digits.DigitsData"}},
            "ddp": {"bucket_cap_mb": ["default", 1]},
            "contenders": {"split": {"plan": str(plan)}},
            "warm_up": 2,
            "rounds": 5,
            "steps": 3,
        }
    )
)
console.print(result_table(result))
for line in remarks(result):
    console.print(line, highlight=False)
deviation = result.measurements["split"].deviation
assert deviation < EXACT, deviation
print(f"gradients of the split step differ from DDP's by {deviation:.1e} of their norm")
print(f"speedup over the best DDP {result.speedup('split').median:.2f}")

# %% [markdown]
# ## 3. Train with the plan
#
# Lightning starts a script for this strategy once more for each rank, so the training stands in a script of its own.
# The strategy compares one step of the split model with the unsplit one before it trains.

# %%
script = Path(digits.__file__).with_name("split_operators.py")
subprocess.run([sys.executable, str(script), str(plan)], check=True)

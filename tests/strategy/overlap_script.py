"""A script that ends with a step, while rank 0 is late: ``python overlap_script.py RESULT``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_autosync import AutoSyncFabricStrategy
from lightning_autosync.cluster import ClusterSpec

torch.set_num_threads(1)
PAIR = ClusterSpec.uniform(2, bandwidth=1e9)


def main() -> None:
    strategy = AutoSyncFabricStrategy(
        plan="packed_trees", cluster=PAIR, overlap="step", bucket_cap_mb=1e-4, timeout=20.0
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(3):
        if step == 2 and fabric.global_rank == 0:
            time.sleep(2.0)
        fabric.backward(model(torch.ones(1, 4) + fabric.global_rank).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    if fabric.global_rank == 0:
        sums = [float(tensor.double().sum()) for tensor in module.state_dict().values()]
        Path(sys.argv[1]).write_text(json.dumps(sums))


if __name__ == "__main__":
    main()

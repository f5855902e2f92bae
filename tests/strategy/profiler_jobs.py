"""A job of two ranks under PyTorch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import torch.distributed as dist
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerActivity, _ExperimentalConfig

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.cluster import ClusterSpec


def ranges(folder: str, builder: str, all_threads: bool) -> dict[str, list[str]]:
    """What rank 0's trace shows of AutoSync: names of ranges by thread, which is "main" or "other"."""
    own = Path(folder) / f"rank{dist.get_rank()}"
    profiler = PyTorchProfiler(
        dirpath=own,
        filename="trace",
        activities=[ProfilerActivity.CPU],
        experimental_config=_ExperimentalConfig(profile_all_threads=all_threads),
    )
    strategy = AutoSyncStrategy(plan=builder, cluster=ClusterSpec.uniform(2))
    jobs.fit("Plain", strategy, max_epochs=1, limit_train_batches=6, profiler=profiler)
    return _ranges(own)


def _ranges(folder: Path) -> dict[str, list[str]]:
    traces = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    events: list[dict[str, Any]] = [each for one in traces for each in one["traceEvents"] if each["ph"] == "X"]
    ours = [each for each in events if each["name"].startswith("autosync/")]
    main = {each["tid"] for each in ours if each["name"].endswith("/wait")}
    found: dict[str, set[str]] = {"main": set(), "other": set()}
    for each in ours:
        found["main" if each["tid"] in main else "other"].add(each["name"])
    return {thread: sorted(names) for thread, names in found.items()}

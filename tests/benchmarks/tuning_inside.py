"""Jobs that tune themselves on emulated links, without a cluster file, beside DDP; needs root.

    python -m tests.benchmarks.tuning_inside [STEPS] [CLUSTER:MODEL ...]

Every job is an ``autosync train`` of its own. DDP's job runs with gradients as views of buckets, before and after. The
table has, for each pair: median seconds of DDP's step; the same of AutoSync after tuning and DDP's divided by it; the
time of all of AutoSync's steps divided by that of as many steps of DDP; its seconds before the first step beyond DDP's;
steps that exceed 1.5 times the final median by trials or preparations of them; and what tuning said.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PAIRS = (
    "fat_node_star:vgg_like",
    "four_equal:vgg_like",
    "two_racks_8to1:resnet_like",
    "ring_of_four:resnet_like",
    "four_racks_of_two:bert_like",
)
DDP = ("sync.strategy=ddp", "+sync.arguments.gradient_as_bucket_view=true")
OURS = ("+sync.arguments.cluster=auto", "+sync.arguments.tuning.cache=null")


def train(pair: str, steps: int, *options: str) -> tuple[dict[str, Any], str]:
    """The result of one job, and the line in which it tells of its tuning."""
    cluster, model = pair.split(":")
    with tempfile.TemporaryDirectory() as folder:
        command = ["autosync", "train", "launch=emulated", f"cluster={cluster}", f"model={model}", *options]
        command += [f"+trainer.max_steps={steps}", "trainer.max_epochs=-1", f"hydra.run.dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("AutoSync: ")]
    return result, told[-1].removeprefix("AutoSync: ") if told else ""


def step_seconds(result: dict[str, Any]) -> list[float]:
    """Seconds of each step, of the rank for which it took the least: others may have loaded data longer."""
    return [min(step) for step in zip(*result["step_seconds_by_rank"], strict=True)]


def measure(pair: str, steps: int) -> dict[str, Any]:
    before, _ = train(pair, max(20, steps // 10), *DDP)
    ours, told = train(pair, steps, *OURS)
    after, _ = train(pair, max(20, steps // 10), *DDP)
    ddp = [each for result in (before, after) for each in step_seconds(result)[1:]]
    own = step_seconds(ours)[1:]
    ddp_step, final = statistics.median(ddp), statistics.median(own[-steps // 4 :])
    started = [result["seconds"] - sum(step_seconds(result)[1:]) for result in (ours, before, after)]
    return {
        "pair": pair,
        "ddp": ddp_step,
        "final": final,
        "speedup": ddp_step / final,
        "all": sum(own) / (len(own) * ddp_step),
        "start": started[0] - statistics.mean(started[1:]),
        "slow": sum(each > 1.5 * final for each in own),
        "worst": max(own) / final,
        "told": told,
    }


def main(steps: int = 300, *pairs: str) -> None:
    table = Table(title=f"{steps} steps without a cluster file")
    for heading in ("cluster:model", "DDP ms", "ours ms", "speedup", "all steps / DDP's", "start s", "slow", "worst"):
        table.add_column(heading)
    for pair in pairs or PAIRS:
        found = measure(pair, steps)
        table.add_row(
            pair,
            f"{1e3 * found['ddp']:.0f}",
            f"{1e3 * found['final']:.0f}",
            f"{found['speedup']:.2f}",
            f"{found['all']:.3f}",
            f"{found['start']:.1f}",
            str(found["slow"]),
            f"{found['worst']:.2f}",
        )
        print(json.dumps(found), flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:2]), *sys.argv[2:])

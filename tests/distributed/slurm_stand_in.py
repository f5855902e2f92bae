"""Stands for sbatch, srun, sacct and scancel, by the name under which it is called: a cluster that is this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

JOB = "4242"


def sbatch() -> None:
    """Keep the batch script, start it, and tell the job's number."""
    path = Path(sys.argv[-1])
    text = path.read_text()
    Path(os.environ["STAND_IN_SCRIPT"]).write_text(text)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.M))
    nodes, tasks = options["nodes"], options["ntasks-per-node"]
    variables = {
        "SLURM_JOB_ID": JOB, "SLURM_JOB_NAME": options["job-name"], "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": str(int(nodes) * int(tasks)), "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NODELIST": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    if "STAND_IN_IDLE" not in os.environ:
        run(path, variables)
    print(f"Submitted batch job {JOB}")


def run(path: Path, variables: dict[str, str]) -> None:
    with open(os.environ["STAND_IN_SCRIPT"] + ".log", "wb") as log:
        subprocess.Popen(
            ["bash", str(path)], env={**os.environ, **variables}, stdout=log, stderr=log, start_new_session=True
        )


def srun() -> None:
    """Run the command once a task; if one fails, end the others."""
    words = sys.argv[1:]
    start = next(place for place, word in enumerate(words) if "python" in os.path.basename(word))
    assert "--kill-on-bad-exit=1" in words[:start]
    output = words[words.index("--output") + 1].replace("%j", JOB)
    per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
    count = os.environ["SLURM_NTASKS"]
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": count}
    tasks = []
    for rank in range(int(count)):
        place = {"SLURM_NODEID": str(rank // per_node), "SLURM_LOCALID": str(rank % per_node)}
        with open(output.replace("%t", str(rank)), "wb") as log:
            variables = {**os.environ, **step, **place, "SLURM_PROCID": str(rank)}
            tasks.append(subprocess.Popen(words[start:], env=variables, stdout=log, stderr=log))
    while tasks:
        number, status = os.wait()
        tasks = [task for task in tasks if task.pid != number]
        if status:
            for task in tasks:
                task.kill()


def sacct() -> None:
    """Tell that the job runs; who asks in order to wait for it may get a signal."""
    if "STAND_IN_SIGNAL" in os.environ:
        os.kill(os.getppid(), signal.Signals[os.environ["STAND_IN_SIGNAL"]])
    print(f"JobID|State|NodeList\n{JOB}|RUNNING|here")


def scancel() -> None:
    """Keep which job it was, or refuse."""
    if "STAND_IN_REFUSAL" in os.environ:
        sys.exit(1)
    Path(os.environ["STAND_IN_SCRIPT"] + ".cancelled").write_text(" ".join(sys.argv[1:]))


def main() -> None:
    globals()[Path(sys.argv[0]).name]()


if __name__ == "__main__":
    main()

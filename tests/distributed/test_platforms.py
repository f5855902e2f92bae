"""The example files for Kubeflow Trainer and SkyPilot, and their commands in the environment that these set."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import free_port

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
TRAINER = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
"""Fields of ``spec.trainer`` in ``trainer.kubeflow.org/v1alpha1``."""
TASK = {"name", "num_nodes", "workdir", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
"""Fields of a task of SkyPilot that an example may have."""


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((LAUNCH / name).read_text())
    return loaded


def test_the_job_of_kubeflow_is_one_of_its_trainer() -> None:
    job = load("kubeflow.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert set(job["spec"]) == {"runtimeRef", "trainer"}
    trainer = job["spec"]["trainer"]
    assert set(trainer) <= TRAINER
    assert all(isinstance(trainer[name], int) for name in ("numNodes", "numProcPerNode"))
    assert all(isinstance(each["value"], str) and not each["name"].startswith("PET_") for each in trainer["env"])
    assert (ROOT / trainer["command"][-1]).is_file()


def test_the_task_of_skypilot_has_its_fields() -> None:
    task = load("sky.yaml")
    assert set(task) <= TASK
    assert set(task["resources"]) <= {"cpus", "memory", "accelerators", "infra", "use_spot", "ports"}
    assert set(re.findall(r"\$(SKYPILOT_\w+)", task["run"])) == {
        "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS",
    }  # fmt: skip
    assert (ROOT / task["run"].split()[-1]).is_file()


def run_nodes(folder: Path, command: list[str], common: Mapping[str, str], rank_variable: str) -> None:
    """Run a command as two nodes would; the training must come to its end with two ranks."""
    torchrun = folder / "torchrun"  # of this interpreter
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.endswith("RANK")}
    path = f"{folder}:{os.environ['PATH']}"
    nodes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**outside, "PYTHONPATH": str(ROOT), **common, "PATH": path, "HOME": str(folder), rank_variable: rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        said = [node.communicate(timeout=600)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    accuracy = re.search(r"^2 ranks, validation accuracy (0\.\d+)$", said[0], re.MULTILINE)
    assert accuracy is not None, said
    assert float(accuracy[1]) > 0.8


@pytest.mark.slow
def test_the_command_runs_as_in_pods_of_kubeflow(tmp_path: Path) -> None:
    trainer = load("kubeflow.yaml")["spec"]["trainer"]
    variables = {
        **{each["name"]: each["value"] for each in trainer["env"]},
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    }
    run_nodes(tmp_path, trainer["command"], variables, "PET_NODE_RANK")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="SkyPilot runs bash")
def test_the_command_runs_as_on_nodes_of_skypilot(tmp_path: Path) -> None:
    task = load("sky.yaml")
    variables = {
        **task["envs"],
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    }
    command = task["run"].replace("--master-port=29500", f"--master-port={free_port()}")
    run_nodes(tmp_path, ["bash", "-c", command], variables, "SKYPILOT_NODE_RANK")

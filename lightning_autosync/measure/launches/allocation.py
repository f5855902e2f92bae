"""Workers on the nodes of a SLURM allocation, each of them a job step that srun starts.

The allocation is that of the job in which this process runs, or one that salloc requests and that ends with this
process.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.launches.launch import StartedCommand, is_slurm_task
from lightning_autosync.measure.workers.process import OutputTail

_log = logging.getLogger(__name__)
_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")
_HOLD = f'echo "{" ".join(f"${name}" for name in _VARIABLES)}"; exec cat >/dev/null'
"""Command of an allocation that is requested: tells what was allocated, and ends with the pipe from this process."""
_RELEASE = 15.0
"""Seconds in which salloc must give an allocation back, and again after SIGTERM, before it is killed."""
_NAMED = {"name": "job-name", "timeout_min": "time", "gpus_per_node": "gpus-per-node", "cpus_per_task": "cpus-per-task"}
"""Options of salloc by submitit's names of parameters; the others of submitit begin with ``slurm_``."""
_SHAPE = ("nodes", "tasks_per_node")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_CLIENT_VARIABLES = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")
"""Variables by which commands of SLURM find and enter the cluster. Others would set options of srun."""


@dataclass(frozen=True)
class Allocation:
    """Nodes that SLURM gave to a job.

    Attributes:
        job: id of the job.
        tasks: number of tasks on each node, by host name, in SLURM's order.
    """

    job: str
    tasks: Mapping[str, int]

    @classmethod
    def read(cls, job: str, nodes: str, tasks: str) -> Allocation:
        """The allocation as SLURM's variables describe it.

        Args:
            nodes: list of nodes, as in ``rack[1-2],big``.
            tasks: numbers of tasks of these nodes, as in ``4(x2),1``.
        """
        hosts = _output(["scontrol", "show", "hostnames", nodes]).split()
        counts = [int(count) for count, times in _COUNT.findall(tasks) for _ in range(int(times or 1))]
        if len(hosts) != len(counts):
            raise LaunchError(
                f"launch=slurm: SLURM names {len(hosts)} nodes ('{nodes}'), and tasks for {len(counts)} ('{tasks}'); "
                "start the subcommand in the batch script, without srun"
            )
        return cls(job, dict(zip(hosts, counts, strict=True)))


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"launch=slurm: {' '.join(command)}: {error.stderr.strip()}") from None


@contextmanager
def open_allocation(shape: tuple[int, int] | None, parameters: Mapping[str, Any]) -> Iterator[Allocation]:
    """This process's allocation, or one that is requested for the block.

    Args:
        shape: numbers of nodes and of tasks per node to request; None takes them from ``parameters``.
        parameters: ``nodes``, ``tasks_per_node`` and options of the request, by submitit's names.

    Raises:
        LaunchError: SLURM is missing or refuses the request, or srun started this process as one of several tasks.
        DocumentError: a parameter is unknown or missing.
    """
    if is_slurm_task():
        raise LaunchError(
            "launch=slurm: srun started this subcommand several times, but it starts its workers itself; start it "
            "once, without srun, in the batch script"
        )
    for tool in ("srun", "scontrol"):
        require_tool(tool)
    described = [os.environ.get(name) for name in _VARIABLES]
    if all(described):
        if parameters:
            _log.warning("launch.parameters count only for a new job; this one is used: %s", ", ".join(parameters))
        yield Allocation.read(*map(str, described))
        return
    require_tool("salloc")
    with _requested(salloc_options(shape, parameters)) as allocation:
        yield allocation


def require_tool(tool: str) -> None:
    """Raise ``LaunchError`` unless a command of SLURM is installed."""
    if shutil.which(tool) is None:
        raise LaunchError(
            f"launch=slurm: '{tool}' is not installed; run this on a machine from which SLURM jobs are submitted"
        )


def salloc_options(shape: tuple[int, int] | None, parameters: Mapping[str, Any]) -> list[str]:
    """The options of salloc for a shape and parameters; see `open_allocation`, whose errors this raises too."""
    given = dict(parameters)
    wanted = [given.pop(name, None) for name in _SHAPE]
    nodes, tasks = shape or (wanted[0], wanted[1] or 1)
    if nodes is None:
        raise DocumentError(
            "launch.parameters.nodes: missing; outside a SLURM job set +launch.parameters.nodes=N "
            "+launch.parameters.tasks_per_node=M"
        )
    options = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    for name, value in {"name": "autosync", **given}.items():
        option = _NAMED.get(name) or name.removeprefix("slurm_").replace("_", "-")
        if (name not in _NAMED and not name.startswith("slurm_")) or isinstance(value, list | dict):
            raise DocumentError(
                f"launch.parameters.{name}: not an option of salloc; allowed: {', '.join((*_SHAPE, *_NAMED))}, and "
                "slurm_OPTION with a text, a number or true, as in slurm_partition=gpu"
            )
        if value is not False:
            options.append(f"--{option}" if value is True else f"--{option}={value}")
    return options


@contextmanager
def _requested(options: Sequence[str]) -> Iterator[Allocation]:
    """An allocation that salloc holds while the block runs. What salloc says goes to stderr."""
    process = subprocess.Popen(
        ["salloc", *options, "sh", "-c", _HOLD],
        env=_client_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C must not end it before the workers
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said = OutputTail(process.stderr, echo=True)
    try:
        try:
            described = _granted(process.stdout, said)
        except BaseException:
            process.terminate()  # withdraws a request that waits
            raise
        yield Allocation.read(*described)
    finally:
        process.stdin.close()  # ends the command, and gives the allocation back
        _wait_or_end(process)
        process.stdout.close()


def _wait_or_end(process: subprocess.Popen[bytes]) -> None:
    """Wait until salloc ends, but not for a SLURM that does not answer."""
    for end in (process.terminate, process.kill):
        try:
            process.wait(_RELEASE)
            return
        except subprocess.TimeoutExpired:
            end()
    process.wait()
    _log.warning("launch=slurm: salloc did not end in %g s; see in squeue whether its job has ended", 2 * _RELEASE)


def _granted(stdout: IO[bytes], said: OutputTail) -> list[str]:
    """What `_HOLD` tells once the allocation is there."""
    line = stdout.readline().decode().split()
    if len(line) != len(_VARIABLES):
        said.finish(1.0)
        raise LaunchError(f"launch=slurm: salloc: {' '.join(said.text().split())}")
    return line


def _client_environment() -> dict[str, str]:
    """This process's environment without variables that would change the options of SLURM's commands."""
    kept = _CLIENT_VARIABLES
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in kept}


class SlurmLaunch:
    """One process per task on every node of an allocation, each started by an srun of its own.

    Orders, answers and output travel through srun. A worker ends when its orders end, and srun passes SIGTERM on to it;
    but an srun that is killed leaves its worker behind.

    Args:
        allocation: the nodes.
        cluster: the cluster of the job. Its nodes run on hosts of the allocation with the same names; if no host has
            the name of a node, in the order of the allocation. None runs as many ranks on each host as it has tasks.

    Raises:
        LaunchError: the allocation has no host for a node.
    """

    parting = 5.0
    relays: Sequence[int] = ()

    def __init__(self, allocation: Allocation, cluster: ClusterSpec | None = None) -> None:
        self._job = allocation.job
        if cluster is None:
            self._hosts = list(allocation.tasks)
            self._nodes = [node for node, tasks in enumerate(allocation.tasks.values()) for _ in range(tasks)]
        else:
            self._hosts = _hosts_of(cluster, list(allocation.tasks))
            self._nodes = list(cluster.rank_nodes)

    @property
    def world_size(self) -> int:
        return len(self._nodes)

    @property
    def address(self) -> str:
        return self._hosts[self._nodes[0]]

    def command(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> StartedCommand:
        srun = [
            "srun",
            f"--jobid={self._job}",
            f"--nodelist={self._hosts[self._nodes[rank]]}",
            "--nodes=1",
            "--ntasks=1",
            "--overlap",  # each step may use all that the job has on its node, as processes of a single step would
            "--cpu-bind=none",
            "--quiet",
        ]
        return [*srun, *command], {**_client_environment(), **variables}

    def environment(self, rank: int) -> dict[str, str]:
        node = self._nodes[rank]
        return {"LOCAL_RANK": str(self._nodes[:rank].count(node)), "GROUP_RANK": str(node)}


def _hosts_of(cluster: ClusterSpec, hosts: list[str]) -> list[str]:
    """The host of each node of a cluster."""
    names = [node.name for node in cluster.nodes]
    missing = [name for name in names if name not in hosts]
    where = f"the SLURM job has {', '.join(hosts)}"
    if len(missing) < len(names):
        if missing:
            raise LaunchError(
                f"launch=slurm: cluster '{cluster.name}' has node {missing[0]}, but {where}; request these nodes: "
                f"+launch.parameters.slurm_nodelist='{','.join(names)}'"
            )
        return names
    if len(hosts) < len(names):
        raise LaunchError(f"launch=slurm: cluster '{cluster.name}' has {len(names)} nodes, but {where}")
    return hosts[: len(names)]

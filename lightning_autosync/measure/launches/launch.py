"""Launches: where the processes of a pool run, on this machine or over ssh; and checks for torchrun and SLURM jobs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import ClusterError
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.ports import ADDRESSES, VARIABLE

StartedCommand = tuple[list[str], dict[str, str]]
"""A command and its environment."""


class Launch(Protocol):
    """Where workers run: how to start one there, and how ranks find each other.

    Attributes:
        address: address at which other ranks reach rank 0.
        world_size: required number of ranks; None for any number.
        parting: seconds in which a command must end after SIGTERM, because it has a worker elsewhere to end. 0 if
            workers end with their commands however these end, so that they are killed at once.
        relays: process ids on this machine of processes that carry the workers' traffic.
    """

    @property
    def address(self) -> str: ...

    @property
    def world_size(self) -> int | None: ...

    @property
    def parting(self) -> float: ...

    @property
    def relays(self) -> Sequence[int]: ...

    def command(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> StartedCommand:
        """The command and the environment to use on this machine, so that ``command`` runs where ``rank`` runs.

        ``variables`` are added to the environment there. Standard streams are passed on. No shell or other process
        stays in between, so that ending the local process ends the worker.
        """
        ...

    def environment(self, rank: int) -> dict[str, str]:
        """Environment variables of ``rank``: gloo's interface, local rank, node rank."""
        ...


class LocalLaunch:
    """All ranks run on this machine and communicate over the loopback interface.

    Args:
        interfaces: number of network interfaces of a node of the cluster, in whose place the loopback interface is.
    """

    address = "127.0.0.1"
    world_size = None
    parting = 0.0
    relays: Sequence[int] = ()

    def __init__(self, interfaces: int = 1) -> None:
        self._addresses = ",".join([self.address] * interfaces)

    def command(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> StartedCommand:
        return list(command), {**os.environ, **variables}

    def environment(self, rank: int) -> dict[str, str]:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return {
            "GLOO_SOCKET_IFNAME": loopback,
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            ADDRESSES: self._addresses,
        }


SSH = ("ssh", "-o", "BatchMode=yes")
"""Batch mode never asks for a password, since nobody would see the prompt."""


class SshLaunch:
    """One process per device on every node of a cluster, started over ssh connections to the nodes' addresses.

    Orders, answers and output travel over these connections. A worker ends with its connection, so ending the local
    ssh processes, or this process, ends all workers.

    Args:
        cluster: cluster whose nodes have addresses; ranks reach rank 0 at the address of its node.
        command: command that starts a process on a node; a node's address and a shell line are appended to it.
        python: interpreter on the nodes that has this package; None uses this process's path and import path.
        directory: working directory on the nodes; None uses this process's.
        interface: gloo's network interface on the nodes; None lets gloo choose.

    Raises:
        ClusterError: a node has no address.
        LaunchError: the command is not installed.
    """

    parting = 0.0
    relays: Sequence[int] = ()

    def __init__(
        self,
        cluster: ClusterSpec,
        command: Sequence[str] = SSH,
        python: str | None = None,
        directory: str | None = None,
        interface: str | None = None,
    ) -> None:
        if shutil.which(command[0]) is None:
            raise LaunchError(
                f"launch=ssh: the command '{command[0]}' is not installed; install it (package openssh-client), or "
                "set another command that starts processes on nodes: launch.command=[COMMAND,...]"
            )
        self.cluster = cluster
        self._command = list(command)
        self._python = python
        self._directory = directory or os.getcwd()
        self._interface = interface
        self._addresses = _addresses(cluster)

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    @property
    def address(self) -> str:
        return self._addresses[self.cluster.rank_nodes[0]]

    def command(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> StartedCommand:
        if self._python is not None:
            command = [self._python, *command[1:]]
            variables = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
        assignments = [f"{name}={value}" for name, value in sorted(variables.items())]
        address = self._addresses[self.cluster.rank_nodes[rank]]
        why = (
            f"launch=ssh: {address}: there is no directory {self._directory}; set one that exists there: "
            "launch.directory=DIR"
        )
        script = (
            f"cd {shlex.quote(self._directory)} || {{ echo {shlex.quote(why)} >&2; exit 1; }}; "
            f"exec {shlex.join(['env', *assignments, *command])}"
        )
        # The user's login shell on the node may be any, and some have another syntax for `||` and `>&2`. So run sh.
        return [*self._command, address, f"exec sh -c {shlex.quote(script)}"], dict(os.environ)

    def environment(self, rank: int) -> dict[str, str]:
        node = self.cluster.rank_nodes[rank]
        variables = {"LOCAL_RANK": str(self.cluster.ranks_of(node).index(rank)), "GROUP_RANK": str(node)}
        if VARIABLE in os.environ:  # which ssh does not pass on
            variables[VARIABLE] = os.environ[VARIABLE]
        return variables if self._interface is None else {**variables, "GLOO_SOCKET_IFNAME": self._interface}


def _addresses(cluster: ClusterSpec) -> list[str]:
    addresses = [node.address for node in cluster.nodes if node.address is not None]
    if len(addresses) < len(cluster.nodes):
        missing = ", ".join(f"nodes[{place}]" for place, node in enumerate(cluster.nodes) if node.address is None)
        raise ClusterError(
            f"cluster '{cluster.name}': {missing}: address: missing; launch=ssh needs an address for every node"
        )
    return addresses


_SPECIAL_STEPS = 0xFFFFFFF0
"""From this number on, SLURM's step ids denote steps that srun did not start: batch scripts, allocations, daemons."""


def require_torchrun(verb: str) -> None:
    """Raise ``LaunchError`` unless torchrun started this process."""
    from torch.distributed import is_torchelastic_launched

    if not is_torchelastic_launched():
        raise LaunchError(
            "launch=torchrun: this process does not belong to a torchrun job; start it on every node with `torchrun "
            f"--nnodes N ... --no-python autosync {verb} launch=torchrun`"
        )


def refuse_within_torchrun(launch: str) -> None:
    """Raise ``LaunchError`` if torchrun started this process, since each of its ranks would start its own job."""
    from torch.distributed import is_torchelastic_launched

    if is_torchelastic_launched():
        raise LaunchError(f"launch={launch}: this process already belongs to a torchrun job; use launch=torchrun")


def is_slurm_task() -> bool:
    """Whether srun started this process as one of several.

    A batch script is not a task, but its environment also has the job's number of tasks and a task id. Only its step id
    tells: it is missing, a name, or a number from `_SPECIAL_STEPS` on.
    """
    step = os.environ.get("SLURM_STEP_ID", "batch")
    by_srun = step.isdecimal() and int(step) < _SPECIAL_STEPS
    return by_srun and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1

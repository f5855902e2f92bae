"""Where the processes of a pool run: on this machine, over ssh, or in a job that is there already."""

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


class Launch(Protocol):
    """A place for workers: how to start one there, and how the ranks find each other.

    Attributes:
        address: the address at which the other ranks reach rank 0.
        world_size: the number of ranks that the place is made for; None if it takes any.
    """

    @property
    def address(self) -> str: ...

    @property
    def world_size(self) -> int | None: ...

    def command(
        self, rank: int, command: Sequence[str], variables: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """What to run on this machine so that ``command`` runs in the place of ``rank``, and with what environment.

        There ``variables`` are added to the environment, standard input and outputs are passed on, and no shell
        or other process is left between, so that ending the one ends the other.
        """
        ...

    def environment(self, rank: int) -> dict[str, str]:
        """Environment variables of ``rank`` there: gloo's interface, local rank, node rank."""
        ...


class LocalLaunch:
    """All ranks on this machine, talking over the loopback interface."""

    address = "127.0.0.1"
    world_size = None

    def command(
        self, rank: int, command: Sequence[str], variables: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        return list(command), {**os.environ, **variables}

    def environment(self, rank: int) -> dict[str, str]:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return {"GLOO_SOCKET_IFNAME": loopback, "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}


SSH = ("ssh", "-o", "BatchMode=yes")
"""Never asks for a password, for nobody would see the question."""


class SshLaunch:
    """One process a device on every node of a cluster, started over connections to the nodes' addresses.

    Orders, answers and output travel over these connections. A worker ends when its connection does, so that
    ending the local ends of them, or this process, ends everything.

    Args:
        cluster: its nodes have addresses; rank 0 is reached at its node's.
        command: started with a node's address and one line for a shell there as its last two arguments.
        python: the interpreter on the nodes, with this package; None is this process's path, and its import path.
        directory: the working directory there; None is this process's.
        interface: the network interface there for gloo; None leaves the choice to it.

    Raises:
        ClusterError: a node has no address.
        LaunchError: the command is not installed.
    """

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
                f"launch=ssh: the command '{command[0]}' is not installed; install it (openssh-client), or state "
                "another one that starts processes on nodes: launch.command=[COMMAND,...]"
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

    def command(
        self, rank: int, command: Sequence[str], variables: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        if self._python is not None:
            command = [self._python, *command[1:]]
            variables = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
        assignments = [f"{name}={value}" for name, value in sorted(variables.items())]
        address = self._addresses[self.cluster.rank_nodes[rank]]
        why = f"launch=ssh: {address}: there is no {self._directory}; state a directory there: launch.directory=DIR"
        script = (
            f"cd {shlex.quote(self._directory)} || {{ echo {shlex.quote(why)} >&2; exit 1; }}; "
            f"exec {shlex.join(['env', *assignments, *command])}"
        )
        # The user's shell there may be any, of which each has its own `||` and `>&2`.
        return [*self._command, address, f"exec sh -c {shlex.quote(script)}"], dict(os.environ)

    def environment(self, rank: int) -> dict[str, str]:
        node = self.cluster.rank_nodes[rank]
        variables = {"LOCAL_RANK": str(self.cluster.ranks_of(node).index(rank)), "GROUP_RANK": str(node)}
        return variables if self._interface is None else {**variables, "GLOO_SOCKET_IFNAME": self._interface}


def _addresses(cluster: ClusterSpec) -> list[str]:
    addresses = [node.address for node in cluster.nodes if node.address is not None]
    if len(addresses) < len(cluster.nodes):
        missing = ", ".join(f"nodes[{place}]" for place, node in enumerate(cluster.nodes) if node.address is None)
        raise ClusterError(
            f"cluster '{cluster.name}': {missing}: address: missing; launch=ssh reaches every node by its own"
        )
    return addresses


_SPECIAL_STEPS = 0xFFFFFFF0
"""From here on SLURM numbers what srun has not started: batch scripts, allocations, daemons' own."""


def require_torchrun(verb: str) -> None:
    """Raise ``LaunchError`` unless torchrun started this process."""
    from torch.distributed import is_torchelastic_launched

    if not is_torchelastic_launched():
        raise LaunchError(
            "launch=torchrun: this process is not one of a torchrun job; start it on every node as "
            f"`torchrun --nnodes N ... --no-python autosync {verb} launch=torchrun`"
        )


def refuse_within_torchrun(launch: str) -> None:
    """Raise ``LaunchError`` if torchrun started this process: each of its ranks would start a job of its own."""
    from torch.distributed import is_torchelastic_launched

    if is_torchelastic_launched():
        raise LaunchError(f"launch={launch}: this process is one of a torchrun job already; take launch=torchrun")


def is_slurm_task() -> bool:
    """Whether srun started this process as one of several.

    A batch script has the number of the job's tasks and a place among them, too, though it is none of them: of a step
    it has nothing, or what stands for no step of srun's, by name or as a number out of range.
    """
    step = os.environ.get("SLURM_STEP_ID", "batch")
    by_srun = step.isdecimal() and int(step) < _SPECIAL_STEPS
    return by_srun and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1

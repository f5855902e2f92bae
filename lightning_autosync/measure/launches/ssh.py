"""Ranks on the nodes of a cluster, each started by a command such as ssh."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import ClusterError
from lightning_autosync.measure.workers.errors import LaunchError

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

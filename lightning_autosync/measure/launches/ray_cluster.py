"""Workers on the nodes of a Ray cluster, each of them the child of an actor that Ray places there."""

from __future__ import annotations

import hmac
import ipaddress
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import needed_for
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.launches import relay
from lightning_autosync.measure.launches.launch import StartedCommand
from lightning_autosync.ports import VARIABLE, with_free_port

_PLACING = 60.0
"""Seconds in which Ray must start an actor, and then its relay must connect: each imports packages under load."""
_GREETING = 5.0
"""Seconds in which a connection must tell its key."""
_ENDING = 5.0
"""Seconds in which actors must end their workers before they are killed."""


class WorkerHost:
    """An actor: it starts one worker on its node, whose standard streams are connections of a `relay`."""

    _watch: threading.Thread | None = None

    def listen(self, key: str) -> tuple[str, int]:
        """Open a port for the relay that knows the key; returns the address."""
        import ray

        host = ray.util.get_node_ip_address()
        self._key = key.encode()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = with_free_port(lambda port: socket.create_server((host, port), family=family))
        return host, int(self._listener.getsockname()[1])

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> int:
        """Wait for the relay, and start the worker with this process's interpreter; returns the worker's process id.

        The relay is told why a worker did not start, or else how it ended.
        """
        with ExitStack() as opened:
            streams = self._streams(opened)
            talk, errors = (streams[role].fileno() for role in (relay.TALK, relay.ERRORS))
            program = [sys.executable, *command[1:]]
            environment = {**os.environ, **variables}
            try:
                self._worker = subprocess.Popen(
                    program, env=environment, stdin=talk, stdout=talk, stderr=errors, start_new_session=True
                )
            except (OSError, ValueError) as error:
                streams[relay.STATUS].sendall(f"{type(error).__name__}: {error}".encode())
                raise
            status = streams[relay.STATUS].dup()
        self._watch = threading.Thread(target=_report, args=(self._worker, status), daemon=True)
        self._watch.start()
        return self._worker.pid

    def end(self) -> None:
        """Kill the worker with its children."""
        if self._watch is not None and self._watch.is_alive():
            _kill_group(self._worker.pid)
            self._watch.join(_ENDING)

    def _streams(self, opened: ExitStack) -> dict[bytes, socket.socket]:
        """The relay's connections by role.

        Raises:
            TimeoutError: they did not come in time.
        """
        deadline = time.monotonic() + _PLACING
        opened.enter_context(self._listener)
        streams: dict[bytes, socket.socket] = {}
        while {relay.TALK, relay.ERRORS, relay.STATUS} - set(streams):
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            connection = opened.enter_context(self._listener.accept()[0])
            if role := self._role(connection, min(deadline, time.monotonic() + _GREETING)):
                relay.notice_loss(connection)
                streams[role] = connection
            else:
                connection.close()
        return streams

    def _role(self, connection: socket.socket, deadline: float) -> bytes:
        """The role of a connection of the relay; empty for a connection without the key."""
        told = b""
        try:
            while (missing := len(self._key) + 1 - len(told)) > 0:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                if not (chunk := connection.recv(missing)):
                    return b""
                told += chunk
        except OSError:
            return b""
        connection.settimeout(None)
        return told[-1:] if hmac.compare_digest(told[:-1], self._key) else b""


def _report(worker: subprocess.Popen[bytes], status: socket.socket) -> None:
    """Wait for the end of a worker, kill the children that it left behind, and send its exit status."""
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # its id stays reserved until `wait`
    _kill_group(worker.pid)
    with status, suppress(OSError):  # the relay has ended
        status.sendall(str(worker.wait()).encode())


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@dataclass(frozen=True)
class RayNode:
    """A node of a Ray cluster.

    Attributes:
        id: Ray's id of it.
        address: address of its host.
        host: name of its host.
        cpus: number of CPUs that Ray gives to actors there.
    """

    id: str
    address: str
    host: str
    cpus: float


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster while the block runs.

    Args:
        address: ``HOST:PORT`` of the cluster; None takes that of the variable ``RAY_ADDRESS``, or the cluster of which
            this machine is a node.

    Raises:
        MissingPackageError: Ray is not installed.
        LaunchError: the address has another form, no cluster answers there, or this process is connected to another.
    """
    with needed_for("launch=ray"):
        import ray
    if ray.is_initialized():
        used = ray.get_runtime_context().gcs_address
        if address and not _same(address, used):
            raise LaunchError(
                f"launch=ray: launch.address: got '{address}', but this process is connected to {used}; allowed: that "
                "address, or none"
            )
        yield ray
        return
    _check_address(address)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if ":" in (known := address or os.environ.get("RAY_ADDRESS", "")):
            host, _, port = known.rpartition(":")
            socket.create_connection(
                (host.strip("[]"), int(port)), _GREETING
            ).close()  # Ray itself would try for minutes
        ray.init(address or "auto", log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"launch=ray: no Ray cluster answers at {address or os.environ.get('RAY_ADDRESS') or 'this machine'} "
            f"({_cause(error)}); start one by `ray start --head`, or give launch.address=HOST:6379"
        ) from None
    try:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own ends the process before results are saved
        yield ray
    finally:
        ray.shutdown()


def _check_address(address: str | None) -> None:
    known, where = (address, "launch.address") if address else (os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS")
    if known and (address or known != "auto") and not re.fullmatch(r"([^\s:/]+|\[[\da-fA-F:.]+\]):\d+", known):
        raise LaunchError(f"launch=ray: {where}: got '{known}'; allowed: HOST:PORT of the cluster, as in 10.0.0.1:6379")


def _same(one: str, other: str) -> bool:
    """Whether two addresses ``HOST:PORT`` are the same."""

    def resolved(address: str) -> tuple[str, str]:
        host, _, port = address.rpartition(":")
        with suppress(OSError):
            host = socket.gethostbyname(host)
        return host, port

    return resolved(one) == resolved(other)


def _cause(error: Exception) -> str:
    """The cause of an error of Ray, in one line: of an exception in an actor the last line of its traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    return " ".join(lines[-1:] if any(line.startswith("File ") for line in lines) else lines).rstrip(".")


def live_nodes(ray: Any) -> list[RayNode]:
    """The live nodes of the cluster, in the order of their addresses."""
    found = [
        RayNode(one["NodeID"], one["NodeManagerAddress"], one["NodeManagerHostname"], one["Resources"].get("CPU", 0.0))
        for one in ray.nodes()
        if one["Alive"]
    ]
    return sorted(found, key=lambda node: (*_order(node.address), node.id))


def _order(address: str) -> tuple[int, int, str]:
    """Sorts 10.0.0.2 before 10.0.0.10, and host names last."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return 7, 0, address
    return known.version, int(known), ""


class RayLaunch:
    """One process per rank, each started by an actor on the rank's node.

    A small local process passes orders, answers and output on, over TCP. A worker ends with its connection, so ending
    the local processes, or this process, ends all workers.

    Args:
        ray: the module, connected to the cluster.
        cluster: the cluster of the job. Its nodes run on Ray's nodes with the same addresses or host names; if they
            have no addresses and Ray has none of their names, on Ray's nodes with enough CPUs, ordered by address.
        cpus: number of CPUs that Ray counts for each worker, below 1 or whole.

    Raises:
        LaunchError: Ray has too few nodes or CPUs, or one node for two of the cluster.
    """

    parting = 0.0
    relays: Sequence[int] = ()

    def __init__(self, ray: Any, cluster: ClusterSpec, cpus: float = 1.0) -> None:
        self._ray = ray
        self._cluster = cluster
        self._cpus = cpus
        self._hosts = hosts_of(cluster, live_nodes(ray), cpus)
        self._actors: list[Any] = []
        self._unused: dict[int, Any] = {}

    @property
    def world_size(self) -> int:
        return self._cluster.world_size

    @property
    def address(self) -> str:
        return self._hosts[self._cluster.rank_nodes[0]].address

    def command(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> StartedCommand:
        if rank not in self._unused:
            self._place_all(variables)  # at once, since each of Ray's processes takes seconds to start
        actor, node, key = self._unused.pop(rank), self._host(rank), secrets.token_hex(32)
        try:
            host, port = self._ray.get(actor.listen.remote(key), timeout=_PLACING)
        except self._ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"launch=ray: no worker started on node {node.host} ({node.address}) within {_PLACING:g} s; see in "
                f"`ray status` whether {self._cpus:g} CPUs are free there"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise LaunchError(
                f"launch=ray: no worker started on node {node.host} ({node.address}): {_cause(error)}"
            ) from None
        actor.start.remote(list(command), dict(variables))
        program = [sys.executable, str(Path(relay.__file__)), host, str(port)]
        return program, {**os.environ, relay.KEY: key}

    def environment(self, rank: int) -> dict[str, str]:
        node = self._cluster.rank_nodes[rank]
        made = {"LOCAL_RANK": str(self._cluster.rank_nodes[:rank].count(node)), "GROUP_RANK": str(node)}
        return made | {name: os.environ[name] for name in (VARIABLE,) if name in os.environ}

    def close(self) -> None:
        """End all actors, and with them their workers."""
        actors, self._actors = self._actors, []
        if actors:  # a worker leaves no children behind if its actor kills it
            self._ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=_ENDING)
        for actor in actors:
            self._ray.kill(actor)

    def _host(self, rank: int) -> RayNode:
        return self._hosts[self._cluster.rank_nodes[rank]]

    def _place_all(self, variables: Mapping[str, str]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.close()
        kept = {name: variables[name] for name in ("PYTHONPATH", VARIABLE) if name in variables}
        host = self._ray.remote(num_cpus=self._cpus, runtime_env={"env_vars": kept})(WorkerHost)
        for rank in range(self.world_size):
            place = NodeAffinitySchedulingStrategy(self._host(rank).id, soft=False)
            self._actors.append(host.options(scheduling_strategy=place).remote())
        self._unused = dict(enumerate(self._actors))


def hosts_of(cluster: ClusterSpec, nodes: Sequence[RayNode], cpus: float) -> list[RayNode]:
    """Ray's node for each node of a cluster; see `RayLaunch`."""
    known = {node.host: node for node in nodes} | {node.address: node for node in nodes}
    found = [known.get(node.address or node.name) or known.get(node.name) for node in cluster.nodes]
    where = f"Ray has {', '.join(f'{node.host} ({node.address})' for node in nodes)}"
    if any(found) or any(node.address for node in cluster.nodes):
        for node, match in zip(cluster.nodes, found, strict=True):
            if match is None:
                place = f" at {node.address}" if node.address else ""
                raise LaunchError(f"launch=ray: cluster '{cluster.name}' has node {node.name}{place}, but {where}")
        chosen = [host for host in found if host is not None]
        _refuse_shared(cluster, chosen)
    elif len(nodes) < len(cluster.nodes):
        raise LaunchError(f"launch=ray: cluster '{cluster.name}' has {len(cluster.nodes)} nodes, but {where}")
    else:
        chosen = _with_enough_cpus(cluster, nodes, cpus)
    for node, host in zip(cluster.nodes, chosen, strict=True):
        if node.devices * cpus > host.cpus:
            raise LaunchError(
                f"launch=ray: node {node.name} has {node.devices} ranks, but Ray has {host.cpus:g} CPUs on {host.host}"
                f"; allowed: {_allowed_cpus(host.cpus / node.devices)}"
            )
    return chosen


def _refuse_shared(cluster: ClusterSpec, chosen: Sequence[RayNode]) -> None:
    names: dict[str, str] = {}
    for node, host in zip(cluster.nodes, chosen, strict=True):
        other = names.setdefault(host.id, node.name)
        if other != node.name:
            raise LaunchError(
                f"launch=ray: nodes {other} and {node.name} of cluster '{cluster.name}' are both Ray's node "
                f"{host.host} ({host.address}); allowed: a node of Ray for each, or one node with all their devices"
            )


def _with_enough_cpus(cluster: ClusterSpec, nodes: Sequence[RayNode], cpus: float) -> list[RayNode]:
    """The first of Ray's nodes with enough CPUs for each node, or the largest left; nodes with most devices choose."""
    free = list(nodes)
    chosen: dict[int, RayNode] = {}
    for place in sorted(range(len(cluster.nodes)), key=lambda place: -cluster.nodes[place].devices):
        needed = cluster.nodes[place].devices * cpus
        chosen[place] = next((node for node in free if node.cpus >= needed), max(free, key=lambda node: node.cpus))
        free.remove(chosen[place])
    return [chosen[place] for place in range(len(cluster.nodes))]


def _allowed_cpus(most: float) -> str:
    """The values of ``launch.cpus`` up to a number: Ray counts ten-thousandths below 1, and whole CPUs above."""
    most = math.floor(most) if most >= 1 else math.floor(most * 10_000) / 10_000
    return f"launch.cpus up to {most:g}" if most else "a node to which Ray gives CPUs (`ray start --num-cpus=N`)"

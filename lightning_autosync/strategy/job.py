"""The mesh of a relaxed job (its ranks and the ``autosync serve`` processes of its plan), and how processes find it."""

from __future__ import annotations

import json
import os
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.connections import own_address
from lightning_autosync.engine.rendezvous import ask_store, find_store, open_store
from lightning_autosync.engine.secret import common_secret, required_secret, seal, unseal
from lightning_autosync.engine.waiting import explained
from lightning_autosync.errors import AutoSyncError, ExchangeError, PlanError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.strategy.resolution import Resolution
from lightning_autosync.strategy.settings import StrategySettings

STORE_PORT = "AUTOSYNC_PORT"
"""Environment variable: the port of rank 0 at which ``autosync serve`` and returning ranks find the job. If it is set,
all processes need the job's secret in their environment."""
_FROM_OUTSIDE = f"{STORE_PORT} is set, so processes may join the job from outside"
_RUNNING = "job/underway"

_trainings = count(1)
"""Numbers the trainings of this process. A script may train several times; a restarted rank begins with the first."""


class JobMesh(NamedTuple):
    """A job whose ranks are connected.

    Attributes:
        mesh: the mesh of all ranks, followed by the servers.
        store: the store at which they met; rank 0 holds it.
        secret: the job's secret.
        identity: digests that must be equal for a process that returns.
    """

    mesh: Mesh
    store: dist.TCPStore
    secret: bytes
    identity: dict[str, str]


class RunningJob(NamedTuple):
    """A job to which this process returns: its store, secret and identity (see `JobMesh`)."""

    store: dist.TCPStore
    secret: bytes
    identity: dict[str, str]


def open_mesh(found: Resolution, settings: StrategySettings, rank: int, job: RunningJob | None = None) -> JobMesh:
    """Connect all ranks and servers; servers may start later. Collective, except for a returning rank.

    Args:
        found: the plan and workload of all ranks.
        rank: rank of this process in the job.
        job: the result of `find_job`; None if the job begins.

    Raises:
        ExchangeError: processes cannot connect to each other.
        PlanError: the job to which this process returns has another plan, model or cluster.
    """
    identity = _identity(found, next(_trainings))
    if job is None:
        secret = common_secret(required=_FROM_OUTSIDE if rejoin_enabled() else "")
        store = _meet_at_store(found, settings, rank)
    else:
        store, secret = job.store, job.secret
        _check_same(job.identity, identity)
    node = found.cluster.nodes[found.cluster.rank_nodes[rank]]
    mesh = Mesh.open(
        store,
        rank,
        found.plan.world_size + found.plan.servers,
        secret=secret,
        address=node.address,
        timeout=settings.timeout,
        heartbeat=settings.heartbeat,
        rejoin=job is not None,
    )
    return JobMesh(mesh, store, secret, identity)


def rejoin_enabled() -> bool:
    """Whether a restarted rank can find the job."""
    return bool(os.environ.get(STORE_PORT))


def check_rejoin_secret() -> None:
    """Check that there is a secret if other processes can find the job. Call it before other ranks wait for this one.

    Raises:
        ExchangeError: other processes can find the job, but there is no secret in the environment.
    """
    if rejoin_enabled():
        required_secret(_FROM_OUTSIDE)


def announce_job(job: JobMesh) -> None:
    """Let restarted ranks find this job with `find_job`."""
    job.store.set(_RUNNING, seal(job.secret, _RUNNING, json.dumps(job.identity)))


def withdraw_job(store: dist.TCPStore) -> None:
    """Undo `announce_job`."""
    store.delete_key(_RUNNING)


def find_job(host: str, timeout: float) -> RunningJob | None:
    """The job that already runs without this process; None if there is none, for example because the job begins now.

    Args:
        host: host of rank 0.
        timeout: seconds that a later wait at the store may take.

    Raises:
        ExchangeError: the listener is no job's store or does not answer, or the job has another secret than this
            process.
    """
    port = os.environ.get(STORE_PORT, "")
    if not port.isdecimal():
        return None
    secret = required_secret(_FROM_OUTSIDE)
    try:
        store = find_store(host, int(port), timeout)
        found = ask_store(lambda: store.get(_RUNNING).decode() if store.check([_RUNNING]) else "")
        # If the job ends at this moment, `Mesh.open` reports that.
        return RunningJob(store, secret, json.loads(unseal(secret, _RUNNING, found))) if found else None
    except ExchangeError as cause:
        raise ExchangeError(f"{STORE_PORT}={port}: {cause}") from None
    except (OSError, RuntimeError, ValueError):  # no job wrote this value
        return None


def _meet_at_store(found: Resolution, settings: StrategySettings, rank: int) -> dist.TCPStore:
    """Open a store on rank 0 and connect to it on all other ranks; collective."""
    size = found.plan.world_size
    if dist.get_world_size() != size:
        raise ExchangeError(
            f"the job has {size} ranks, but only {dist.get_world_size()} were left after its last training; start the "
            "job again"
        )
    own: dist.TCPStore | None = None
    host, fault = "", ""
    if rank == 0:
        try:
            host = own_address()
            port = _store_port(found.plan)
            own = open_store(host, port, settings.timeout)
        except (AutoSyncError, RuntimeError, ValueError) as cause:
            fault = str(cause).splitlines()[0]
    place = gather_json([host, own.port if own is not None else 0, fault])[0]
    if place[2]:
        raise ExchangeError(f"rank 0 cannot open the store at which ranks and servers meet: {place[2]}")
    try:
        return own or find_store(place[0], place[1], settings.timeout)
    except ExchangeError as cause:
        raise explained(f"rank 0's store: {cause}") from None  # rank 0 may have died after it sent the address


def _store_port(plan: SyncPlan) -> int:
    """The port at which servers and returning ranks find the job; 0, for any free port, if none is given."""
    given = os.environ.get(STORE_PORT, "")
    if given and not (given.isdecimal() and 0 < int(given) < 65536):
        raise PlanError(f"{STORE_PORT}={given}: expected a port from 1 to 65535")
    if plan.servers and not given:
        raise PlanError(
            f"plan: servers: {plan.servers} server-only ranks must find the job: set {STORE_PORT} to a port, and "
            "start `autosync serve` for each of them"
        )
    return int(given or 0)


def _identity(found: Resolution, training: int) -> dict[str, str]:
    return {
        "number of the training in the script": str(training),
        "plan": found.plan.fingerprint,
        "model": found.workload.variables_fingerprint,
        "cluster": found.cluster.fingerprint,
    }


def _check_same(job: dict[str, str], own: dict[str, str]) -> None:
    for name, value in own.items():
        if job.get(name) != value:
            raise PlanError(
                f"{name}: this rank has {value}, but the job that it rejoins has {job.get(name)}; start this rank "
                "like the other ranks"
            )

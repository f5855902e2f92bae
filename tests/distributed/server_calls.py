"""What ranks do in tests of the parameter server: train by it and by DDP, and compare."""

from __future__ import annotations

import copy
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from recommender import ROWS, Recommender, workload_of
from strangers import SECRET
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Net, batches, distance, subgroup

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.servers import server_layout
from lightning_autosync.relaxed.server import ParameterServer, ShardServer, serve
from lightning_autosync.relaxed.server.optimizer import ELEMENTWISE
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.relaxed.transport.payload import unpack
from lightning_autosync.workload import Workload, describe, variable_names

_NUMBERS: dict[dist.ProcessGroup, Iterator[int]] = {}
TIMEOUT = 60.0


def own_store() -> dist.Store:
    """A part of the world's store for one mesh; every rank must call it equally often.

    After an error in a test, which may have come at different places on different ranks, the workers meet in a new
    world, where counting begins anew.
    """
    number = next(_NUMBERS.setdefault(dist.group.WORLD, itertools.count()))
    return dist.PrefixStore(f"mesh{number}", dist.distributed_c10d._get_default_store())


def nodes_of(cluster: ClusterSpec) -> list[tuple[int, ...]]:
    return [cluster.ranks_of(index) for index in range(len(cluster.nodes))]


@contextmanager
def worker(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: SyncPlan,
    store: dist.Store,
    workload: Workload | None = None,
    cluster: ClusterSpec | None = None,
    **options: Any,
) -> Iterator[ParameterServer]:
    layout = server_layout(plan, workload or describe(module))
    mesh = Mesh.open(
        store, dist.get_rank(), layout.workers + layout.servers, secret=SECRET, address="127.0.0.1", timeout=TIMEOUT
    )
    with closing(mesh):
        running = ParameterServer(
            mesh,
            variable_names(module),
            layout,
            optimizer,
            plan.consistency,
            nodes=nodes_of(cluster) if cluster else None,
            timeout=TIMEOUT,
            **options,
        )
        try:
            yield running
        except BaseException:
            # First, for the own server waits for all workers, and those for this one.
            mesh.close()
            raise
        finally:
            running.close()


class Traffic:
    """Bytes of tensors that a worker pushes to other processes, and pulls from them, from now on."""

    def __init__(self, running: ParameterServer) -> None:
        self.pushed = self.pulled = 0
        send, install, rank = running._rpc.send, running._pulled.install, running._mesh.rank

        def counted_send(peer: int, kind: str, header: Any = None, parts: Any = ()) -> None:
            if kind.endswith(".push") and peer != rank:
                self.pushed += sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
            send(peer, kind, header, parts)

        def counted_install(mail: Mail) -> None:
            if mail.sender != rank:
                self.pulled += sum(tensor.nbytes for tensor in unpack(mail.payload).tensors.values())
            install(mail)

        running._rpc.send, running._pulled.install = counted_send, counted_install  # type: ignore[method-assign]


def serves(plan: SyncPlan, store: dist.Store) -> bool:
    """Whether this rank is no worker under the plan; if it is a server, it serves until all is over."""
    rank = dist.get_rank()
    if rank < plan.world_size:
        return False
    if rank < plan.world_size + plan.servers:
        serve(store, rank, plan.world_size + plan.servers, secret=SECRET, address="127.0.0.1", timeout=TIMEOUT)
    return True


def make_optimizer(module: nn.Module, kind: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    return ELEMENTWISE[kind](
        [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}], lr=0.05, **options
    )


def train(
    forward: Any, optimizer: torch.optim.Optimizer, rank: int, steps: int, running: ParameterServer | None
) -> None:
    """By the servers, or where there are none by the optimizer; the rates change."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for images, labels in batches(rank, steps, torch.float64):
        nn.functional.cross_entropy(forward(images), labels).backward()
        if running is None:
            optimizer.step()
        else:
            running.step(optimizer, len(images))
        schedule.step()
        optimizer.zero_grad()


def digest_of(module: nn.Module) -> str:
    together = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    return hashlib.sha256(together).hexdigest()


def synchronous_runs(
    plans: list[dict[str, Any]],
    kind: str,
    options: dict[str, Any],
    cluster: dict[str, Any] | None = None,
    steps: int = 4,
) -> list[dict[str, Any]] | None:
    """For each plan: how far from DDP training ends, bytes moved and kept here, and a digest of the weights."""
    size = plans[0]["world_size"]
    group = subgroup(size)
    torch.manual_seed(0)
    start = Net().double()
    found = []
    if group is not None:
        reference = copy.deepcopy(start)
        ddp = DistributedDataParallel(reference, process_group=group)
        train(ddp, make_optimizer(reference, kind, options), dist.get_rank(group), steps, None)
    for number, data in enumerate(plans):
        plan = SyncPlan.from_dict(data)
        store = own_store()
        if serves(plan, store):
            continue
        # Only rank 0's weights may count.
        torch.manual_seed(number + (0 if dist.get_rank() == 0 else 100))
        module = copy.deepcopy(start) if dist.get_rank() == 0 else Net().double()
        optimizer = make_optimizer(module, kind, options)
        spec = ClusterSpec.from_dict(cluster) if cluster else None
        with worker(module, optimizer, plan, store, cluster=spec) as running:
            running.start()
            traffic = Traffic(running)
            train(module, optimizer, dist.get_rank(), steps, running)
            found.append(
                {
                    "distance": distance(module, reference),
                    "digest": digest_of(module),
                    "pushed": traffic.pushed,
                    "pulled": traffic.pulled,
                    "state": running.state_bytes,
                    "progress": running.progress,
                }
            )
            running.drain()
    return found


def pushes_by_sender(plan: dict[str, Any], cluster: dict[str, Any], steps: int) -> dict[str, int] | None:
    """On the one server: how many pushes came from each worker."""
    made, store = SyncPlan.from_dict(plan), own_store()
    rank = dist.get_rank()
    arrived: Counter[str] = Counter()
    take = ShardServer._pushed

    def counting(server: ShardServer, mail: Mail) -> None:
        arrived[str(mail.sender)] += 1
        take(server, mail)

    with patch.object(ShardServer, "_pushed", counting):
        if serves(made, store):
            return dict(arrived)
    torch.manual_seed(0)
    module = Net().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with worker(module, optimizer, made, store, cluster=ClusterSpec.from_dict(cluster)) as running:
        running.start()
        train(module, optimizer, rank, steps, running)
        running.drain()
    return None


def row_runs(plans: list[dict[str, Any]], kind: str, sparse: bool, options: dict[str, Any]) -> list[Any] | None:
    """For each plan: distance from dense DDP after a drain, and bytes pushed and pulled in the steps."""
    size = plans[0]["world_size"]
    group = subgroup(size)
    torch.manual_seed(0)
    start = Recommender(sparse).double()
    found = []
    if group is not None:
        reference = Recommender(sparse=False).double()
        reference.load_state_dict(start.state_dict())
        ddp = DistributedDataParallel(reference, process_group=group)
        train_rows(ddp, ELEMENTWISE[kind](reference.parameters(), lr=0.3, **options), dist.get_rank(), None)
    for data in plans:
        plan, store = SyncPlan.from_dict(data), own_store()
        if serves(plan, store):
            continue
        module = copy.deepcopy(start)
        optimizer = ELEMENTWISE[kind](module.parameters(), lr=0.3, **options)
        workload = workload_of(module, "sparse" if sparse else "row_sparse")
        with worker(module, optimizer, plan, store, workload) as running:
            running.start()
            traffic = Traffic(running)
            train_rows(module, optimizer, dist.get_rank(), running)
            moved = traffic.pushed, traffic.pulled
            running.drain()
            found.append([distance(module, reference), *moved])
    return found


def train_rows(forward: Any, optimizer: torch.optim.Optimizer, rank: int, running: ParameterServer | None) -> None:
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randint(0, ROWS, (3, 2), generator=generator) for _ in range(5)]
    for items in drawn:
        forward(items).square().mean().backward()
        if running is None:
            optimizer.step()
        else:
            running.step(optimizer, len(items))
        optimizer.zero_grad()


def continued(first: dict[str, Any], second: dict[str, Any], kind: str, options: dict[str, Any]) -> float | None:
    """How far training that goes on after two steps under another plan ends from training without a break."""
    torch.manual_seed(0)
    start = Net().double()
    whole, broken = copy.deepcopy(start), copy.deepcopy(start)
    state: dict[str, Any] | None = None
    for module, plan_data, seeds in (
        (whole, first, (0, 1)),
        (broken, first, (0,)),
        (broken, second, (1,)),
    ):
        plan, store = SyncPlan.from_dict(plan_data), own_store()
        if serves(plan, store):
            continue
        optimizer = make_optimizer(module, kind, options)
        with worker(module, optimizer, plan, store) as running:
            if seeds == (1,):
                assert state is not None
                running.load_state_dict(state)
            running.start()
            for seed in seeds:
                train_steps(module, optimizer, running, 10 * seed + dist.get_rank())
                running.drain()
                running.resume()
            state = running.state_dict()
            assert running.progress == 2 * (1 + seeds[-1])
    return distance(broken, whole) if dist.get_rank() < first["world_size"] else None


def train_steps(module: nn.Module, optimizer: torch.optim.Optimizer, running: ParameterServer, seed: int) -> None:
    for images, labels in batches(seed, 2, torch.float64):
        nn.functional.cross_entropy(module(images), labels).backward()
        running.step(optimizer, len(images))
        optimizer.zero_grad()


def stale_runs(plan: dict[str, Any], steps: list[int], pauses: list[float]) -> dict[str, Any] | None:
    """Uneven numbers of steps at uneven speeds: how far ahead this worker was, and what all hold in the end."""
    made, store = SyncPlan.from_dict(plan), own_store()
    if serves(made, store):
        return None
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = Net().double()
    buffer = torch.full((2,), float(rank), dtype=torch.float64)
    count = torch.tensor(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    ahead = 0
    with worker(module, optimizer, made, store, buffers=[("mean", buffer), ("count", count)]) as running:
        running.start()
        began = [buffer.tolist(), int(count)]
        buffer.fill_(float(rank))
        for step, (images, labels) in enumerate(batches(rank, steps[rank], torch.float64)):
            own = store.add(f"step{rank}", 1)
            assert own == step + 1
            # What the others had begun when this worker was let into its step.
            others = [store.add(f"step{peer}", 0) for peer in range(made.world_size) if not store.add(f"end{peer}", 0)]
            ahead = max([ahead, *(own - other for other in others)])
            time.sleep(pauses[rank])
            nn.functional.cross_entropy(module(images), labels).backward()
            running.step(optimizer, len(images))
            optimizer.zero_grad()
        store.add(f"end{rank}", 1)
        running.finish()
        running.drain()
        running.resume()
        drained = digest_of(module)
        images, labels = next(batches(rank, 1, torch.float64))
        nn.functional.cross_entropy(module(images), labels).backward()
        running.step(optimizer, len(images))
        running.drain()
        return {
            "ahead": ahead,
            "began": began,
            "drained": drained,
            "ended": digest_of(module),
            "mean": buffer.tolist(),
            "progress": running.progress,
            "finite": all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters()),
        }


def sums_of_pushes(plan: dict[str, Any], steps: int) -> float | None:
    """With constant gradients, any order of applying them ends alike: how far from their sum does it?"""
    made, store = SyncPlan.from_dict(plan), own_store()
    if serves(made, store):
        return None
    rank = dist.get_rank()
    module = nn.Linear(3, 2).double()
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with worker(module, optimizer, made, store) as running:
        running.start()
        for _ in range(steps):
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, rank + 1.0)
            running.step(optimizer, 1)
        running.drain()
    expected = -0.5 * steps * sum(range(1, made.world_size + 1)) / made.world_size
    return max(float((parameter.detach() - expected).abs().max()) for parameter in module.parameters())


def refusals(plan: dict[str, Any]) -> str | None:
    """The error of an optimizer that cannot run on slices."""
    made, store = SyncPlan.from_dict(plan), own_store()
    if dist.get_rank() >= made.world_size:
        return None
    module = Net().double()
    try:
        with worker(module, torch.optim.LBFGS(module.parameters()), made, store):
            return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"

"""Averages gradients over ranks with the same parts of parameters, with the engine of synchronous plans; clips them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import group_device
from lightning_autosync.engine.replicas import ParameterTracker
from lightning_autosync.engine.waiting import announce
from lightning_autosync.errors import ClusterError, ExchangeError, PlanError
from lightning_autosync.hybrid.execution.copies import CopyChecks
from lightning_autosync.hybrid.execution.split_model import Part, SplitModel
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.workload import Workload
from lightning_autosync.workload.description import dtype_name
from lightning_autosync.workload.spec import Variable

Choose = Callable[[Workload, ClusterSpec, bool], SyncPlan]
"""Function that makes a plan for one set of replicas, from its parameters, its cluster, and whether links are known."""


@dataclass(frozen=True)
class ReductionSettings:
    """Settings of the reduction of gradients.

    Attributes:
        cluster: cluster of the job; None if unknown.
        choose: function that makes the plans; None takes those of the hybrid plan.
        timeout: timeout in seconds for other ranks.
        watched: whether a `FailureDetector` is open for all ranks.
        check_replicas: number of reductions between comparisons of the weights of ranks with the same part; 0 never
            compares.
    """

    cluster: ClusterSpec | None = None
    choose: Choose | None = None
    timeout: float = 1800.0
    watched: bool = True
    check_replicas: int = 0


class GradientReduction:
    """One engine for each set of dimensions along which parameters have replicas; collective.

    A rank's gradients are those of its own loss, or of the mean loss along dimensions where samples were gathered (see
    `layouts`). So their mean over replicas is the gradient of the mean loss of all ranks.
    """

    def __init__(self, split: SplitModel, settings: ReductionSettings | None = None) -> None:
        self._split = split
        self._settings = settings or ReductionSettings()
        self._watch = ParameterTracker(split.module)
        self._enabled = True
        self._engines: list[Engine] = []
        every = self._settings.check_replicas
        self._checks = CopyChecks(split, every) if every else None
        self._start()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._engines)

    @property
    def enabled(self) -> bool:
        """Whether backward passes reduce gradients instead of only accumulating them."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        for engine in self._engines:
            engine.enabled = enabled

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of one backward pass; after it, gradients are means over replicas.

        Raises:
            ExchangeError: weights of replicas differ, or a parameter was replaced.
        """
        if self._watch.changed():
            self._check_parts()
            # All ranks restart together: the forward pass has checked that they train the same parameters.
            self._restart()
        for engine in self._engines:
            engine.deferred = engine.expects = True
        ended = False
        try:
            yield
            ended = True
            for engine in self._engines:
                engine.finish()
        except BaseException as error:
            for engine in self._engines:
                # Before its first gradient, this rank has sent nothing and may begin the pass again.
                if engine.enabled and (ended or engine.in_pass):
                    engine.interrupt(error)
            raise
        finally:
            for engine in self._engines:
                engine.deferred = engine.expects = False
        if self._enabled and self._checks is not None:
            self._checks.count()

    def compare_copies(self) -> None:
        """Check now that ranks with the same part of a parameter have the same weights; collective.

        Raises:
            ExchangeError: (on every rank) weights differ.
        """
        if self._checks is not None:
            self._checks.run()

    def close(self) -> None:
        """Stop reducing."""
        self._checks = None
        self._close_engines()

    def _close_engines(self) -> None:
        for engine in self._engines:
            engine.close()
        self._engines.clear()

    def _check_parts(self) -> None:
        """Refuse parameters that are not those that were split: no engine would reduce their gradients."""
        # Parameters are compared as objects, because torch.compile changes names only.
        split = {part.parameter: name for name, part in self._split.parts.items()}
        found = {parameter: name for name, parameter in self._split.module.named_parameters()}
        odd = [found.get(one) or split[one] for one in {**split, **found} if (one in split) != (one in found)]
        odd += self._watch.reformed()
        if not odd:
            return
        error = ExchangeError(
            f"parameter '{odd[0]}' was added, removed or replaced, or changed its shape or dtype, after the model was "
            "split. Make such changes before training; afterwards only freezing and changes in place, element by "
            "element, are allowed"
        )
        announce(error)  # it may be on this rank only
        raise error

    def _restart(self) -> None:
        self._close_engines()
        self._watch.accept()
        self._start()
        if self._checks is not None:
            self._checks.follow()
        self.enabled = self._enabled

    def _start(self) -> None:
        by_dimensions: dict[tuple[int, ...], dict[str, Part]] = {}
        for name, part in self._split.parts.items():
            if part.parameter.requires_grad and part.replicas:
                by_dimensions.setdefault(part.replicas, {})[name] = part
        # Sorted, because creating an engine is collective and ranks must do so in the same order.
        for dimensions in sorted(by_dimensions):
            self._engines.append(self._engine(dimensions, by_dimensions[dimensions]))

    def _engine(self, dimensions: tuple[int, ...], parts: dict[str, Part]) -> Engine:
        mesh, settings = self._split.mesh, self._settings
        workload = Workload(
            name=type(self._split.module).__name__,
            variables=tuple(
                Variable(name=name, shape=part.shard.local_shape, dtype=dtype_name(name, part.parameter))
                for name, part in parts.items()
            ),
        )
        cluster, known = replicas_cluster(self._split.plan, dimensions, mesh.peers(dimensions), settings.cluster)
        plan = self._plan(workload, cluster, known)
        group = mesh.group(dimensions)
        engine = Engine(
            [(name, part.parameter) for name, part in parts.items()],
            compile_plan(plan, workload, cluster, "plan: gradients"),
            group=None if group is dist.group.WORLD else group,
            cluster=cluster if known else None,
            timeout=settings.timeout,
            watched=settings.watched,
        )
        engine.expects = False  # passes outside `backward` stay on their rank, as under DDP
        return engine

    def _plan(self, workload: Workload, cluster: ClusterSpec, known: bool) -> SyncPlan:
        stated = self._split.plan.gradients
        if isinstance(stated, SyncPlan):
            return stated
        if self._settings.choose is not None and stated == "all_reduce":
            return self._settings.choose(workload, cluster, known)
        return builders.build(stated, workload, cluster)


def replicas_cluster(
    plan: HybridPlan, dimensions: tuple[int, ...], ranks: tuple[int, ...], cluster: ClusterSpec | None
) -> tuple[ClusterSpec, bool]:
    """The cluster as one set of replicas sees it, and whether its links are known.

    Other sets use the same links at the same time, so each set gets a share of a link's rate.

    Args:
        dimensions: dimensions along which the replicas differ.
        cluster: cluster of all ranks; None if unknown.

    Raises:
        ClusterError: the cluster has another number of ranks than the plan.
    """
    here = sorted(ranks)
    if cluster is None:
        return ClusterSpec.uniform(nodes=len(here), name="replicas"), False
    if cluster.world_size != plan.world_size:
        raise ClusterError(
            f"cluster '{cluster.name}': it has {cluster.world_size} ranks, but the plan's mesh has {plan.world_size}"
        )
    if len(here) == cluster.world_size:
        return cluster, True
    try:
        return _restricted(cluster, here, plan.groups(dimensions)), True
    except (ClusterError, PlanError):
        # The set's ranks are connected only by way of nodes without ranks of the set, so there is no such cluster.
        return ClusterSpec.uniform(nodes=len(here), name="replicas"), False


def _restricted(cluster: ClusterSpec, ranks: list[int], sets: tuple[tuple[int, ...], ...]) -> ClusterSpec:
    topology = LinkGraph(cluster)
    users = [0] * len(topology.channels)
    for members in sets:
        loads = topology.loads([(i, j) for i in members for j in members if i != j])
        users = [count + (load > 0) for count, load in zip(users, loads, strict=True)]
    names = [cluster.nodes[cluster.rank_nodes[rank]].name for rank in ranks]
    nodes = [
        {**node.model_dump(), "devices": names.count(node.name), "interfaces": ()}
        for node in cluster.nodes
        if node.name in names
    ]
    links, reached = [], set(names)
    for number, link in enumerate(cluster.links):
        share = max(users[2 * number], users[2 * number + 1], 1)
        # Shares of links are known for the first interface only.
        if not {link.a, link.b} <= {*names, *cluster.switches} or not cluster.carries(0, link):
            continue
        reached |= {link.a, link.b}
        rates = (link.bandwidth, link.reverse_bandwidth)
        shared = [None if rate is None else rate / share for rate in rates]
        links.append({**link.model_dump(), "bandwidth": shared[0], "reverse_bandwidth": shared[1]})
    return ClusterSpec.from_dict(
        {
            **cluster.to_dict(),
            "nodes": nodes,
            "switches": [switch for switch in cluster.switches if switch in reached],
            "links": links,
            "rank_order": names,
        }
    )


def gradient_norm(split: SplitModel, parameters: Iterable[nn.Parameter]) -> Tensor:
    """[] the Euclidean norm of the whole gradient of parameters that may be cut; collective.

    Args:
        parameters: the same parameters on all ranks. Those that are not the model's are assumed to be equal on all
            ranks.
    """
    parts = {part.parameter: part for part in split.parts.values()}
    found = [parameter for parameter in parameters if parameter.grad is not None]
    group = split.mesh.group(split.mesh.dimensions)
    device = found[0].grad.device if found else group_device(group)  # type: ignore[union-attr]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if found:
        norms = torch.stack(torch._foreach_norm([parameter.grad for parameter in found]))  # type: ignore[misc]
        # Weight each part by 1 / (number of ranks that have it), so that it counts once in the sum over all ranks.
        pieces = [parts[parameter].shard.pieces if parameter in parts else 1 for parameter in found]
        shares = [count / split.plan.world_size for count in pieces]
        total += (norms.double().square() * torch.tensor(shares, dtype=torch.float64, device=device)).sum()
    dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_gradients(split: SplitModel, parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale gradients so that their norm is at most ``most``, like ``torch.nn.utils.clip_grad_norm_``; collective.

    Returns:
        [] the norm before clipping.
    """
    found = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(split, found)
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    if found:
        gradients = [parameter.grad for parameter in found]
        torch._foreach_mul_(gradients, float(factor))  # type: ignore[arg-type]
    return norm

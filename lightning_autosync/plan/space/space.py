"""`PlanSpace`: the plans worth considering for a workload on a cluster, as a few categorical parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from random import Random
from typing import Any

from lightning_autosync.cluster import ClusterSpec, pack_trees, server_shares
from lightning_autosync.documents import digest, unknown_name
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.plan.builders import build, names
from lightning_autosync.plan.builders.grouping import fused_groups, in_ready_order, make_plan
from lightning_autosync.plan.compiler import compile_plan
from lightning_autosync.plan.space.domains import (
    ASPECTS,
    JOIN,
    WHOLE,
    Block,
    Domain,
    Value,
    block_domains,
    make_blocks,
    relevant,
)
from lightning_autosync.plan.spec import Group, Partition, Semantics, SyncPlan, WeightedTree
from lightning_autosync.plan.topologies import method as find_method
from lightning_autosync.workload import Variable, Workload


class Composer:
    """Makes groups for one cluster; computes its trees and server shares once."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        self._trees: tuple[WeightedTree, ...] | None = None
        self._shares: tuple[float, ...] | None = None

    def groups(
        self, name: str, variables: Sequence[Variable], choice: Mapping[str, Value], loads: dict[int, float]
    ) -> Iterator[Group]:
        """The messages of a block; adds to ``loads``, the bytes that each rank serves so far."""
        limit = int(choice["bucket"]) or sum(variable.bytes for variable in variables) + 1
        for group in fused_groups(variables, [limit], f"{name}.", **self._aspects(choice)):
            if find_method(str(choice["method"]))[1].by_servers:
                members = [variable for variable in variables if variable.name in group.variables]
                group = group.model_copy(update=self._by_servers(members, str(choice["servers"]), loads))
            yield group

    def _aspects(self, choice: Mapping[str, Value]) -> dict[str, Any]:
        topology, method = find_method(str(choice["method"]))
        aspects: dict[str, Any] = {
            "topology": topology.name,
            "architecture": method.architecture,
            "compressor": choice["compressor"] if relevant("compressor", choice) else "none",
            "local_aggregation": bool(choice["aggregate"]) and relevant("aggregate", choice),
        }
        if topology.takes_trees:
            aspects["trees"] = self._packed()
        if topology.segmented:
            aspects["segment"] = int(choice["segment"]) or None
        return aspects

    def _by_servers(self, members: Sequence[Variable], servers: str, loads: dict[int, float]) -> dict[str, Any]:
        size = sum(variable.bytes for variable in members)
        owners, shares = self._owners(servers, loads)
        slices = members[0].shape[0] if members[0].kind != "dense" else sum(v.numel for v in members)
        if len(owners) > slices:
            owners, shares = self._owners("least_loaded", loads)
        for owner, share in zip(owners, shares, strict=True):
            loads[owner] += size * share
        if len(owners) == 1:
            return {"placement": owners, "partition": None}
        even = len(set(shares)) == 1
        partition = Partition(shards=len(owners), weights=None if even else shares)
        return {"placement": owners, "partition": partition}

    def _owners(self, servers: str, loads: dict[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The ranks that reduce, and the share of each."""
        ranks = tuple(range(self._cluster.world_size))
        if servers == "bandwidth":
            if self._shares is None:
                self._shares = tuple(server_shares(self._cluster))
            return ranks, self._shares
        if servers == "even":
            chosen = ranks
        elif servers == "node_leaders":
            chosen = tuple(self._cluster.ranks_of(node)[0] for node in range(len(self._cluster.nodes)))
        else:
            chosen = (min(ranks, key=lambda rank: (loads[rank], rank)),)
        return chosen, (1 / len(chosen),) * len(chosen)

    def _packed(self) -> tuple[WeightedTree, ...]:
        if self._trees is None:
            packed = pack_trees(self._cluster).trees
            self._trees = tuple(WeightedTree.model_validate(vars(tree)) for tree in packed)
        return self._trees


Genome = Mapping[str, Value]
"""A point of the space: a value for each parameter, like the params of an Optuna trial."""

BUILDER = "builder"
COMPOSED = "composed"
_DEFAULTS: dict[str, Value] = {
    "servers": "least_loaded",
    "bucket": WHOLE,
    "compressor": "none",
    "aggregate": 0,
    "priority": 0,
    "segment": 0,
}


class PlanSpace:
    """A finite space of plans: parameter domains, the plan at each point, and moves between points.

    Parameters are named ``BLOCK/ASPECT``. The parameter ``builder`` is ``composed``, or the name of a builder whose
    plan the point then stands for, whatever its other parameters. `normal` maps points with the same plan to one point.

    Args:
        workload: the variables.
        cluster: the cluster on which they are synchronized.
        semantics: the highest level allowed, ``exact`` or ``compressed``.
        runs: largest number of blocks of small variables per element type.
        lone: largest number of large variables with choices of their own.
        recorded: domains of an earlier study, which may have had other builders, topologies or compressors. Optuna
            requires that the domains of a study never change. None takes the current domains.

    Raises:
        PlanError: ``semantics`` is ``relaxed`` (the user chooses consistency, not this space), or ``recorded`` names a
            block that this workload does not have.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterSpec,
        semantics: Semantics = "exact",
        runs: int = 4,
        lone: int = 6,
        recorded: Mapping[str, Domain] | None = None,
    ) -> None:
        if semantics == "relaxed":
            raise PlanError("semantics: 'relaxed' plans cannot be searched; allowed: 'exact', 'compressed'")
        self.workload = workload
        self.cluster = cluster
        self.semantics = semantics
        self.runs = runs
        self.lone = lone
        self.blocks = make_blocks(workload, runs, lone)
        self._known = {block.name: self._domains_of(block) for block in self.blocks}
        self._recorded = dict(recorded) if recorded is not None else None
        self._domains = self._known if self._recorded is None else self._of_record(self._recorded)
        self._composer = Composer(cluster)

    @cached_property
    def parameters(self) -> dict[str, Domain]:
        """The domain of each parameter, in a fixed order."""
        builders = (COMPOSED, *self._builders)
        made: dict[str, Domain] = {BUILDER: self._recorded[BUILDER] if self._recorded else builders}
        for block in self.blocks:
            made |= {f"{block.name}/{aspect}": domain for aspect, domain in self._domains[block.name].items()}
        return made

    @cached_property
    def usable(self) -> dict[str, Domain]:
        """`parameters` without values that are recorded but no longer available, so that no plan has them.

        A domain keeps its first value if it would become empty.
        """
        known: dict[str, Domain] = {BUILDER: (COMPOSED, *self._builders)}
        known |= {
            f"{block}/{aspect}": values for block, found in self._known.items() for aspect, values in found.items()
        }
        made = {}
        for name, domain in self.parameters.items():
            made[name] = tuple(value for value in domain if value in known.get(name, domain[:1])) or domain[:1]
        return made

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the parameters; studies with equal digests can share points."""
        return digest([[name, list(domain)] for name, domain in self.parameters.items()])

    def uses(self, genome: Genome, name: str) -> bool:
        """Whether a parameter can change the plan of a point, of which only builder and methods need to be known."""
        if name == BUILDER:
            return True
        if genome.get(BUILDER, COMPOSED) != COMPOSED:
            return False
        block, _, aspect = name.rpartition("/")
        method = genome.get(f"{block}/method", "native")
        # What a method of another release uses is unknown.
        return method not in self._known[block].get("method", ("native",)) or relevant(aspect, {"method": method})

    def complete(self, genome: Genome) -> dict[str, Value]:
        """A point with the unused parameters that it leaves out; each of them gets the first value of its domain."""
        if BUILDER not in genome:
            return dict(genome)
        left_out = (name for name in self.parameters if name not in genome and not self.uses(genome, name))
        return dict(genome) | {name: self.parameters[name][0] for name in left_out}

    def has(self, genome: Genome) -> bool:
        """Whether a plan can be made of a point: it has all parameters that it uses, and all values are available."""
        genome = self.complete(genome)
        return all(genome.get(name) in domain for name, domain in self.usable.items())

    def plan(self, genome: Genome) -> SyncPlan:
        """The plan at a point, which may leave out parameters that it does not use.

        Raises:
            PlanError: a used parameter is missing, or its value is not in its domain.
        """
        genome = self.normal(genome)
        if genome[BUILDER] != COMPOSED:
            return build(str(genome[BUILDER]), self.workload, self.cluster)
        loads = dict.fromkeys(range(self.cluster.world_size), 0.0)
        made: list[tuple[Group, int]] = []
        for block, members, choice in self._occupied(genome):
            urgency = int(choice["priority"]) if relevant("priority", choice) else 0
            made += [(group, urgency) for group in self._composer.groups(block.name, members, choice, loads)]
        return make_plan(self.workload, self.cluster, self._in_order(made))

    def used(self, genome: Genome) -> dict[str, Value]:
        """The parameters of a point that can change its plan."""
        return {name: genome[name] for name in self.parameters if name in genome and self.uses(genome, name)}

    def normal(self, genome: Genome) -> dict[str, Value]:
        """The point of the same plan in which every unused parameter has the first value of its domain.

        Raises:
            PlanError: a used parameter is missing, or a value is not in its domain.
        """
        self._check(self.complete(genome))
        return self._first | self.used(genome)

    def choice(self, genome: Genome, block: Block) -> dict[str, Value]:
        """The values of all aspects of a block; defaults for aspects without a parameter."""
        given = {aspect: genome[f"{block.name}/{aspect}"] for aspect in self._domains[block.name]}
        return {"method": "native"} | _DEFAULTS | given

    def baselines(self) -> list[dict[str, Value]]:
        """The points of the builders' plans."""
        return [self.normal(self._first | {BUILDER: name}) for name in self.usable[BUILDER] if name != COMPOSED]

    def coherent(self) -> Iterator[dict[str, Value]]:
        """Points that treat all blocks alike, separate or joined into one, as builders with a single rule do.

        Method, servers, bucket (by position in its domain), compressor and aggregation vary for all blocks at once.
        """
        varied = ("method", "servers", "bucket", "compressor", "aggregate")
        values: dict[str, dict[Value, None]] = {aspect: {} for aspect in varied}
        for block in self.blocks:
            for aspect in varied:
                of_block = self.usable.get(f"{block.name}/{aspect}", ())
                values[aspect] |= dict.fromkeys(range(len(of_block)) if aspect == "bucket" else of_block)
        values["method"].pop(JOIN, None)
        seen = set()
        for combination in product(*(tuple(found) or (None,) for found in values.values())):
            for joined in (False, True):
                point = self._alike(dict(zip(varied, combination, strict=True)), joined)
                key = tuple(point.values())
                if key not in seen:
                    seen.add(key)
                    yield point

    def _alike(self, wanted: Mapping[str, Value | None], joined: bool) -> dict[str, Value]:
        """The point in which every block has the wanted values, as far as its domains contain them."""
        made = dict(self._first)
        for block in self.blocks:
            for aspect, domain in self._domains[block.name].items():
                value = wanted.get(aspect)
                if aspect == "bucket" and isinstance(value, int):
                    value = domain[min(value, len(domain) - 1)]
                if aspect == "method":
                    value = JOIN if joined and JOIN in domain else value if value in domain else "native"
                if value is not None and value in domain:
                    made[f"{block.name}/{aspect}"] = value
        return self.normal(made | {BUILDER: COMPOSED})

    def draw(self, rng: Random) -> dict[str, Value]:
        """A random composed point, uniform over the domains."""
        drawn = {name: rng.choice(domain) for name, domain in self.usable.items()}
        return self.normal(drawn | {BUILDER: COMPOSED})

    def mutate(self, genome: Genome, rng: Random, rate: float = 0.15) -> dict[str, Value]:
        """A changed point: each relevant parameter changes with probability ``rate``, and at least one does.

        It is the same point if it has no relevant parameter, as that of one variable on one rank.
        """
        base = self._composed(genome)
        matters = self._matters(base)
        if not matters:
            return base
        chosen = [name for name in matters if rng.random() < rate] or [rng.choice(matters)]
        for name in chosen:
            base[name] = rng.choice([value for value in self.usable[name] if value != base[name]])
        return self.normal(base)

    def crossover(self, one: Genome, other: Genome, rng: Random) -> dict[str, Value]:
        """A point that takes all parameters of each block from one of the parents at random."""
        parents = self._composed(one), self._composed(other)
        made: dict[str, Value] = {BUILDER: COMPOSED}
        for block in self.blocks:
            parent = rng.choice(parents)
            made |= {name: parent[name] for name in self._names(block)}
        return self.normal(made)

    def neighbours(self, genome: Genome) -> Iterator[dict[str, Value]]:
        """Every point that differs in one relevant parameter."""
        base = self._composed(genome)
        for name in self._matters(base):
            for value in self.usable[name]:
                if value != base[name]:
                    yield self.normal(base | {name: value})

    def _domains_of(self, block: Block) -> dict[str, Domain]:
        """The domains of a block's aspects; an aspect without one has its default."""
        return block_domains(block, self.cluster, self.semantics)

    def _of_record(self, recorded: Mapping[str, Domain]) -> dict[str, dict[str, Domain]]:
        """The recorded domains by block and aspect."""
        made: dict[str, dict[str, Domain]] = {block.name: {} for block in self.blocks}
        for name, domain in recorded.items():
            if name == BUILDER:
                continue
            block, _, aspect = name.rpartition("/")
            if block not in made or aspect not in ASPECTS or not domain:
                raise PlanError(f"plan space: recorded parameter '{name}' does not belong to this workload")
            made[block][aspect] = tuple(domain)
        return made

    @cached_property
    def _builders(self) -> tuple[str, ...]:
        """Builders whose plans compile for the cluster; some need a single machine or known rates."""
        fitting = []
        for name in names():
            try:
                compile_plan(build(name, self.workload, self.cluster), self.workload, self.cluster)
            except DocumentError:
                continue
            fitting.append(name)
        return tuple(fitting)

    @cached_property
    def _first(self) -> dict[str, Value]:
        return {name: domain[0] for name, domain in self.parameters.items()}

    def _composed(self, genome: Genome) -> dict[str, Value]:
        return self.normal(dict(genome) | {BUILDER: COMPOSED})

    def _names(self, block: Block) -> list[str]:
        return [f"{block.name}/{aspect}" for aspect in self._domains[block.name]]

    def _matters(self, genome: Genome) -> list[str]:
        return [
            name
            for block in self.blocks
            for name in self._names(block)
            if len(self.usable[name]) > 1 and relevant(name.rpartition("/")[2], self.choice(genome, block))
        ]

    def _occupied(self, genome: Genome) -> Iterator[tuple[Block, list[Variable], dict[str, Value]]]:
        """Blocks that send messages: each with the variables of all blocks that joined it, in backward order."""
        choices = {block.name: self.choice(genome, block) for block in self.blocks}
        homes = {block.name: block.home for block in self.blocks if choices[block.name]["method"] == JOIN}
        joined: dict[str, list[Variable]] = {}
        for block in self.blocks:
            last: str = block.name
            while home := homes.get(last):
                last = home
            joined.setdefault(last, []).extend(block.variables)
        place = {variable.name: number for number, variable in enumerate(in_ready_order(self.workload))}
        for block in self.blocks:
            if block.name in joined:
                yield block, sorted(joined[block.name], key=lambda v: place[v.name]), choices[block.name]

    def _in_order(self, made: list[tuple[Group, int]]) -> list[Group]:
        """Groups in the order in which backward completes them; priorities of urgent groups rise in this order."""
        place = {name: number for number, name in enumerate(self.workload.ready_order)}
        made.sort(key=lambda pair: max(place[name] for name in pair[0].variables))
        return [
            group.model_copy(update={"priority": number + 1}) if urgent else group
            for number, (group, urgent) in enumerate(made)
        ]

    def _check(self, genome: Genome) -> None:
        for name, domain in self.parameters.items():
            if name not in genome:
                raise PlanError(f"plan space: parameter '{name}' is missing")
            if genome[name] not in domain:
                told = unknown_name(genome[name], [*map(str, domain)])
                raise PlanError(f"plan space: {name}: {genome[name]!r} is {told}")

"""Points of one space in another: what carries over between models and clusters."""

from __future__ import annotations

from collections.abc import Mapping

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from lightning_autosync.plan.space import BUILDER, Block, PlanSpace, Value
from lightning_autosync.search.studies import footing_of_study, space_of
from lightning_autosync.search.tried import RUN, seconds_of, told

BEST = 12
"""Points of a study that are carried over."""


def carried_over(study: Study, space: PlanSpace, count: int = BEST) -> list[dict[str, Value]]:
    """The best points of a study of another model or cluster, as points of ``space``; each once.

    Raises:
        StudyError: the study is not one of plans.
    """
    source, footing = space_of(study), footing_of_study(study)
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def brought(trial: FrozenTrial) -> float:
        return footing.bring(told(trial, RUN), trial.number, seconds_of(trial) or 0.0)

    ranked = sorted((trial for trial in trials if seconds_of(trial) is not None), key=brought)
    made: dict[tuple[Value, ...], dict[str, Value]] = {}
    for trial in ranked:
        if source.parameters.keys() <= trial.params.keys() and len(made) < count:
            point = transplant(trial.params, source, space)
            made.setdefault(tuple(point.values()), point)
    return list(made.values())


def transplant(genome: Mapping[str, Value], source: PlanSpace, target: PlanSpace) -> dict[str, Value]:
    """The point of ``target`` that treats every block as ``source`` treats the block at the same place of backward.

    Values that the target's domains do not have stay at their first; a builder that does not fit becomes the nearest
    thing: composed.
    """
    genome = source.normal(genome)
    made: dict[str, Value] = {name: domain[0] for name, domain in target.parameters.items()}
    if genome[BUILDER] in target.parameters[BUILDER]:
        made[BUILDER] = genome[BUILDER]
    places = _places(source)
    for block, place in _places(target).items():
        like = _nearest(target_block=_block(target, block), place=place, source=source, places=places)
        for name, domain in target.parameters.items():
            owner, _, aspect = name.rpartition("/")
            if owner == block:
                value = _value(genome, f"{like}/{aspect}", source, domain, aspect)
                made[name] = domain[0] if value is None else value
    return target.normal(made)


def _value(
    genome: Mapping[str, Value], name: str, source: PlanSpace, domain: tuple[Value, ...], aspect: str
) -> Value | None:
    """What the source has, where the target can have it; buckets by their place in the domain."""
    if name not in genome:
        return "native" if aspect == "method" and "native" in domain else None
    if aspect == "bucket":
        return domain[min(source.parameters[name].index(genome[name]), len(domain) - 1)]
    if genome[name] in domain:
        return genome[name]
    return "native" if aspect == "method" and "native" in domain else None


def _places(space: PlanSpace) -> dict[str, float]:
    """Where in backward each block is: the share of bytes before its middle variable."""
    workload = space.workload
    before: dict[str, float] = {}
    passed = 0
    for name in workload.ready_order:
        before[name] = passed / max(1, workload.bytes)
        passed += workload.variable(name).bytes
    return {block.name: before[block.variables[len(block.variables) // 2].name] for block in space.blocks}


def _block(space: PlanSpace, name: str) -> Block:
    return next(block for block in space.blocks if block.name == name)


def _nearest(target_block: Block, place: float, source: PlanSpace, places: Mapping[str, float]) -> str:
    """The source's block of the same kind (dense or row-wise, one variable or several), nearest in place."""

    def distance(block: Block) -> tuple[bool, bool, float]:
        alone = (len(block.variables) == 1) != (len(target_block.variables) == 1)
        return block.dense != target_block.dense, alone, abs(places[block.name] - place)

    return min(source.blocks, key=distance).name

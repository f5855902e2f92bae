"""The population of candidates: when it stops, and what can join it."""

from __future__ import annotations

import math
from random import Random

from clusters import uneven_cluster

from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Constants, Replay, overlapped_step_time
from lightning_autosync.search.population import Population
from lightning_autosync.workload import Variable, Workload

WORKLOAD = Workload(name="four", variables=tuple(Variable(name=f"v{n}", shape=(60, 70)) for n in range(4)))
CLUSTER = uneven_cluster(4)


def test_a_population_stops_when_it_is_told_to() -> None:
    asked = iter([False] * 5 + [True] * 100)
    population = Population(PlanSpace(WORKLOAD, CLUSTER), Constants(), 64, stop=lambda: next(asked))
    population.start(Random(0))
    found = len(population.candidates)
    assert 0 < found <= 5
    population.grow(8, lambda ones: [one.rough for one in ones], Random(0))
    population.refine(8, lambda ones: [one.rough for one in ones], Random(0))
    assert len(population.candidates) == found


def test_any_plan_can_be_a_candidate_with_the_replays_price() -> None:
    population = Population(PlanSpace(WORKLOAD, CLUSTER), Constants(), 64)
    plan = builders.byteps(WORKLOAD, CLUSTER, bucket_bytes=1024)
    candidate = population.add_plan(plan, "byteps")
    assert candidate is not None
    schedule = compile_plan(plan, WORKLOAD, CLUSTER)
    assert population.precise(candidate) == math.log(Replay(WORKLOAD, CLUSTER).predict(schedule).step_time)
    other = plan.model_copy(update={"world_size": 3})
    assert population.add_plan(other.model_copy(update={"groups": plan.groups[:1]}), "cut") is None


def test_prices_with_overlap_are_those_of_steps_that_overlap() -> None:
    workload = WORKLOAD.model_copy(update={"forward_time": 0.004, "backward_time": 0.008})
    population = Population(PlanSpace(workload, CLUSTER), Constants(), 64, overlaps=True)
    plan = builders.byteps(workload, CLUSTER, bucket_bytes=1024)
    candidate = population.add_plan(plan, "byteps")
    assert candidate is not None
    schedule, replay = compile_plan(plan, workload, CLUSTER), Replay(workload, CLUSTER)
    seconds = overlapped_step_time(schedule, workload, replay)
    assert population.precise(candidate) == math.log(seconds)
    assert seconds < replay.predict(schedule).step_time

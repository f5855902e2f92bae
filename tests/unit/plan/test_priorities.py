"""Messages of the first parameters leave first, unless the plan says otherwise."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.plan.schedule import Schedule, first_parameters_first
from lightning_autosync.workload import Variable, Workload

NAMES = ("first", "second", "third")


def schedule(priority: int = 0) -> Schedule:
    cluster = ClusterSpec.uniform(2, bandwidth="1 Gbit/s")
    variables = tuple(Variable(name=name, shape=(100,), ready=place) for place, name in enumerate(NAMES[::-1]))
    workload = Workload(name="three", variables=variables, backward_time=3.0)
    plan = builders.build("packed_trees", workload, cluster, bucket_bytes=1)
    groups = [group.model_copy(update={"priority": priority * place}) for place, group in enumerate(plan.groups)]
    return compile_plan(plan.model_copy(update={"groups": tuple(groups)}), workload, cluster)


def test_the_order_of_parameters_is_that_of_priorities() -> None:
    made = first_parameters_first(schedule(), NAMES)
    by_priority = sorted(made.messages, key=lambda message: -message.priority)
    assert [message.variables for message in by_priority] == [(name,) for name in NAMES]
    assert [message.index for message in made.messages] == [0, 1, 2]


def test_priorities_of_a_plan_stay() -> None:
    given = schedule(priority=2)
    assert first_parameters_first(given, NAMES) is given

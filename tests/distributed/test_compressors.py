"""Lossy compressors train well, keep replicas equal, and remember what they lost."""

from __future__ import annotations

import digits
import pytest
from clusters import shared_nodes, uneven_cluster
from digits import network
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from plans import plans
from sweeps import examples

from lightning_autosync.plan import Compressor, Partition, builders
from lightning_autosync.workload import describe

EPOCHS = 12
COMPRESSORS = {
    "none": Compressor(),
    "fp16": Compressor(kind="fp16"),
    "bf16": Compressor(kind="bf16"),
    "int8": Compressor(kind="int8"),
    "topk": Compressor(kind="topk", ratio=0.05),
    "powersgd": Compressor(kind="powersgd", rank=2),
}


@pytest.fixture(scope="module")
def accuracies(pool) -> dict[tuple[str, str], tuple[float, float]]:
    """Accuracy and largest difference between replicas, by compressor and topology."""
    cluster = uneven_cluster(4)
    workload = describe(network())
    cases = [(kind, topology) for topology in ("native", "star") for kind in COMPRESSORS]
    made = [
        builders.all_reduce(workload, cluster, topology=topology, compressor=COMPRESSORS[kind]).to_dict()
        for kind, topology in cases
    ]
    answers = pool.run(digits.accuracies, plans=made, cluster=cluster.to_dict(), epochs=EPOCHS)[:4]
    worst = [max(rank[case][1] for rank in answers) for case in range(len(cases))]
    return {case: (answers[0][place][0], worst[place]) for place, case in enumerate(cases)}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["native", "star"])
@pytest.mark.parametrize("kind", [kind for kind in COMPRESSORS if kind != "none"])
def test_accuracy_within_a_point_of_uncompressed(accuracies, kind: str, topology: str) -> None:
    exact, _ = accuracies["none", topology]
    compressed, difference = accuracies[kind, topology]
    assert exact > 0.95
    assert compressed >= exact - 0.01
    assert difference < 1e-5


@pytest.mark.slow
@examples(5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_lossy_plans_learn_and_keep_replicas_equal(pool, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    cluster = shared_nodes(size)
    workload = describe(network())
    drawn = [data.draw(plans(workload, size, lossy=True)) for _ in range(2)]
    arguments = {"plans": [plan.to_dict() for plan in drawn], "cluster": cluster.to_dict(), "epochs": 3}
    for found in pool.run(digits.accuracies, **arguments)[:size]:
        for plan, (accuracy, difference) in zip(drawn, found, strict=True):
            assert difference < 1e-5, plan.describe()
            assert accuracy > 0.15, plan.describe()  # a guess is right in 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_shards_of_encoded_collectives_all_travel(pool, kind: str) -> None:
    cluster = uneven_cluster(3)
    workload = describe(network())
    plan = builders.all_reduce(workload, cluster, compressor=COMPRESSORS[kind])
    groups = [group.model_copy(update={"partition": Partition(shards=2)}) for group in plan.groups]
    cut = plan.model_copy(update={"groups": tuple(groups)})
    arguments = {"plans": [cut.to_dict()], "cluster": cluster.to_dict(), "epochs": 1}
    for ((_, difference),) in pool.run(digits.accuracies, **arguments)[:3]:
        assert difference < 1e-5

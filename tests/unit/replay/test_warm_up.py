"""After the warm-up no prediction compiles anything."""

from __future__ import annotations

import importlib
import pkgutil

from clusters import uneven_cluster
from numba.core.dispatcher import Dispatcher

from lightning_autosync import replay
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.replay import Constants, Replay, warm_up
from lightning_autosync.workload import Variable, Workload


def dispatchers() -> dict[str, Dispatcher]:
    modules = [
        importlib.import_module(f"{replay.__name__}.{one.name}") for one in pkgutil.iter_modules(replay.__path__)
    ]
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher)
    }


def test_after_it_no_prediction_compiles_anything() -> None:
    warm_up()
    before = {name: len(one.signatures) for name, one in dispatchers().items()}
    assert before
    table = Variable(name="table", shape=(500, 4), kind="row_sparse", rows=20)
    dense = [Variable(name=f"v{n}", shape=(60, 70)) for n in range(3)]
    workload = Workload(name="some", variables=(table, *dense), forward_time=0.01, backward_time=0.02)
    racks = ClusterSpec.racks(2, 2, bandwidth=1e8, uplink=5e7, devices=2)
    data = uneven_cluster(4).to_dict()
    data["nodes"][1]["speed"] = 0.5
    for cluster in (uneven_cluster(4), racks, ClusterSpec.from_dict(data)):
        for constants in (Constants(), Constants(cores=2, burst=1e5, accelerated=True)):
            replay = Replay(workload, cluster, constants)
            for build in (builders.all_reduce, builders.packed_trees, builders.hierarchical, builders.parallax):
                schedule = compile_plan(build(workload, cluster), workload, cluster)
                for detail in ("fluid", "frames"):
                    replay.predict(schedule, detail)
    assert {name: len(one.signatures) for name, one in dispatchers().items()} == before

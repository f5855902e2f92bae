"""Loads the replay's compiled code before it is needed."""

from __future__ import annotations

from functools import cache

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.replay.replay import Replay
from lightning_autosync.workload import Variable, Workload


@cache
def warm_up() -> None:
    """Predict a tiny step, so that later predictions of this process take no time to load or compile code.

    The first call on a machine compiles, which takes about 20 seconds of a core. Later processes load the result from
    numba's cache beside this package, in a fraction of a second. Where that folder cannot be written, numba keeps its
    cache in the user's.
    """
    workload = Workload(name="tiny", variables=(Variable(name="one", shape=(1000,)),))
    cluster = ClusterSpec.uniform(3, bandwidth=1e9)
    replay = Replay(workload, cluster)
    for name in ("all_reduce", "byteps"):
        schedule = compile_plan(builders.build(name, workload, cluster), workload, cluster)
        replay.predict(schedule, "fluid")
        replay.predict(schedule, "frames")

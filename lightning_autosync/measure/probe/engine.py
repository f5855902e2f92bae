"""What the engine adds to a step on every rank's main thread: core-seconds a gradient and a collective."""

from __future__ import annotations

import statistics
import time
from contextlib import closing

import torch
import torch.distributed as dist

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.measure.models.paced import PacedModule
from lightning_autosync.plan import Group, SyncPlan, compile_plan
from lightning_autosync.workload import Variable, Workload, variable_names

_FEW, _MANY = 8, 72
_STEPS = 8
_TIMEOUT = 60.0


def measure_engine() -> dict[str, float]:
    """Core-seconds of the main thread: ``gradient_core`` for each gradient, with autograd around its hook;
    ``launch_core`` for each collective. Collective.

    They are differences between steps of tiny gradients: many against few in one message, and many messages
    against one. Gradients come without a pause, as they do where cores are short and their cost matters.
    """
    few, many, apart = _step(_FEW, 1), _step(_MANY, 1), _step(_MANY, _MANY)
    return {
        "gradient_core": max(0.0, many - few) / (_MANY - _FEW),
        "launch_core": max(0.0, apart - many) / (_MANY - 1),
    }


def _step(gradients: int, messages: int) -> float:
    """Core-seconds of the main thread in a backward pass, the median of some; mean over ranks."""
    # Times of their own keep the gradients apart in autograd, as those of layers are.
    variables = [Variable(name=f"v{number}", shape=(16,), ready=number * 1e-9) for number in range(gradients)]
    workload = Workload(name="probe", variables=tuple(variables), backward_time=gradients * 1e-9)
    cluster = ClusterSpec.uniform(dist.get_world_size(), bandwidth=1e9, name="probe")
    share = gradients // messages
    groups = [
        Group(name=f"g{number}", variables=tuple(v.name for v in variables[number * share : (number + 1) * share]))
        for number in range(messages)
    ]
    plan = SyncPlan(workload=workload.variables_fingerprint, world_size=dist.get_world_size(), groups=tuple(groups))
    module, seed = PacedModule(workload), torch.tensor(0)
    engine = Engine(variable_names(module), compile_plan(plan, workload, cluster), cluster=cluster, timeout=_TIMEOUT)
    times = []
    with closing(engine):
        for _ in range(_STEPS):
            loss = module(seed)
            start = time.thread_time()
            loss.backward()
            times.append(time.thread_time() - start)
            module.zero_grad()
    return statistics.mean(gather_json(statistics.median(times[1:])))

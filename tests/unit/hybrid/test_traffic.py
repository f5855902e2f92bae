"""The traffic that the cost model states is the traffic that a job logs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy
import pytest
import torch
import torch.distributed as dist
from collective_traffic import TrafficLog, pretended_job, words_at_least
from hypothesis import given
from hypothesis import strategies as st
from sweeps import sweep
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_autosync.hybrid.conversions import COLLECTIVES, HANDED, MADE, TAKEN, all_states, local_size, traffic
from lightning_autosync.hybrid.execution.boxing import change_layout
from lightning_autosync.hybrid.execution.layouts import Layout, local_shape
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[LiveMesh]:
    sizes: tuple[int, ...] = request.param
    plan = HybridPlan(mesh=sizes, layers=(LayerPlan(module="", signature=("dp",) * len(sizes)),))
    with pretended_job(plan.world_size):
        yield LiveMesh(plan)


def test_collectives_are_logged_with_their_groups() -> None:
    with pretended_job(4):
        pair = dist.new_group([0, 2])
        with FakeTensorMode(), TrafficLog() as log:
            value = torch.ones(8, 4)
            dist.all_reduce(value)
            dist.all_reduce(value, group=pair)
            dist.all_to_all_single(torch.empty(8, 4), value)
    assert [(logged.collective, logged.ranks, logged.sent) for logged in log.collectives] == [
        ("all_reduce", (0, 1, 2, 3), 192.0),
        ("all_reduce", (0, 2), 128.0),
        ("all_to_all", (0, 1, 2, 3), 96.0),
    ]
    assert log.bytes == 416.0


def test_unknown_collectives_are_refused() -> None:
    with (
        pretended_job(2),
        TrafficLog(),
        pytest.raises(NotImplementedError, match="c10d::broadcast_ is not a known collective"),
    ):
        dist.broadcast(torch.ones(2), 0)


@pytest.mark.parametrize("has_samples", [True, False])
@pytest.mark.parametrize("job", sweep([(4,), (2, 3), (2, 2, 2)], [(4,)], ids=str), indirect=True)
def test_changes_of_layout_send_what_is_stated(job: LiveMesh, has_samples: bool) -> None:
    shape = (3, 24, 24)
    size = 4 * math.prod(shape)
    pairs = [*product(all_states(MADE, len(job.sizes)), all_states(HANDED, len(job.sizes)))]
    pairs += product(all_states(HANDED, len(job.sizes)), all_states(TAKEN, len(job.sizes)))
    for source, goal in dict.fromkeys(pairs[:: 1 if len(pairs) < 400 else 17]):
        sends = traffic(job.sizes, (source,), (goal,), has_samples)
        layout = Layout(source, 0 if has_samples else None, 2)
        with FakeTensorMode():
            value = torch.ones(local_shape(shape, layout, job.sizes), requires_grad=True)
            assert 4 * value.numel() == pytest.approx(size * local_size(source, job.sizes, has_samples))
            with TrafficLog() as forward:
                made = change_layout(value, layout, goal, job)
            with TrafficLog() as backward:
                made.sum().backward()
        for log, stated in ((forward, sends.forward), (backward, sends.backward)):
            assert _sent(log, job) == _stated(stated[0, 0] * size), (source, goal)


def _sent(log: TrafficLog, job: LiveMesh) -> Counter[tuple[int, str]]:
    found: Counter[tuple[int, str]] = Counter()
    for logged in log.collectives:
        dimension = next(k for k in job.dimensions if set(job.peers((k,))) == set(logged.ranks))
        found[dimension, logged.collective] += round(logged.sent)
    return found


def _stated(sends: numpy.ndarray) -> Counter[tuple[int, str]]:
    found: Counter[tuple[int, str]] = Counter()
    for (dimension, kind), size in numpy.ndenumerate(sends):
        if size:
            found[dimension, COLLECTIVES[kind]] += round(size)
    return found


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_a_bound_of_words_is_below_what_meshes_send(rows: int, inner: int, columns: int) -> None:
    """A product of matrices on any mesh of p1 x p2 x p3 ranks gathers two faces and sums the third."""
    sizes = [float(size * 64) for size in (rows, inner, columns)]
    for ranks in (1, 2, 4, 8, 64):
        least = words_at_least(*sizes, ranks)
        meshes = [(a, b, ranks // (a * b)) for a, b in product((1, 2, 4, 8), repeat=2) if ranks % (a * b) == 0]
        assert least <= min(_sent_by_mesh(sizes, mesh) for mesh in meshes) * (1 + 1e-9)


def _sent_by_mesh(sizes: list[float], mesh: tuple[int, int, int]) -> float:
    (m, k, n), (p, q, r) = sizes, mesh
    faces = ((m * k / (p * q), r), (k * n / (q * r), p), (m * n / (p * r), q))
    return sum(face * (1 - 1 / ranks) for face, ranks in faces)


def test_cubes_send_less_the_more_ranks_there_are() -> None:
    words = [words_at_least(1024, 1024, 1024, ranks) for ranks in (8, 64, 512)]
    # 3 (1 - 1/p) (n^3 / P)^(2/3) with p = P^(1/3)
    assert words == pytest.approx([3 * (1 - 1 / p) * (1024 / p) ** 2 for p in (2, 4, 8)])

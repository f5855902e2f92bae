"""Running averages of optimizers at barriers: averaged as the parameters are, or left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_group_average import together
from torch import Tensor, nn

from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.averaging_worker import AveragingWorker, PartialReduce
from lightning_autosync.relaxed.model_state import ModelTensors
from lightning_autosync.relaxed.periodic import Periodic
from lightning_autosync.relaxed.transport.mesh import Mesh

STEPS = [3, 1, 0, 2]
"""Of each rank before the barrier."""
SELDOM = {"mode": "periodic", "period": 100, "outer": "averaging"}
PAIRS = {"mode": "partial_reduce", "group_size": 2, "weighting": "constant"}


def gradients(module: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * rank + step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def momenta(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state["momentum_buffer"].clone() for state in optimizer.state.values()]


def train(settings: dict[str, Any]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Every rank's momenta before the barrier and after it."""

    def play(mesh: Mesh) -> tuple[list[Tensor], list[Tensor]]:
        module = nn.Linear(3, 2).double()
        consistency = Consistency(**settings)
        kind = PartialReduce if consistency.mode == "partial_reduce" else Periodic
        worker: AveragingWorker = kind(mesh, ModelTensors.of(module), consistency, timeout=20.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        worker.start()
        for step in range(STEPS[mesh.rank]):
            gradients(module, mesh.rank, step)
            worker.step(optimizer, 4)
        before = momenta(optimizer)
        worker.finish()
        worker.drain()
        after = momenta(optimizer)
        # A second barrier, before which nobody has stepped, changes nothing.
        worker.resume()
        worker.drain()
        assert all(torch.equal(one, other) for one, other in zip(after, momenta(optimizer), strict=True))
        worker.close()
        return before, after

    return together(len(STEPS), play)


def test_a_barrier_averages_momenta_by_samples() -> None:
    found = train({**SELDOM, "momentum": "average"})
    for place in range(2):
        mean = sum(count * before[place] for count, (before, _) in zip(STEPS, found, strict=True) if count) / sum(STEPS)
        for rank in (0, 1, 3):
            torch.testing.assert_close(found[rank][1][place], mean)
    assert found[2] == ([], [])


@pytest.mark.parametrize("settings", [SELDOM, PAIRS], ids=["periodic", "partial reduce"])
def test_who_averages_momenta_leaves_a_barrier_with_the_same(settings: dict[str, Any]) -> None:
    found = [after for _, after in train({**settings, "momentum": "average"})]
    for rank in (1, 3):
        assert all(torch.equal(one, other) for one, other in zip(found[0], found[rank], strict=True))


def test_local_momenta_stay_as_they_are() -> None:
    for before, after in train(SELDOM):
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("settings", [{**SELDOM, "period": 1}, PAIRS], ids=["periodic", "partial reduce"])
def test_a_rank_without_state_yet_averages_with_the_others(settings: dict[str, Any]) -> None:
    """Rank 0's first batch has no loss, so its optimizer has nothing yet."""

    def play(mesh: Mesh) -> list[list[Tensor]]:
        module = nn.Linear(3, 2).double()
        consistency = Consistency(**settings, momentum="average")
        kind = PartialReduce if consistency.mode == "partial_reduce" else Periodic
        worker: AveragingWorker = kind(mesh, ModelTensors.of(module), consistency, timeout=20.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        worker.start()
        found = []
        for step in range(2):
            if mesh.rank or step:
                gradients(module, 0, step)
            worker.step(optimizer, 4)
            found.append(momenta(optimizer))
        worker.drain()
        worker.close()
        return found

    (nothing, first), (halved, second) = together(2, play)
    assert nothing == []
    module = nn.Linear(3, 2).double()
    gradients(module, 0, 0)
    for momentum, parameter in zip(halved, module.parameters(), strict=True):
        torch.testing.assert_close(momentum, parameter.grad / 2)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))

"""Partial reduce and periodic averaging among real processes, against DDP and against the papers' formulas."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import relaxed_calls
import torch
from relaxed_calls import LR, local_step
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from training import Net, batches

_keys = itertools.count()
EXACT = 1e-12

FULL = {"mode": "partial_reduce", "group_size": 3, "weighting": "constant"}
PAIRS = {"mode": "partial_reduce", "group_size": 2, "weighting": "dynamic"}


def periodic(period: int, outer: str = "averaging", **fields: Any) -> dict[str, Any]:
    return {"mode": "periodic", "period": period, "outer": outer, **fields}


def train(pool, settings: dict[str, Any], epochs: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    size = len(epochs[0])
    arguments = {"key": f"relaxed-{next(_keys)}", "settings": settings, "size": size, "epochs": epochs, **options}
    return pool.run(relaxed_calls.train_relaxed, **arguments)[:size]


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def replicas(size: int) -> tuple[list[Net], list[torch.optim.Optimizer], list[Any]]:
    torch.manual_seed(0)
    start = Net().double()
    modules = [copy.deepcopy(start) for _ in range(size)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=LR) for module in modules]
    return modules, optimizers, [batches(rank, 100, torch.float64) for rank in range(size)]


def by_hand(size: int, steps: int, period: int, update: Callable[[list[Tensor]], list[Tensor]]) -> list[list[float]]:
    """Replicas of one process, whose models (flat) ``update`` replaces after each period."""
    modules, optimizers, data = replicas(size)
    for step in range(1, steps + 1):
        for module, optimizer, stream in zip(modules, optimizers, data, strict=True):
            local_step(module, optimizer, next(stream))
            optimizer.step()
        if step % period == 0:
            flats = [parameters_to_vector(module.parameters()).detach() for module in modules]
            for module, flat in zip(modules, update(flats), strict=True):
                # A copy: parameters become views of what they are given.
                vector_to_parameters(flat.clone(), module.parameters())
    return [parameters_to_vector(module.parameters()).tolist() for module in modules]


def initial() -> Tensor:
    torch.manual_seed(0)
    return parameters_to_vector(Net().double().parameters()).detach()


@pytest.mark.parametrize("settings", [periodic(1), FULL], ids=["periodic", "partial reduce of all"])
def test_averaging_after_every_step_equals_ddp(pool, settings: dict[str, Any]) -> None:
    reference = pool.run(relaxed_calls.train_ddp, size=3, steps=6)[0]
    for found in train(pool, settings, [[6, 6, 6]]):
        assert distance(found["weights"], reference) < EXACT
        assert found["progress"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("settings", [periodic(1), FULL], ids=["periodic", "partial reduce of all"])
def test_averaged_momentum_equals_ddp_with_momentum(pool, settings: dict[str, Any]) -> None:
    reference = pool.run(relaxed_calls.train_ddp, size=3, steps=6, momentum=0.9)[0]
    for found in train(pool, settings | {"momentum": "average"}, [[6, 6, 6]], momentum=0.9):
        assert distance(found["weights"], reference) < EXACT


def test_local_momentum_differs_from_averaged_momentum(pool) -> None:
    # Between averages of every step it would not: both are linear in the momenta.
    local = train(pool, periodic(2), [[4, 4, 4]], momentum=0.9)[0]
    averaged = train(pool, periodic(2) | {"momentum": "average"}, [[4, 4, 4]], momentum=0.9)[0]
    assert distance(local["weights"], averaged["weights"]) > 1e-6


@pytest.mark.parametrize(
    "neutral",
    [
        periodic(3, "slowmo", outer_lr=1.0, outer_momentum=0.0),
        periodic(3, "diloco", outer_lr=1.0, outer_momentum=0.0),
        periodic(3, "bmuf", outer_lr=1.0, outer_momentum=0.0),
    ],
    ids=lambda settings: settings["outer"],
)
def test_neutral_outer_updates_are_local_sgd(pool, neutral: dict[str, Any]) -> None:
    expected = by_hand(3, 7, 3, lambda flats: [sum(flats) / 3] * 3)
    mean = torch.tensor(expected, dtype=torch.float64).mean(dim=0).tolist()
    for settings in (neutral, periodic(3)):
        for found in train(pool, settings, [[7, 7, 7]]):
            assert distance(found["weights"], mean) < EXACT


def test_easgd_moves_replicas_and_centre_as_its_equations_say(pool) -> None:
    alpha = 0.2
    centre = initial()

    def update(flats: list[Tensor]) -> list[Tensor]:
        nonlocal centre
        before = centre
        centre = before + alpha * sum(flat - before for flat in flats)
        return [flat - alpha * (flat - before) for flat in flats]

    expected = by_hand(3, 4, 2, update)
    mean = torch.tensor(expected, dtype=torch.float64).mean(dim=0).tolist()
    for found in train(pool, periodic(2, "easgd", alpha=alpha), [[4, 4, 4]]):
        assert distance(found["weights"], mean) < EXACT
    assert len({tuple(flat) for flat in expected}) == 3


def test_slowmo_follows_its_algorithm(pool) -> None:
    slow, anchor = torch.zeros_like(initial()), initial()

    def update(flats: list[Tensor]) -> list[Tensor]:
        nonlocal slow, anchor
        slow = 0.6 * slow + (anchor - sum(flats) / 3) / LR
        anchor = anchor - 0.9 * LR * slow
        return [anchor] * 3

    expected = by_hand(3, 8, 2, update)[0]
    for found in train(pool, periodic(2, "slowmo", outer_lr=0.9, outer_momentum=0.6), [[8, 8, 8]]):
        assert distance(found["weights"], expected) < EXACT


def test_bmuf_filters_the_updates_of_blocks(pool) -> None:
    filtered, anchor = torch.zeros_like(initial()), initial()

    def update(flats: list[Tensor]) -> list[Tensor]:
        nonlocal filtered, anchor
        filtered = (1 - 1 / 3) * filtered + (sum(flats) / 3 - anchor)
        anchor = anchor + filtered
        return [anchor] * 3

    expected = by_hand(3, 8, 2, update)[0]
    for found in train(pool, periodic(2, "bmuf"), [[8, 8, 8]]):
        assert distance(found["weights"], expected) < EXACT


def test_diloco_is_nesterov_sgd_on_pseudo_gradients(pool) -> None:
    anchor = torch.nn.Parameter(initial())
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)

    def update(flats: list[Tensor]) -> list[Tensor]:
        anchor.grad = anchor.detach() - sum(flats) / 3
        outer.step()
        return [anchor.detach().clone()] * 3

    expected = by_hand(3, 8, 2, update)[0]
    for found in train(pool, periodic(2, "diloco"), [[8, 8, 8]]):
        assert distance(found["weights"], expected) < EXACT


def test_fragments_are_averaged_in_turn_and_together_make_local_sgd(pool) -> None:
    # Between two rounds of a fragment lie as many steps as without fragments, so each is averaged as often.
    found = train(pool, periodic(4, fragments=2), [[8, 8, 8]])
    assert len({one["drained"][0] for one in found}) == 1
    groups = [generation for generation, _, _ in found[0]["groups"]]
    assert len(set(groups)) == 4
    whole = train(pool, periodic(4, fragments=1), [[8, 8, 8]])
    assert 0 < distance(found[0]["weights"], whole[0]["weights"]) < 0.1


def test_warm_up_averages_every_step(pool) -> None:
    reference = pool.run(relaxed_calls.train_ddp, size=3, steps=4)[0]
    for found in train(pool, periodic(50, "diloco", warmup=4), [[4, 4, 4]]):
        assert distance(found["weights"], reference) < EXACT


def test_members_of_a_group_end_equal_to_the_last_bit(pool) -> None:
    found = train(pool, PAIRS, [[12, 9, 12, 7]], momentum=0.9, pauses=[0.0, 0.004, 0.0, 0.008])
    models: dict[int, set[str]] = {}
    members: dict[int, list[int]] = {}
    for rank, one in enumerate(found):
        for generation, ranks, digest in one["groups"]:
            assert rank in ranks
            assert members.setdefault(generation, ranks) == ranks
            models.setdefault(generation, set()).add(digest)
    assert all(len(digests) == 1 for digests in models.values())
    assert sum(len(ranks) > 1 for ranks in members.values()) >= 12


@pytest.mark.parametrize(
    "settings",
    [
        PAIRS,
        PAIRS | {"group_size": 3, "wait": 0.002, "momentum": "average"},
        periodic(3, "diloco"),
        periodic(4, "easgd"),
        periodic(4, "slowmo", fragments=2),
        periodic(2, "averaging", overhead=0.1),
    ],
    ids=["pairs", "elastic", "diloco", "easgd", "slowmo by fragments", "adapting"],
)
def test_uneven_steps_end_and_drains_leave_all_equal(pool, settings: dict[str, Any]) -> None:
    epochs = [[5, 9, 0, 7], [8, 1, 6, 6]]
    found = train(pool, settings, epochs, momentum=0.9, norm=True, pauses=[0.0, 0.0, 0.005, 0.002])
    for epoch in range(2):
        assert len({one["drained"][epoch] for one in found}) == 1
    assert all(a <= b for one in found for a, b in itertools.pairwise(one["progress"]))


@pytest.mark.parametrize(
    "settings",
    [
        FULL,
        periodic(2, "diloco"),
        pytest.param(periodic(2, "slowmo"), marks=pytest.mark.slow),
        pytest.param(periodic(3, "easgd"), marks=pytest.mark.slow),
        periodic(3, "bmuf", fragments=3),
    ],
    ids=["partial reduce of all", "diloco", "slowmo", "easgd", "bmuf by fragments"],
)
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(pool, settings: dict[str, Any]) -> None:
    epochs = [[5, 5, 5], [4, 4, 4]]
    through = train(pool, settings, epochs, norm=True)
    resumed = train(pool, settings, epochs, norm=True, resume_after=1)
    for one, other in zip(through, resumed, strict=True):
        assert one["weights"] == other["weights"]
        assert one["progress"] == other["progress"]

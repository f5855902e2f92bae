"""Paced compute: a workload's parameters, gradients on time, and no core used."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_autosync.errors import WorkloadError
from lightning_autosync.measure.models import paced
from lightning_autosync.measure.models.paced import PacedModule
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.workload import Variable, Workload, capture, catalogue, describe
from lightning_autosync.workload.scaling import scaled, with_compute

SEED = torch.tensor(7)
LATE = 0.5
"""Seconds by which a busy machine may delay what is paced."""


def workload(*variables: Variable, forward: float = 0.0, backward: float = 0.0, optimizer: float = 0.0) -> Workload:
    return Workload(
        name="made", variables=variables, forward_time=forward, backward_time=backward, optimizer_time=optimizer
    )


def step(module: PacedModule, seed: torch.Tensor = SEED) -> None:
    module.zero_grad()
    module(seed).backward()


@pytest.mark.parametrize("name", ["vgg16", "densenet121", "bert_base", "gpt", "ncf"])
def test_parameters_are_the_workloads(name: str) -> None:
    expected = scaled(catalogue.build(name), 0.01)
    found = describe(PacedModule(expected))
    assert [(v.name, v.shape, v.dtype) for v in found.variables] == [
        (v.name, v.shape, v.dtype) for v in expected.variables
    ]


def test_a_recipe_with_a_name_gives_it_to_its_workload() -> None:
    recipe = {"kind": "paced", "catalogue": "vgg16", "scale": 0.01}
    assert model_of({**recipe, "name": "vgg_like"}).workload("rows").name == "vgg_like"
    assert model_of(recipe).workload("rows").name == "vgg16"


def test_dtypes_and_scalars() -> None:
    module = PacedModule(
        workload(Variable(name="a.scale", shape=()), Variable(name="narrow", shape=(3,), dtype="bfloat16"))
    )
    step(module)
    assert module.get_parameter("a.scale").grad is not None
    gradient = module.get_parameter("narrow").grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16


def test_a_captured_profile_is_the_one_that_was_given() -> None:
    """Ready times are never early, and as late as a busy machine makes them."""
    given = with_compute(scaled(catalogue.build("vgg16"), 0.001), 0.15)
    module = PacedModule(given)
    found = capture(module, SEED, steps=3, warmup=1, training_step=lambda seed: module(seed))
    assert -0.001 < found.forward_time - given.forward_time < LATE
    assert -0.001 < found.backward_time - given.backward_time < LATE
    for variable in given.variables:
        ready = found.variable(variable.name).ready
        assert ready is not None
        assert variable.ready is not None
        assert -0.001 < ready - variable.ready < LATE


def test_gradients_of_one_moment_appear_in_ready_order() -> None:
    """Autograd shuffles three or more gradients of one function."""
    names = [f"v{number}" for number in range(7)]
    given = workload(*(Variable(name=name, shape=(8,), ready=0.0) for name in names))
    module = PacedModule(given)
    seen: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    step(module)
    assert tuple(seen) == given.ready_order == tuple(reversed(names))


def test_no_gradient_is_copied() -> None:
    given = workload(*(Variable(name=f"v{number}", shape=(8,), ready=0.0) for number in range(5)))
    module = PacedModule(given)

    def places() -> list[int]:
        step(module)
        return [parameter.grad.data_ptr() for parameter in module.parameters() if parameter.grad is not None]

    first = places()
    assert len(first) == 5
    assert places() == first


def test_time_passes_and_no_core_is_used() -> None:
    module = PacedModule(workload(Variable(name="a", shape=(8,), ready=0.2), forward=0.1, backward=0.3))
    step(module)
    start, used = time.monotonic(), time.process_time()
    step(module)
    assert 0.4 <= time.monotonic() - start < 0.4 + LATE
    assert time.process_time() - used < 0.05


class Clock:
    """In place of the module ``time``: it passes by sleeping only."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("speed", [1.0, 0.5, 4.0])
def test_a_slow_node_takes_longer_for_all_that_it_computes(monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
    clock, ready = Clock(), []
    monkeypatch.setattr(paced, "time", clock)
    variables = Variable(name="a", shape=(8,), ready=0.2), Variable(name="b", shape=(8,))
    module = PacedModule(workload(*variables, forward=0.1, backward=0.3, optimizer=0.05), speed)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(clock.now))
    module(SEED).backward()
    assert ready == pytest.approx([0.3 / speed, 0.4 / speed])
    assert clock.now == pytest.approx(0.4 / speed)
    module.step_optimizer()
    assert clock.now == pytest.approx(0.45 / speed)


def test_gradients_come_in_ready_order() -> None:
    variables = [Variable(name=name, shape=(4,), ready=ready) for name, ready in (("a", 0.02), ("b", 0.0), ("c", 0.01))]
    module = PacedModule(workload(*variables, Variable(name="d", shape=(4,)), backward=0.03))
    came: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    step(module)
    assert came == ["b", "c", "a", "d"]


def test_a_gradient_is_not_copied() -> None:
    module = PacedModule(workload(Variable(name="a", shape=(1000,))))
    addresses = set()
    for _ in range(3):
        step(module)
        gradient = module.get_parameter("a").grad
        assert gradient is not None
        addresses.add(gradient.data_ptr())
    assert len(addresses) == 1


def test_gradients_follow_the_seed() -> None:
    made = workload(Variable(name="a", shape=(1000,)))
    gradients = []
    for seed in (1, 1, 2):
        module = PacedModule(made)
        step(module, torch.tensor(seed))
        gradients.append(module.get_parameter("a").grad)
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])
    assert 0.4 < gradients[0].abs().mean() < 0.6


TABLE = Variable(name="table.weight", shape=(100, 3), kind="row_sparse", rows=10.0)


def test_a_step_touches_rows_of_its_own() -> None:
    module = PacedModule(workload(TABLE))
    touched = []
    for seed in (1, 2, 1):
        step(module, torch.tensor(seed))
        gradient = module.get_parameter(TABLE.name).grad
        assert gradient is not None
        touched.append(gradient.any(dim=1).nonzero().flatten().tolist())
        gradient.fill_(5.0)  # as a mean over ranks that is written there
    assert touched[0] == touched[2]
    assert touched[0] != touched[1]
    assert [len(rows) for rows in touched] == [10, 10, 10]


def test_sparse_gradients_hold_the_same_rows_as_dense_ones() -> None:
    sparse = PacedModule(workload(TABLE.model_copy(update={"kind": "sparse"})))
    dense = PacedModule(workload(TABLE))
    step(sparse)
    step(dense)
    found, expected = (module.get_parameter(TABLE.name).grad for module in (sparse, dense))
    assert found is not None
    assert found.is_sparse
    assert torch.equal(found.to_dense(), expected)
    assert describe(sparse).variables[0].kind == "sparse"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([Variable(name="a", shape=(2, 2), kind="row_sparse")], "needs `rows`"),
        (
            [Variable(name="a.b", shape=(2,)), Variable(name="a", shape=(2,))],
            "no module has a parameter with this name",
        ),
        ([Variable(name="half", shape=(2,))], "no module has a parameter with this name"),
        ([Variable(name="a.bias", shape=(2,), kind="sparse", rows=1.0)], "allowed for the weight of an embedding only"),
    ],
)
def test_workloads_that_no_module_can_have(variables: list[Variable], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        PacedModule(workload(*variables))

"""Parts of periodic averaging that need no processes: fragments, the adapting period, flat tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.grouping import AdaptivePeriod
from lightning_autosync.relaxed.model_state import (
    FlatView,
    ModelTensors,
    UntrainedTensors,
    flat_type,
    model_bytes,
    optimizer_averages,
    optimizer_slots,
    take_bytes,
)
from lightning_autosync.relaxed.outer_updates import make_outer
from lightning_autosync.relaxed.periodic import _Clock, _rates, cut_fragments, first_ages


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=30), count=st.integers(1, 12))
def test_fragments_cover_all_tensors_in_order(sizes: list[int], count: int) -> None:
    fragments = cut_fragments(sizes, count)
    assert [place for places in fragments for place in places] == list(range(len(sizes)))
    assert len(fragments) == min(count, len(sizes))
    assert all(fragments)


def test_fragments_are_balanced_where_tensors_allow_it() -> None:
    assert cut_fragments([10] * 12, 3) == [range(4), range(4, 8), range(8, 12)]
    assert cut_fragments([100, 1, 1, 1], 2) == [range(1), range(1, 4)]


@given(period=st.integers(1, 60), data=st.data())
def test_each_step_averages_one_fragment_at_most_and_each_fragment_once_a_period(period: int, data) -> None:
    count = data.draw(st.integers(1, period))
    ages = first_ages(count, period)
    turns: list[list[int]] = []
    for _ in range(3 * period):
        ages = [age + 1 for age in ages]
        due = [index for index, age in enumerate(ages) if age >= period]
        ages = [0 if index in due else age for index, age in enumerate(ages)]
        turns.append(due)
    assert all(len(due) <= 1 for due in turns)
    for fragment in range(count):
        steps = [step for step, due in enumerate(turns) if fragment in due]
        assert len(steps) == 3
        assert steps[1] - steps[0] == steps[2] - steps[1] == period


def test_a_period_grows_until_averages_take_their_share() -> None:
    pace = AdaptivePeriod(1, overhead=0.1, longest=1000)
    for _ in range(8):
        pace.report(0.1, 1.9)
        pace.report(0.1, 1.8)  # the last to come, who did not wait
        period = pace.next_period()
    assert period == 162
    assert 1.8 / (period * 0.1 + 1.8) == pytest.approx(0.1)


def test_a_period_shrinks_again_and_stays_within_bounds() -> None:
    pace = AdaptivePeriod(64, overhead=0.5, longest=100)
    found = []
    for _ in range(8):
        pace.report(1.0, 0.01)
        found.append(pace.next_period())
    assert found == [32, 16, 8, 4, 2, 1, 1, 1]
    pace.report(0.001, 1000.0)
    assert pace.next_period() == 2
    for _ in range(10):
        pace.report(0.001, 1000.0)
        pace.next_period()
    assert pace.period == 100
    again = AdaptivePeriod(3, overhead=0.5, longest=100)
    again.restore(**pace.state())
    assert again.state() == pace.state()


def test_without_reports_a_period_stays() -> None:
    assert AdaptivePeriod(7, overhead=0.2, longest=100).next_period() == 7


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))
        self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.shared = nn.Linear(3, 2)
        self.again = self.shared
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("cache", torch.full((2,), float("-inf")), persistent=False)


def test_tensors_of_a_module_count_once_and_say_what_they_are() -> None:
    tensors = ModelTensors.of(Mixed())
    assert len(tensors.parameters) == 6
    assert [buffer.shape for buffer in tensors.buffers] == [(2,), (2,)]
    assert len(tensors.all) == 10


def test_buffers_are_those_that_the_module_has_now() -> None:
    module = Mixed()
    tensors, kept = ModelTensors.of(module), UntrainedTensors(module)
    assert list(kept) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "frozen"]
    assert kept["frozen"] is tensors.frozen[0]
    module.norm.running_mean = 0.9 * module.norm.running_mean + 1.0
    for found in (tensors.buffers[0], tensors.all[-3], kept["norm.running_mean"]):
        assert found is module.norm.running_mean
    with pytest.raises(KeyError):
        kept["cache"]


def test_a_buffer_that_one_of_its_modules_saves_counts() -> None:
    unsaved, saved = nn.Module(), nn.Module()
    unsaved.register_buffer("mean", torch.ones(2), persistent=False)
    saved.register_buffer("mean", unsaved.mean)
    module = nn.ModuleList([unsaved, saved, saved])
    kept = UntrainedTensors(module)
    assert list(kept) == ["1.mean"]
    assert kept["1.mean"] is ModelTensors.of(module).buffers[0] is saved.mean


class Filtered(Mixed):
    """Leaves out a part of itself from checkpoints, as adapters do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("norm")}


def test_buffers_that_a_module_leaves_out_of_its_checkpoints_count() -> None:
    assert len(ModelTensors.of(Filtered()).buffers) == 2


def test_complex_numbers_of_double_precision_keep_it() -> None:
    assert flat_type([torch.ones(3), torch.ones(3, dtype=torch.complex128)]) == torch.float64
    assert flat_type([torch.ones(3), torch.ones(3, dtype=torch.complex64)]) == torch.float32


def test_momenta_of_complex_parameters_are_averages_too() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer_averages(optimizer, [parameter]) == ["momentum_buffer"]
    assert (
        optimizer_slots(optimizer, [parameter], ["momentum_buffer"])[0] is optimizer.state[parameter]["momentum_buffer"]
    )


def test_the_last_exchange_is_known_after_a_drain() -> None:
    clock = _Clock()
    clock.facts()
    clock.exchanged()
    clock.restart()
    assert clock.facts()["exchange_time"] > 0


def test_slow_momentum_follows_the_learning_rate_of_each_tensor() -> None:
    outer = make_outer(Consistency(mode="periodic", period=2, outer="slowmo"), [1, 2], torch.float64)
    outer.begin(torch.zeros(3, dtype=torch.float64))
    mean = torch.full((3,), -1.0, dtype=torch.float64)
    outer.update(mean, mean, 2, [0.1, 0.4])
    model = outer.state["anchor"].clone()
    outer.update(model, model, 2, [0.1, 0.1])
    assert outer.state["momentum"].tolist() == pytest.approx([0.5, 0.125, 0.125])


def test_parameters_have_the_learning_rates_of_their_groups() -> None:
    one, other, untrained = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [other], "lr": 0.3}, {"params": [one], "lr": 0.1}])
    assert _rates(optimizer, [one, other, untrained]) == [0.1, 0.3, 0.0]


def test_parameters_of_an_optimizer_without_learning_rates_have_none() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    del optimizer.param_groups[0]["lr"]
    assert _rates(optimizer, [weight]) == [0.0]


def test_flat_tensors_come_back_as_they_went() -> None:
    source, target = Mixed(), Mixed()
    FlatView(ModelTensors.of(target).parameters).unpack(FlatView(ModelTensors.of(source).parameters).pack())
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other) is one.requires_grad


def test_a_model_travels_as_bytes() -> None:
    source, target = ModelTensors.of(Mixed()).all, ModelTensors.of(Mixed()).all
    payload = bytearray(b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in model_bytes(source)))
    take_bytes(target, memoryview(payload), donor=3)
    assert all(torch.equal(one, other) for one, other in zip(source, target, strict=True))
    with pytest.raises(ExchangeError, match="rank 3 sent a model of"):
        take_bytes(target, memoryview(payload)[:-1], donor=3)


def test_running_averages_have_one_order_even_before_a_first_gradient() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parameters = list(module.parameters())
    optimizer = torch.optim.Adam(parameters)
    module[1](torch.ones(3)).backward()
    optimizer.step()
    names = optimizer_averages(optimizer, parameters)
    assert names == ["exp_avg", "exp_avg_sq"]
    slots = optimizer_slots(optimizer, parameters, names)
    assert [slot if isinstance(slot, int) else tuple(slot.shape) for slot in slots] == [6, 3, (1, 3), (1,)] * 2
    flat = FlatView(slots).pack()
    assert flat.numel() == 2 * sum(parameter.numel() for parameter in parameters)

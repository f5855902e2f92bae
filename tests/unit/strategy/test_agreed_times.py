"""Times of passes travel with the gradients, or in an exchange of their own where no message carries them."""

from __future__ import annotations

import pytest
import torch
from collective_traffic import TrafficLog, pretended_job

from lightning_autosync.engine.notes import MOST, Notes, can_carry
from lightning_autosync.errors import ExchangeError
from lightning_autosync.strategy.tuning import pass_times
from lightning_autosync.strategy.tuning.pass_times import NOTES, AgreedTimes, PassTimes

OWN = PassTimes(0.5, 0.125, 0.25)


def notes_of(memory: torch.Tensor | None = None, rank: int = 1) -> Notes:
    return Notes(torch.zeros(3 * NOTES) if memory is None else memory, rank, 3)


def exchange(notes: Notes, memory: torch.Tensor, *others: list[float]) -> None:
    """What the sum over ranks 0 and 2, which have the numbers of ``others``, leaves."""
    notes.fill()
    memory.view(3, -1)[[0, 2]] += torch.tensor(others)


@pytest.mark.parametrize(
    ("overlaps", "period"),
    [
        (False, (1.25 + 1.5 + 1.375) / 3 - 0.5),  # all ranks wait for rank 0's delay in this pass
        (True, (0.75 + 1.5 + 1.375) / 3),
    ],
)
def test_times_of_all_ranks_come_with_the_gradients_and_without_a_call(overlaps: bool, period: float) -> None:
    memory = torch.full((3 * NOTES,), 7.0)  # what the last exchange left
    notes = notes_of(memory)
    with pretended_job(3, rank=1), TrafficLog() as log:
        times = AgreedTimes(overlaps=overlaps)
        times.share(PassTimes(1.5, 0.0, 0.25), 2, 1, False, False, notes=notes)
        exchange(notes, memory, [1.25, 0.5, 0.0, 2, 1, -2, -1, 0, 1], [1.375, 0.0, 0.0, 2, 1, -2, -1, 1, 0])
        found = times.take()
        assert found.period == pytest.approx(period)
        assert (found.unusual, found.compute) == (0.5, 0.25)
        assert (times.opening, times.priced) == (True, True)
    assert log.collectives == []


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_delay_leaves_no_period_of_zero_or_less(overlaps: bool) -> None:
    """With overlap, the others wait for the delayed rank in the next pass only."""
    memory = torch.zeros(3 * NOTES)
    notes = notes_of(memory)
    with pretended_job(3, rank=1):
        times = AgreedTimes(overlaps=overlaps)
        times.share(PassTimes(0.25, 0.0, 0.125), notes=notes)
        exchange(notes, memory, [4.25, 4.0, 0.0, 0, 0, 0, 0, 0, 0], [0.25, 0.0, 0.0, 0, 0, 0, 0, 0, 0])
        assert times.take().period == 0.25


@pytest.mark.parametrize("overlaps", [False, True])
def test_ranks_whose_long_and_short_passes_take_turns_agree_on_their_mean(overlaps: bool) -> None:
    memory = torch.zeros(3 * NOTES)
    notes = notes_of(memory)
    with pretended_job(3, rank=1):
        times = AgreedTimes(overlaps=overlaps)
        times.share(PassTimes(0.75, 0.0, 0.0), notes=notes)
        exchange(notes, memory, [0.25, *[0.0] * 8], [0.5, *[0.0] * 8])
        assert times.take().period == 0.5


def test_a_rank_that_has_chosen_another_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(3 * NOTES)
    notes = notes_of(memory)
    monkeypatch.setattr(pass_times, "gather_json", lambda own, group: [own, own, [3, 1]])
    with pretended_job(3, rank=1):
        times = AgreedTimes()
        times.share(OWN, 2, 1, notes=notes)
        exchange(notes, memory, [0.0, 0.0, 0.0, 2, 1, -2, -1, 0, 0], [0.0, 0.0, 0.0, 3, 1, -3, -1, 0, 0])
        with pytest.raises(ExchangeError, match=r"rank 2: plan number 3, .* ranks 0, 1: plan number 2"):
            times.take()


@pytest.mark.parametrize("notes", [None, notes_of()], ids=["no message carries them", "the message did not travel"])
def test_times_that_did_not_come_with_gradients_need_the_latency_of_the_links_once(notes: Notes | None) -> None:
    """Where ranks are far from each other, an all-reduce along a ring would take longer than a step."""
    with pretended_job(3, rank=1), TrafficLog() as log:
        times = AgreedTimes()
        times.share(OWN, 2, 1, notes=notes)
        assert times.take() == OWN
    assert [each.collective for each in log.collectives] == ["all_to_all"]


def test_notes_that_nobody_reads_do_not_add_up() -> None:
    memory = torch.zeros(3 * NOTES)
    notes = notes_of(memory)
    notes.write([1.0] * NOTES)
    for _ in range(3):
        exchange(notes, memory, [2.0] * NOTES, [3.0] * NOTES)
    assert notes.of_ranks() == [[2.0] * NOTES, [1.0] * NOTES, [3.0] * NOTES]


def test_16_bit_messages_carry_none_and_neither_do_very_many_ranks() -> None:
    assert can_carry(torch.float32, MOST)
    assert not can_carry(torch.float32, 0)
    assert not can_carry(torch.float32, MOST + 1)
    assert not can_carry(torch.bfloat16, 10)

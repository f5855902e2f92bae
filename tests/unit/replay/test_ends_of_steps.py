"""What the main threads do before, around and after the messages of a step."""

from __future__ import annotations

import pytest
from replay_cases import ELEMENTS, IDEAL, RATE, all_reduce, one_switch, owned_by, price, tree, workload

from lightning_autosync.plan import Transfer

DETAILS = pytest.mark.parametrize("detail", ["frames", "fluid"])
TRANSFERS = pytest.mark.parametrize(
    "transfer", [tree([-1, 0]), all_reduce(), owned_by([0, 1])], ids=["trees", "ring", "owners"]
)


@DETAILS
@TRANSFERS
def test_a_sum_is_copied_into_the_gradients(transfer: Transfer, detail: str) -> None:
    free = price(one_switch(2), [transfer], detail).step_time
    costs = IDEAL.model_copy(update={"finish_cost": 0.2, "unpack_cost": 0.03})
    assert price(one_switch(2), [transfer], detail, constants=costs).step_time == pytest.approx(free + 0.23)


@DETAILS
def test_only_the_last_sum_is_copied_after_the_exchange(detail: str) -> None:
    """The first of two messages is copied while the second is under way."""
    transfers, costs = [tree([-1, 0])] * 2, IDEAL.model_copy(update={"finish_cost": 0.2})
    free = price(one_switch(2), transfers, detail).step_time
    assert price(one_switch(2), transfers, detail, constants=costs).step_time == pytest.approx(free + 0.2)


@DETAILS
def test_copies_take_longer_where_ranks_share_a_core(detail: str) -> None:
    """Four ranks copy a megabyte each on two cores, at four megabytes a second."""
    free = price(one_switch(4), [tree([-1, 0, 0, 0])], detail).step_time
    costs = IDEAL.model_copy(update={"copy_rate": 4 * RATE, "cores": 2.0, "accelerated": True})
    found = price(one_switch(4), [tree([-1, 0, 0, 0])], detail, constants=costs).step_time
    packing = copying = 2 * 4 * (ELEMENTS - 1) / (4 * RATE)
    assert found == pytest.approx(free + packing + copying, rel=1e-3)


@DETAILS
def test_a_pass_has_a_cost_of_its_own(detail: str) -> None:
    work = workload(1, forward_time=0.1, backward_time=0.2, optimizer_time=0.3)
    costs = IDEAL.model_copy(update={"pass_cost": 0.05, "cores": 1.0})
    free = price(one_switch(2), [all_reduce()], detail, work).step_time
    found = price(one_switch(2), [all_reduce()], detail, work, costs)
    assert found.step_time == pytest.approx(free + 2 * 0.05)
    assert sum(span.end - span.start for span in found.critical_path) == pytest.approx(found.step_time)


@DETAILS
@pytest.mark.parametrize("messages", [1, 3])
def test_messages_on_trees_are_started_one_after_the_other(messages: int, detail: str) -> None:
    """Each start takes ten seconds, so the last message finds its links idle."""
    free = price(one_switch(2), [tree([-1, 0])], detail).step_time
    costs = IDEAL.model_copy(update={"exchange_cost": 10.0})
    found = price(one_switch(2), [tree([-1, 0])] * messages, detail, constants=costs)
    assert found.step_time == pytest.approx(10.0 * messages + free)


@DETAILS
def test_a_rank_alone_synchronizes_nothing(detail: str) -> None:
    costs = IDEAL.model_copy(update={"pass_cost": 0.05, "finish_cost": 0.2, "unpack_cost": 0.03})
    assert price(one_switch(1), [all_reduce()], detail, constants=costs).step_time == pytest.approx(0.0)

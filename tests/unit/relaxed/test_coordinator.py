"""The coordinator ends every schedule: each worker finishes, and none waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_world import MAIL, World
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples

from lightning_autosync.relaxed.coordinator import Command, Coordinator
from lightning_autosync.relaxed.grouping import Grouping, IsolationGuard

TIMEOUT = 1000.0
FACTS = {"iteration": 1, "samples": 4, "elements": 10}


@st.composite
def schedules(draw: st.DrawFn, lossy: bool) -> dict[str, Any]:
    workers = draw(st.integers(1, 6))
    epochs = draw(st.integers(1, 3))
    steps = st.lists(st.integers(0, 12), min_size=epochs, max_size=epochs)
    losses = []
    if lossy and workers > 1:
        loss = st.tuples(st.floats(0, 15), st.integers(1, workers - 1), st.none() | st.floats(0, 10))
        losses = draw(st.lists(loss, max_size=6))
    return {
        "size": draw(st.sampled_from([None, 2, 3, 4])),
        "wait": draw(st.sampled_from([None, 0.0, 0.7])),
        "bound": draw(st.sampled_from([None, 1, 3])),
        "dynamic": draw(st.booleans()),
        "epochs": [draw(steps) for _ in range(workers)],
        "speeds": [draw(st.floats(0.1, 2)) for _ in range(workers)],
        "losses": losses,
        "seed": draw(st.integers(0, 2**16)),
    }


def play(schedule: dict[str, Any], limit: float = 5000.0) -> World:
    grouping = Grouping(schedule["size"], schedule["wait"], IsolationGuard(schedule["bound"]))
    atomic = schedule["size"] is None
    workers = len(schedule["epochs"])
    coordinator = Coordinator(workers, grouping, dynamic=schedule["dynamic"], atomic=atomic, timeout=TIMEOUT)
    world = World(coordinator, schedule["epochs"], schedule["speeds"], schedule["losses"], atomic, schedule["seed"])
    world.run(limit)
    return world


@examples(150)
@given(schedule=schedules(lossy=False))
def test_every_worker_finishes_and_every_drain_holds_all(schedule: dict[str, Any]) -> None:
    world = play(schedule)
    everybody = tuple(range(len(schedule["epochs"])))
    assert all(player.ended and player.error is None for player in world.players)
    assert world.drains == [everybody] * (len(everybody) * len(schedule["epochs"][0]))
    if schedule["size"] is not None:
        bridges = len(everybody) if schedule["bound"] else 0
        assert max(map(len, set(world.members.values()) - {everybody}), default=0) <= max(schedule["size"], bridges)


@examples(250)
@given(schedule=schedules(lossy=True))
def test_nobody_waits_for_ever_among_losses_and_returns(schedule: dict[str, Any]) -> None:
    world = play(schedule)
    first = world.players[0]
    assert first.ended
    assert first.error is None
    for player in world.players:
        if player.alive and not player.ended:
            # It came back when nobody with a model was going to wait any more.
            assert player.error == f"start: no rank with a model arrived within {TIMEOUT:g} s"
            assert player.waits_for == "start"
            # Requests are up to `MAIL` seconds on their way, so the coordinator may have heard of it later.
            assert player.asked["start"] > first.asked["arrive"] - MAIL


class Talk:
    """A coordinator at work on two or three workers that have started."""

    def __init__(self, workers: int, grouping: Grouping, **options: Any) -> None:
        self.coordinator = Coordinator(workers, grouping, **options)
        for rank in range(workers):
            self.started = self.say(rank, "start")

    def say(self, rank: int, kind: str, at: float = 0.0, **header: Any) -> list[Command]:
        return self.coordinator.handle(rank, kind, FACTS | header if kind in ("ready", "arrive") else header, at)


def test_the_first_worker_gives_everybody_its_model() -> None:
    talk = Talk(3, Grouping(2))
    assert talk.started == [
        Command(0, "donate", {"takers": [[1, 1], [2, 1]]}),
        Command(1, "take", {"donor": 0, "visit": 1, "drained": 0}),
        Command(2, "take", {"donor": 0, "visit": 1, "drained": 0}),
    ]


def test_weights_follow_staleness_and_members_learn_the_newest_iteration() -> None:
    talk = Talk(2, Grouping(2), dynamic=True)
    talk.say(0, "ready", iteration=5)
    first, second = talk.say(1, "ready", iteration=4)
    assert first.header == second.header
    assert first.header["weights"] == pytest.approx([0.1 / 0.19, 0.09 / 0.19])
    assert first.header["iteration"] == 5


def test_a_drain_weighs_by_samples() -> None:
    talk = Talk(2, Grouping(2))
    talk.say(0, "arrive", samples=30)
    commands = talk.say(1, "arrive", samples=10)
    assert [command.header["weights"] for command in commands] == [[0.75, 0.25]] * 2
    assert all(command.header["atomic"] for command in commands)


def test_a_drain_names_who_came_back_even_from_before_the_start() -> None:
    coordinator = Coordinator(2, Grouping(2))
    coordinator.lose(1, 0.0)
    for rank in (0, 1):
        coordinator.handle(rank, "start", {}, 0.0)
    coordinator.handle(0, "arrive", FACTS, 0.0)
    group = coordinator.handle(1, "arrive", FACTS, 0.0)[0].header
    assert (group["members"], group["visits"]) == ((0, 1), [1, 2])
    for rank in (0, 1):
        coordinator.handle(rank, "complete", {"generation": group["generation"]}, 0.0)
    # Whoever takes a model now learns which drain came last.
    coordinator.lose(1, 1.0)
    coordinator.handle(1, "start", {}, 1.0)
    taken = [command for command in coordinator.handle(0, "arrive", FACTS, 1.0) if command.kind == "take"]
    assert [command.header["drained"] for command in taken] == [group["generation"]]


def test_an_atomic_group_commits_only_if_all_complete() -> None:
    talk = Talk(2, Grouping(None), atomic=True)
    talk.say(0, "ready")
    generation = talk.say(1, "ready")[0].header["generation"]
    assert talk.say(0, "complete", generation=generation) == []
    assert [(o.kind, o.header["commit"]) for o in talk.say(1, "complete", generation=generation)] == [
        ("verdict", True)
    ] * 2
    talk.say(0, "ready")
    generation = talk.say(1, "ready")[0].header["generation"]
    talk.say(0, "complete", generation=generation)
    assert talk.coordinator.lose(1, 1.0) == [Command(0, "verdict", {"generation": generation, "commit": False})]
    assert [(o.rank, o.header["members"]) for o in talk.say(0, "ready", 1.0)] == [(0, (0,))]


def test_a_returning_worker_takes_the_model_of_one_that_waits() -> None:
    talk = Talk(3, Grouping(2))
    talk.coordinator.lose(2, 1.0)
    assert talk.say(2, "start", 2.0) == []
    commands = talk.say(1, "ready", 3.0)
    assert commands == [
        Command(1, "donate", {"takers": [[2, 3]]}),
        Command(2, "take", {"donor": 1, "visit": 3, "drained": 0}),
        Command(1, "extend", {}),
    ]
    assert [command.header["members"] for command in talk.say(2, "ready", 4.0)] == [(1, 2)] * 2


def test_a_worker_that_does_not_come_to_the_barrier_is_named() -> None:
    talk = Talk(3, Grouping(2), timeout=60.0)
    talk.say(0, "arrive", 10.0)
    talk.say(2, "arrive", 11.0)
    assert talk.coordinator.deadline(11.0) == 70.0
    assert talk.coordinator.tick(69.0) == []
    commands = talk.coordinator.tick(70.0)
    assert {command.rank for command in commands} == {0, 1, 2}
    assert commands[0].header["reason"] == "drain: rank 1 did not arrive within 60 s"
    assert talk.say(1, "ready", 71.0)[0].kind == "stop"


def test_who_comes_late_to_a_barrier_but_moves_is_waited_for() -> None:
    talk = Talk(3, Grouping(2), timeout=60.0)
    talk.say(0, "arrive", 10.0)
    talk.say(2, "arrive", 11.0)
    # Alone, it makes its steps without waiting for anybody.
    commands = talk.say(1, "ready", 65.0)
    assert [(command.rank, command.kind) for command in commands] == [(0, "extend"), (2, "extend"), (1, "group")]
    assert talk.coordinator.deadline(65.0) == 125.0
    assert talk.coordinator.tick(124.0) == []
    assert talk.coordinator.tick(125.0)[0].header["reason"] == "drain: rank 1 did not arrive within 60 s"


def test_a_straggler_may_take_longer_than_a_silent_worker_may() -> None:
    """Its steps come within the time-out, all of them together do not."""
    coordinator = Coordinator(3, Grouping(2), timeout=5.0)
    world = World(coordinator, [[1], [1], [20]], [0.1, 0.1, 2.0], [], atomic=False, seed=0)
    world.run(500.0)
    assert all(player.ended and player.error is None for player in world.players)
    assert world.now > 20.0


def test_members_that_do_not_come_to_a_group_are_named() -> None:
    """One hangs in its first step, one after a group that went well; both are alive as far as anybody can tell."""
    talk = Talk(4, Grouping(2), timeout=60.0)
    talk.say(0, "ready", 1.0)
    talk.say(1, "ready", 2.0)
    talk.say(3, "done", 3.0)
    assert talk.coordinator.deadline(3.0) is None
    talk.say(0, "ready", 10.0)
    assert talk.coordinator.deadline(10.0) == 70.0
    assert talk.coordinator.tick(69.0) == []
    commands = talk.coordinator.tick(70.0)
    assert {command.rank for command in commands} == {0, 1, 2, 3}
    assert commands[0].header["reason"] == "group: rank 1, 2 did not arrive within 60 s"


def test_who_comes_back_to_a_group_is_waited_for_as_long_as_anybody() -> None:
    talk = Talk(3, Grouping(3), timeout=60.0)
    talk.coordinator.lose(2, 1.0)
    talk.say(0, "ready", 10.0)
    assert [command.kind for command in talk.say(2, "start", 69.0)] == ["donate", "take", "extend"]
    assert talk.coordinator.tick(71.0) == []
    reason = talk.coordinator.tick(129.0)[0].header["reason"]
    assert reason == "group: rank 1, 2 did not arrive within 60 s"


def test_a_group_that_broke_has_connected_nobody() -> None:
    talk = Talk(4, Grouping(2, isolation=IsolationGuard(1)))
    talk.say(0, "ready")
    talk.say(1, "ready")
    assert talk.say(2, "ready") + talk.say(3, "ready") == []
    bridge = talk.say(0, "ready")
    assert [command.rank for command in bridge] == [0, 2, 3]
    assert bridge[0].header["bridging"]
    said = {name: bridge[0].header[name] for name in ("generation", "number")}
    for rank in (2, 0):
        assert talk.say(rank, "broken", **said) == []
    assert talk.say(2, "ready") + talk.say(3, "ready") == []
    again = talk.say(1, "ready")
    assert [command.rank for command in again] == [1, 2, 3]
    assert again[0].header["bridging"]


def test_a_barrier_averages_what_those_keep_who_have_stepped() -> None:
    talk = Talk(3, Grouping(2))
    talk.say(0, "arrive", averages=[], samples=0)
    talk.say(1, "arrive", averages=["momentum_buffer"], samples=4)
    commands = talk.say(2, "arrive", averages=["momentum_buffer"], samples=0)
    assert [tuple(command.header["averages"]) for command in commands] == [("momentum_buffer",)] * 3
    talk = Talk(2, Grouping(2))
    talk.say(0, "arrive", averages=["momentum_buffer"])
    reason = talk.say(1, "arrive", averages=["exp_avg"])[0].header["reason"]
    assert "momentum 'average' needs the same optimizer state" in reason


def test_who_comes_back_to_a_barrier_is_waited_for_as_long_as_anybody() -> None:
    talk = Talk(3, Grouping(2), timeout=60.0)
    talk.coordinator.lose(2, 1.0)
    talk.say(0, "arrive", 10.0)
    commands = talk.say(2, "start", 69.0)
    assert [command.kind for command in commands] == ["donate", "take", "extend"]
    assert talk.coordinator.tick(71.0) == []
    assert {command.kind for command in talk.coordinator.tick(129.0)} == {"stop"}


def test_who_finds_nobody_with_a_model_is_alone_with_that() -> None:
    talk = Talk(3, Grouping(2), timeout=60.0)
    talk.coordinator.lose(2, 1.0)
    talk.say(2, "start", 2.0)
    commands = talk.coordinator.tick(62.0)
    assert [(command.rank, command.kind) for command in commands] == [(2, "stop")]
    assert talk.coordinator.stopped is None
    talk.say(0, "ready", 63.0)
    assert [command.rank for command in talk.say(1, "ready", 63.0)] == [0, 1]


def test_averaged_momentum_needs_the_same_state_everywhere() -> None:
    talk = Talk(2, Grouping(2))
    talk.say(0, "ready", averages=["momentum_buffer"], elements=20)
    reason = talk.say(1, "ready", averages=["exp_avg", "exp_avg_sq"], elements=30)[0].header["reason"]
    assert "momentum 'average' needs the same optimizer state" in reason
    assert "rank 0: momentum_buffer; rank 1: exp_avg, exp_avg_sq" in reason


def test_models_of_different_size_are_an_error() -> None:
    talk = Talk(2, Grouping(2))
    talk.say(0, "ready", elements=10)
    reason = talk.say(1, "ready", elements=12)[0].header["reason"]
    assert "different numbers of elements (rank 0 10, rank 1 12)" in reason


def test_different_fragments_of_equal_size_are_an_error() -> None:
    talk = Talk(2, Grouping(None), atomic=True)
    talk.say(0, "ready", due=[0])
    reason = talk.say(1, "ready", due=[1])[0].header["reason"]
    assert "workers average different fragments (rank 0 [0], rank 1 [1])" in reason


def test_a_returning_worker_has_the_same_fragments_due_as_those_that_train() -> None:
    talk = Talk(3, Grouping(None), atomic=True)
    talk.coordinator.lose(2, 1.0)
    talk.say(0, "arrive", iteration=9)
    assert talk.say(2, "start", 2.0) == []
    commands = talk.say(1, "ready", 3.0, iteration=3)
    assert [(one.rank, one.kind) for one in commands if one.kind != "extend"] == [(1, "donate"), (2, "take")]
    # Where all have ended, there is no such worker.
    talk = Talk(2, Grouping(None), atomic=True)
    talk.coordinator.lose(1, 1.0)
    assert talk.say(1, "start", 2.0) == []
    assert [one.kind for one in talk.say(0, "arrive", 3.0)][:2] == ["donate", "take"]


def test_whoever_was_given_up_must_start_again() -> None:
    talk = Talk(3, Grouping(2))
    talk.coordinator.lose(2, 1.0)
    assert talk.say(2, "ready", 2.0) == [Command(2, "stop", {"reason": "rank 2 was expelled; it must start again"})]


def test_the_window_of_groups_survives_a_checkpoint() -> None:
    talk = Talk(4, Grouping(2, isolation=IsolationGuard(2)))
    for rank in (0, 1, 2, 3):
        talk.say(rank, "ready", iteration=rank)
    again = Coordinator(4, Grouping(2, isolation=IsolationGuard(2)))
    again.restore(talk.coordinator.state())
    assert again.state() == talk.coordinator.state()


@pytest.mark.parametrize("kind", ["ready", "arrive"])
def test_who_waits_is_patient_while_the_others_make_progress(kind: str) -> None:
    talk = Talk(2, Grouping(None), atomic=True, timeout=10.0)
    talk.say(0, kind)
    assert talk.say(1, "progress", at=9.0) == [Command(0, "extend", {})]
    assert talk.coordinator.tick(18.0) == []
    assert {command.kind for command in talk.coordinator.tick(19.0)} == {"stop"}


@pytest.mark.parametrize("end", ["done", "arrive"])
def test_a_group_knows_whether_some_have_ended(end: str) -> None:
    talk = Talk(3, Grouping(None), atomic=True)
    for rank in range(3):
        commands = talk.say(rank, "ready")
    assert all(command.header["whole"] for command in commands)
    for rank in range(3):
        talk.say(rank, "complete", generation=1)
    talk.say(2, end)
    talk.say(0, "ready")
    commands = [command for command in talk.say(1, "ready") if command.kind == "group"]
    assert [command.header["whole"] for command in commands] == [False, False]


def test_a_drain_names_the_frozen_parameters_that_differ() -> None:
    talk = Talk(2, Grouping(2))
    talk.say(0, "arrive", frozen=[1, 2, 3])
    assert [command.header["unlike"] for command in talk.say(1, "arrive", frozen=[1, 7, 3])] == [[1], [1]]

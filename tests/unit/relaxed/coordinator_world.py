"""Workers played by a random event simulation against a real coordinator: no sockets, no threads, no clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_autosync.relaxed.coordinator import Command, Coordinator

DETECTION = 3.0
"""Seconds until a loss is known, at most."""

MAIL = 0.2
"""Seconds that a message travels, at most."""

EXCHANGE = 0.5
"""Seconds that an average takes, at most."""


@dataclass
class Player:
    """One worker: what it still has to do, and what it waits for."""

    rank: int
    epochs: list[int]
    incarnation: int = 0
    alive: bool = True
    epoch: int = 0
    left: int = 0
    iteration: int = 0
    samples: int = 0
    waits_for: str | None = None
    request: tuple[str, dict[str, Any]] | None = None
    ended: bool = False
    error: str | None = None
    asked: dict[str, float] = field(default_factory=dict)
    iteration_after: int = 0
    groups: list[int] = field(default_factory=list)
    early: dict[str, Any] | None = None


class World:
    """Runs players to their end.

    Args:
        epochs: for each worker, the steps of each epoch.
        speeds: mean seconds of a step of each worker.
        losses: (time, rank, seconds until it comes back or None) in any order; rank 0 cannot be lost.
        atomic: as the coordinator's.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        epochs: list[list[int]],
        speeds: list[float],
        losses: list[tuple[float, int, float | None]],
        atomic: bool,
        seed: int,
    ) -> None:
        self.coordinator, self.atomic = coordinator, atomic
        self.players = [Player(rank, list(steps)) for rank, steps in enumerate(epochs)]
        self.speeds = speeds
        self.rng = random.Random(seed)
        self.now = 0.0
        self.members: dict[int, tuple[int, ...]] = {}
        self.drains: list[tuple[int, ...]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._command = itertools.count()
        self._mailed: dict[int, float] = {}
        for player in self.players:
            self._later(self.rng.random(), self._living(player, lambda player=player: self._ask(player, "start", {})))
        for at, rank, back in losses:
            self._later(at, lambda rank=rank, back=back: self._lose(rank, back))

    def run(self, limit: float) -> None:
        """Until nothing is left to happen; fails if that takes more than ``limit`` seconds of the world's time."""
        while True:
            deadline = self.coordinator.deadline(self.now)
            if self._events and (deadline is None or self._events[0][0] <= deadline):
                self.now, _, event = heapq.heappop(self._events)
                event()
            elif deadline is not None:
                self.now = max(self.now, deadline)
                self._deliver(self.coordinator.tick(self.now))
            else:
                return
            assert self.now < limit, "the world does not come to its end"

    # Events

    def _later(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._command), event))

    def _living(self, player: Player, event: Callable[[], None]) -> Callable[[], None]:
        incarnation = player.incarnation

        def guarded() -> None:
            if player.alive and player.incarnation == incarnation:
                event()

        return guarded

    def _lose(self, rank: int, back: float | None) -> None:
        player = self.players[rank]
        if not player.alive or player.ended:
            return
        player.alive = False
        self._later(DETECTION * self.rng.random(), lambda: self._deliver(self.coordinator.lose(rank, self.now)))
        if back is not None:
            self._later(DETECTION + back, lambda: self._come_back(player))

    def _come_back(self, player: Player) -> None:
        player.alive, player.incarnation, player.early = True, player.incarnation + 1, None
        player.left = 0
        self._ask(player, "start", {})

    # A worker's side

    def _ask(self, player: Player, kind: str, header: dict[str, Any]) -> None:
        """Send a request; messages of one worker keep their order."""
        arrival = max(self.now + MAIL * self.rng.random(), self._mailed.get(player.rank, 0.0))
        self._mailed[player.rank] = arrival
        player.asked[kind] = self.now
        player.waits_for = kind
        player.request = (kind, header)
        self._later(
            arrival - self.now,
            lambda: (
                self._deliver(self.coordinator.handle(player.rank, kind, header, self.now)) if player.alive else None
            ),
        )

    def _deliver(self, commands: list[Command]) -> None:
        for command in commands:
            player = self.players[command.rank]
            self._later(0.0, self._living(player, lambda command=command, player=player: self._obey(player, command)))

    def _obey(self, player: Player, command: Command) -> None:
        match command.kind:
            case "stop":
                player.error = command.header["reason"]
            case "donate":
                if player.waits_for == "start":
                    assert player.rank not in [rank for rank, _ in command.header["takers"]]
                    self._train(player)
            case "take":
                assert player.waits_for == "start"
                donor = self.players[command.header["donor"]]
                if not donor.alive:
                    self._ask(player, "start", {})
                    return
                player.iteration = donor.iteration
                player.epoch = max(player.epoch, donor.epoch)
                player.left = player.epochs[player.epoch] if player.epoch < len(player.epochs) else 0
                self._train(player)
            case "group":
                self._average(player, command.header)
            case "verdict":
                # A worker reads it when its own part of the average has ended, one way or the other.
                if str(player.waits_for).startswith("verdict"):
                    self._judge(player, command.header)
                else:
                    player.early = command.header

    def _train(self, player: Player) -> None:
        player.waits_for = None
        if player.iteration == 0 and player.epoch == 0:
            player.left = player.epochs[0]
        self._next_step(player)

    def _next_step(self, player: Player) -> None:
        if player.left > 0:
            delay = self.speeds[player.rank] * self.rng.uniform(0.5, 1.5)
            self._later(delay, self._living(player, lambda: self._step(player)))
        else:
            self._ask(player, "done", {})
            self._ask(player, "arrive", self._facts(player))

    def _step(self, player: Player) -> None:
        player.left -= 1
        player.iteration += 1
        player.samples += 1
        self._ask(player, "ready", self._facts(player))

    def _facts(self, player: Player) -> dict[str, Any]:
        return {"iteration": player.iteration, "samples": player.samples, "elements": 7}

    def _average(self, player: Player, header: dict[str, Any]) -> None:
        generation, members = header["generation"], tuple(header["members"])
        assert player.rank in members
        assert player.waits_for in ("ready", "arrive")
        assert self.members.setdefault(generation, members) == members
        assert abs(sum(header["weights"]) - 1) < 1e-12
        assert not player.groups or generation > player.groups[-1]
        player.groups.append(generation)
        incarnations = [self.players[rank].incarnation for rank in members]
        self._later(
            EXCHANGE * self.rng.random(), self._living(player, lambda: self._averaged(player, header, incarnations))
        )

    def _averaged(self, player: Player, header: dict[str, Any], incarnations: list[int]) -> None:
        whole = all(
            self.players[rank].alive and self.players[rank].incarnation == incarnation
            for rank, incarnation in zip(header["members"], incarnations, strict=True)
        )
        if header["atomic"]:
            kind, request = player.waits_for, player.request
            self._ask(player, "complete" if whole else "broken", {"generation": header["generation"]})
            player.waits_for, player.request = f"verdict on {kind}", request
            player.iteration_after = header["iteration"]
            verdict, player.early = player.early, None
            if verdict is not None:
                self._judge(player, verdict)
        elif whole:
            player.iteration = header["iteration"]
            self._next_step(player)
        else:
            assert player.request is not None
            self._ask(player, *player.request)

    def _judge(self, player: Player, header: dict[str, Any]) -> None:
        assert player.request is not None
        assert header["generation"] == player.groups[-1]
        kind, request = player.request
        if not header["commit"]:
            self._ask(player, kind, request)
            return
        player.iteration = player.iteration_after
        if kind == "ready":
            self._next_step(player)
            return
        self.drains.append(self.members[header["generation"]])
        player.samples = 0
        player.epoch += 1
        if player.epoch < len(player.epochs):
            player.left = player.epochs[player.epoch]
            self._next_step(player)
        else:
            player.ended = True
            self._ask(player, "leave", {})

"""The coordinator, a state machine that forms groups: it turns messages of workers into commands to workers.

It is pure: it neither sends nor waits, and callers pass the time.

Messages from a worker: ``start`` (request a model), ``ready`` (a step is done, request a group), ``progress`` (steps
are done, and none needs a group), ``arrive`` (at the barrier of a drain), ``done`` (no more data before the drain),
``broken`` (the average of a group failed), ``complete`` (the average of an *atomic* group succeeded), ``leave``.

Commands to a worker: ``group`` (average with these members), ``verdict`` (whether an atomic group commits; if not,
request again), ``donate`` (send the model to these workers), ``take`` (receive a model from that worker), ``extend``
(restart the timeout, because another worker returned or still makes progress), ``stop`` (a final error). A command
names a worker that takes a model by its rank and its ``visit``, which changes with each start: a returning worker must
not get a model that was meant for it before it was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from lightning_autosync.relaxed.grouping import (
    AdaptivePeriod,
    Grouped,
    Grouping,
    constant_weights,
    dynamic_weights,
    sample_weights,
)


class Command(NamedTuple):
    """A message to one worker."""

    rank: int
    kind: str
    header: dict[str, Any]


class Phase(Enum):
    """The state of a worker, as known to the coordinator."""

    ABSENT = "absent"
    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"
    GROUPED = "grouped"
    DONE = "done"
    ARRIVED = "arrived"


_WAITS = {Phase.STARTING: "start", Phase.WAITING: "group", Phase.ARRIVED: "drain"}
"""Phases in which a worker waits for others, with the awaited event."""


@dataclass
class _Worker:
    phase: Phase = Phase.ABSENT
    iteration: int = 0
    samples: int = 0
    elements: int = 0
    due: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    since: float = 0.0
    visit: int = 0
    averages: list[str] | None = None
    frozen: list[int] = field(default_factory=list)
    generation: int | None = None


@dataclass
class _Atomic:
    """A group in which all members commit or none does."""

    members: tuple[int, ...]
    drain: bool
    completed: set[int]


class Coordinator:
    """Forms groups, holds barriers, and tracks the workers.

    Args:
        workers: number of workers, ranks 0 to ``workers - 1``; all of them must come to the start.
        grouping: a new object that forms the groups.
        dynamic: whether weights depend on staleness.
        atomic: whether groups are atomic; barriers always are.
        timeout: seconds between the first and the last worker at a start or in a group, or after the last report of
            progress; at a barrier, seconds after the last step of any worker.
        period: adapts the period of averages; None keeps it fixed.
    """

    def __init__(
        self,
        workers: int,
        grouping: Grouping,
        *,
        dynamic: bool = False,
        atomic: bool = False,
        timeout: float = 1800.0,
        period: AdaptivePeriod | None = None,
    ) -> None:
        self.stopped: str | None = None
        self._grouping = grouping
        self._dynamic, self._atomic, self._timeout, self._period = dynamic, atomic, timeout, period
        self._workers = {rank: _Worker() for rank in range(workers)}
        self._lost: set[int] = set()
        self._started = False
        self._generation = 0
        self._drained = 0
        self._groups: dict[int, _Atomic] = {}
        self._commands: list[Command] = []

    def handle(self, rank: int, kind: str, header: dict[str, Any], now: float) -> list[Command]:
        """Handle a worker's message that came at ``now`` (seconds from any origin); returns commands."""
        worker = self._workers.get(rank)
        if worker is None:
            return [Command(rank, "stop", {"reason": f"rank {rank} is not one of the {len(self._workers)} workers"})]
        if self.stopped is not None:
            return [Command(rank, "stop", {"reason": self.stopped})]
        if worker.phase is Phase.ABSENT and kind not in ("start", "leave"):
            return [Command(rank, "stop", {"reason": f"rank {rank} was expelled; it must start again"})]
        match kind:
            case "start":
                self._start(rank, now)
            case "ready":
                self._note(worker, header, now, Phase.WAITING)
                self._grouping.add(rank, now)
                self._renew(now, Phase.ARRIVED)
            case "progress":
                self._renew(now, Phase.WAITING, Phase.ARRIVED)
            case "arrive":
                self._note(worker, header, now, Phase.ARRIVED)
            case "done":
                worker.phase = Phase.DONE
            case "complete":
                self._complete(rank, header["generation"])
            case "broken":
                self._break(header["generation"])
                if header.get("number") is not None:
                    self._grouping.broken(header["number"])
            case "leave":
                self._remove(rank)
        return self._decide(now)

    def lose(self, rank: int, now: float) -> list[Command]:
        """Handle the loss of a worker, which may return with ``start``; returns commands."""
        if rank not in self._workers or self.stopped is not None:
            return []
        self._remove(rank)
        return self._decide(now)

    def tick(self, now: float) -> list[Command]:
        """Handle the passing of time; returns commands."""
        if self.stopped is not None:
            return []
        for phase, end in self._ends():
            if now < end:
                continue
            if phase is Phase.STARTING and self._started:
                self._refuse_late(now)
                continue
            missing = ", ".join(map(str, self._awaited(phase)))
            self._stop(f"{_WAITS[phase]}: rank {missing} did not arrive within {self._timeout:g} s")
            return self._flush()
        return self._decide(now)

    def _refuse_late(self, now: float) -> None:
        """Stop returning workers that got no model in time; the others continue."""
        reason = f"start: no rank with a model arrived within {self._timeout:g} s"
        for rank in self._in(Phase.STARTING):
            if now >= self._workers[rank].since + self._timeout:
                self._remove(rank)
                self._command(rank, "stop", {"reason": reason})

    def deadline(self, now: float) -> float | None:
        """Latest time for the next call of :meth:`tick`; None if only messages matter."""
        if self.stopped is not None:
            return None
        close = self._grouping.deadline(now)
        return min([end for _, end in self._ends()] + ([] if close is None else [close]), default=None)

    def stop(self, reason: str) -> list[Command]:
        """End the job with an error on every present worker."""
        if self.stopped is None:
            self._stop(reason)
        return self._flush()

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint: iterations and the window of groups."""
        return {
            "iterations": [worker.iteration for worker in self._workers.values()],
            "window": self._grouping.isolation.state(),
            "pace": self._period.state() if self._period else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load the state that :meth:`state` returned; with another number of workers, the window restarts."""
        if len(state["iterations"]) == len(self._workers):
            for worker, iteration in zip(self._workers.values(), state["iterations"], strict=True):
                worker.iteration = iteration
            self._grouping.isolation.restore(**state["window"])
        if self._period is not None and state["pace"] is not None:
            self._period.restore(**state["pace"])

    # Starts and losses

    def _start(self, rank: int, now: float) -> None:
        if self._workers[rank].phase is not Phase.ABSENT:
            self._remove(rank)
        self._lost.discard(rank)
        self._workers[rank].phase, self._workers[rank].since = Phase.STARTING, now
        self._workers[rank].visit += 1

    def _remove(self, rank: int) -> None:
        worker = self._workers[rank]
        self._grouping.discard(rank)
        generation = worker.generation
        worker.phase, worker.generation, worker.samples = Phase.ABSENT, None, 0
        worker.visit += 1  # the next start comes from another process, even if this one had not begun
        self._lost.add(rank)
        if generation is not None:
            self._break(generation)

    def _note(self, worker: _Worker, header: dict[str, Any], now: float, phase: Phase) -> None:
        worker.phase, worker.since, worker.generation = phase, now, None
        worker.iteration, worker.samples = header["iteration"], header["samples"]
        worker.elements, worker.rates = header["elements"], header.get("rates", [])
        worker.due = header.get("due", [])
        worker.averages, worker.frozen = header.get("averages"), header.get("frozen", [])
        if self._period is not None and "step_time" in header:
            self._period.report(header["step_time"], header["exchange_time"])

    # Decisions

    def _decide(self, now: float) -> list[Command]:
        if not self._started:
            self._begin()
        else:
            self._donate(now)
            self._form_groups(now)
            self._open_barrier()
        return self._flush()

    def _begin(self) -> None:
        """Start the job when all workers are there; all get the model of the lowest rank."""
        coming = self._in(Phase.STARTING)
        if not coming or self._awaited(Phase.STARTING):
            return
        self._started = True
        self._send_model(coming[0], coming[1:], iteration=self._workers[coming[0]].iteration)
        self._workers[coming[0]].phase = Phase.TRAINING

    def _donate(self, now: float) -> None:
        """Let a waiting worker send its model to returning workers. All timeouts restart, so that these can follow."""
        joining = self._in(Phase.STARTING)
        # Fragments are due for a returning worker when they are for its donor, so one that waits with the others.
        trains = self._atomic and self._in(Phase.TRAINING, Phase.WAITING, Phase.GROUPED)
        donors = self._in(Phase.WAITING) if trains else self._in(Phase.WAITING, Phase.ARRIVED)
        if joining and donors:
            donor = max(donors, key=lambda rank: (self._workers[rank].iteration, -rank))
            self._send_model(donor, joining, iteration=self._workers[donor].iteration)
            self._renew(now, Phase.WAITING, Phase.ARRIVED)

    def _renew(self, now: float, *phases: Phase) -> None:
        """Restart the timeouts of workers in ``phases``, because the workers they wait for make progress."""
        for rank in self._in(*phases):
            self._workers[rank].since = now
            self._command(rank, "extend", {})

    def _send_model(self, donor: int, takers: list[int], iteration: int) -> None:
        self._command(donor, "donate", {"takers": [[rank, self._workers[rank].visit] for rank in takers]})
        for rank in takers:
            self._command(rank, "take", {"donor": donor, "visit": self._workers[rank].visit, "drained": self._drained})
            self._workers[rank].phase, self._workers[rank].iteration = Phase.TRAINING, iteration

    def _form_groups(self, now: float) -> None:
        active = self._in(Phase.TRAINING, Phase.WAITING, Phase.GROUPED)
        while group := self._grouping.take(active, now):
            self._announce(group, len(active))

    def _announce(self, group: Grouped, active: int) -> None:
        members = tuple(sorted(group.members))
        iterations = [self._workers[rank].iteration for rank in members]
        weights = dynamic_weights(iterations) if self._dynamic else constant_weights(len(members))
        whole = not self._in(Phase.DONE, Phase.ARRIVED)
        facts = {"number": group.number, "bridging": group.bridging, "active": active, "whole": whole}
        self._call_group(members, weights, False, self._averages(members), facts)

    def _open_barrier(self) -> None:
        members = tuple(self._in(Phase.ARRIVED))
        if not members or self._awaited(Phase.ARRIVED):
            return
        samples = [self._workers[rank].samples for rank in members]
        # Without a step since the last barrier, momenta still have the values of that barrier.
        averages = self._averages(members) if any(samples) else set()
        visits = [self._workers[rank].visit for rank in members]
        frozen = zip(*(self._workers[rank].frozen for rank in members), strict=False)  # unlike models are refused below
        unlike = [place for place, sums in enumerate(frozen) if len(set(sums)) > 1]
        facts = {"visits": visits, "unlike": unlike}
        self._call_group(members, sample_weights(samples), True, averages, facts)

    def _averages(self, members: Iterable[int]) -> set[tuple[str, ...]]:
        """The sets of names of running averages, of workers whose optimizer has stepped; one element if all agree."""
        kept = (self._workers[rank].averages for rank in members)
        return {tuple(names) for names in kept if names}

    def _call_group(
        self,
        members: tuple[int, ...],
        weights: list[float],
        drain: bool,
        averages: set[tuple[str, ...]],
        facts: dict[str, Any],
    ) -> None:
        workers = [self._workers[rank] for rank in members]
        if len(self._averages(members)) > 1:
            kept = "; ".join(f"rank {rank}: {_names(self._workers[rank].averages)}" for rank in members)
            self._stop(
                f"momentum 'average' needs the same optimizer state on all workers, but they have {kept}; use the "
                "same optimizer on all of them, or momentum 'local'"
            )
            return
        if len({worker.elements for worker in workers}) > 1:
            sizes = ", ".join(f"rank {rank} {self._workers[rank].elements}" for rank in members)
            self._stop(f"workers exchange different numbers of elements ({sizes}): they must train the same model")
            return
        if any(worker.due != workers[0].due for worker in workers):
            due = ", ".join(f"rank {rank} {self._workers[rank].due}" for rank in members)
            self._stop(f"workers average different fragments ({due}); this is a defect: please report it")
            return
        self._generation += 1
        atomic = self._atomic or drain
        header: dict[str, Any] = {
            "generation": self._generation,
            "members": members,
            "weights": weights,
            "iteration": max(worker.iteration for worker in workers),
            "rates": workers[0].rates,
            "atomic": atomic,
            "drain": drain,
            "averages": next(iter(averages), ()),
            **facts,
        }
        if self._period is not None:
            header["period"] = self._period.next_period()
        for rank, worker in zip(members, workers, strict=True):
            worker.phase = Phase.GROUPED
            self._command(rank, "group", header)
            if atomic:
                worker.generation = self._generation
        if atomic:
            self._groups[self._generation] = _Atomic(members, drain, set())

    # Atomic groups

    def _complete(self, rank: int, generation: int) -> None:
        group = self._groups.get(generation)
        if group is None:
            return
        group.completed.add(rank)
        if group.completed >= set(group.members):
            self._settle(generation, commit=True)

    def _break(self, generation: int) -> None:
        if generation in self._groups:
            self._settle(generation, commit=False)

    def _settle(self, generation: int, commit: bool) -> None:
        group = self._groups.pop(generation)
        newest = max(self._workers[rank].iteration for rank in group.members)
        for rank in group.members:
            worker = self._workers[rank]
            if worker.generation != generation:
                continue
            worker.phase, worker.generation = Phase.TRAINING, None
            if commit and group.drain:
                worker.iteration, worker.samples = newest, 0
                self._drained = generation
            self._command(rank, "verdict", {"generation": generation, "commit": commit})

    # Helpers

    def _in(self, *phases: Phase) -> list[int]:
        return [rank for rank, worker in self._workers.items() if worker.phase in phases]

    def _awaited(self, phase: Phase) -> list[int]:
        """Ranks for which workers in ``phase`` wait."""
        if phase is Phase.STARTING:
            absent = [rank for rank in self._in(Phase.ABSENT) if rank not in self._lost]
            return [] if self._started else absent
        if phase is Phase.WAITING:
            return self._in(Phase.TRAINING, Phase.GROUPED)
        return self._in(Phase.TRAINING, Phase.WAITING, Phase.GROUPED, Phase.DONE)

    def _ends(self) -> Iterator[tuple[Phase, float]]:
        """Phases in which some worker waits, with the time at which the wait times out."""
        for phase in _WAITS:
            waiting = self._in(phase)
            if waiting and (phase is not Phase.WAITING or self._awaited(phase)):
                yield phase, min(self._workers[rank].since for rank in waiting) + self._timeout

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        self._commands = [Command(rank, "stop", {"reason": reason}) for rank in self._present()]

    def _present(self) -> Iterable[int]:
        return (rank for rank, worker in self._workers.items() if worker.phase is not Phase.ABSENT)

    def _command(self, rank: int, kind: str, header: dict[str, Any]) -> None:
        self._commands.append(Command(rank, kind, header))

    def _flush(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands


def _names(averages: list[str] | None) -> str:
    return ", ".join(averages or ()) or "none"

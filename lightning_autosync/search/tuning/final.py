"""What the last comparison says: of the best plans, the best builder and the best of DDP in interleaved rounds.

The fastest of several is partly the luckiest of the rounds in which it was chosen. So the first half of the rounds
chooses the winner, and the builder and the setting of DDP that it is compared with; the second half judges, and only
its ratios count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_autosync.measure.bench.output import EXACT
from lightning_autosync.measure.bench.result import BenchResult, ContenderMeasurement
from lightning_autosync.measure.step_time import Interval, relative_medians
from lightning_autosync.plan import SyncPlan, builders

LEAST_ROUNDS = 5
"""Judging rounds below which nothing is claimed: all of four fall on one side by chance too often."""


@dataclass(frozen=True)
class Final:
    """What the last comparison found.

    Attributes:
        choice: as of a bench, of the rounds that choose.
        result: the same of those that judge.
        plans: those that could win, by name.
        rivals: names of DDP's settings, one or more.
        left_out: why plans are not among them that should have been, by name.
    """

    choice: BenchResult
    result: BenchResult
    plans: Mapping[str, SyncPlan]
    rivals: Sequence[str]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        played: BenchResult,
        plans: Mapping[str, SyncPlan],
        rivals: Sequence[str],
        left_out: Mapping[str, str] | None = None,
    ) -> Final:
        """From one bench, half of whose rounds choose."""
        half = played.settings.rounds // 2
        choice, result = _rounds(played, 0, half), _rounds(played, half, 2 * half)
        return cls(choice, result, plans, rivals, left_out or {})

    @cached_property
    def winner(self) -> str:
        """The fastest plan of the choosing rounds; the best builder's unless it beats that."""
        fastest = self._fastest(self._sound)
        if self.builder in self._sound and self.choice.ratio(fastest, self.builder).median >= 1:
            return self.builder
        return fastest

    @cached_property
    def builder(self) -> str | None:
        """The fastest builder's plan of the choosing rounds; None if there was none, or if all were left out."""
        built = [name for name in self.plans if name in builders.names()]
        return self._fastest([name for name in built if name in self._sound] or built) if built else None

    @cached_property
    def ddp(self) -> str:
        """The fastest setting of DDP of the choosing rounds."""
        return self._fastest(self.rivals)

    @cached_property
    def _sound(self) -> list[str]:
        """Plans that can win: not an exact one whose gradients are not DDP's, unless that holds for all."""
        found, classes = self.choice.measurements, self.choice.classes
        sound = [name for name in self.plans if classes[name] != "exact" or found[name].deviation <= EXACT]
        return sound or list(self.plans)

    def _fastest(self, names: Sequence[str]) -> str:
        """Of some contenders in the choosing rounds, each time relative to its round."""
        times = relative_medians({name: self.choice.measurements[name].times for name in names})
        return min(times, key=times.__getitem__)

    @property
    def opponents(self) -> dict[str, str]:
        """What the winner is compared with, by kind; the builder, too, if that is the winner."""
        return {"ddp": self.ddp} | ({} if self.builder is None else {"builder": self.builder})

    @property
    def seconds(self) -> float:
        """Of a step of the winner: the median over the judging rounds."""
        return self.result.measurements[self.winner].median

    def ratio(self, name: str) -> Interval:
        """The winner's time over that of another contender, paired by judging round."""
        return self.result.ratio(self.winner, name)

    def gains(self, name: str) -> bool:
        """Whether the winner may be claimed to be faster than another: the ratio's whole interval is below 1."""
        return self.tells and self.ratio(name).high < 1

    @property
    def tells(self) -> bool:
        """Whether there were rounds enough to claim anything."""
        return self.result.settings.rounds >= LEAST_ROUNDS

    def to_dict(self) -> dict[str, Any]:
        """As a bench writes the judging rounds; contenders say what they are, the winner how it stands to opponents."""
        made = self.result.to_dict()
        for name, contender in made["contenders"].items():
            contender["kind"] = self._kind(name)
            contender["ratio_to_best_ddp"] = asdict(self.result.ratio(name, self.ddp))
        chosen = {name: measurement.times for name, measurement in self.choice.measurements.items()}
        return {
            **made,
            "best_ddp": self.ddp,
            "winner": self.winner,
            "opponents": {"ddp": self.ddp, "builder": self.builder},
            "winner_over": {kind: asdict(self.ratio(name)) for kind, name in self.opponents.items()},
            "gains": {kind: self.gains(name) for kind, name in self.opponents.items()},
            "left_out": dict(self.left_out),
            "choosing": {"rounds": self.choice.settings.rounds, "round_seconds": chosen},
        }

    def _kind(self, name: str) -> str:
        if name == self.winner:
            return "plan"
        if name == self.builder:
            return "builder"
        if name in self.plans:
            return "finalist"
        return "ddp" if self.result.settings.all_contenders()[name].ddp is not None else "contender"


def _rounds(played: BenchResult, start: int, end: int) -> BenchResult:
    """Some rounds of a bench, as if there had been no others."""
    settings = played.settings.model_copy(update={"rounds": end - start})
    measurements = {name: _of_rounds(one, start, end) for name, one in played.measurements.items()}
    return replace(played, settings=settings, measurements=measurements)


def _of_rounds(measurement: ContenderMeasurement, start: int, end: int) -> ContenderMeasurement:
    sent, foreign = measurement.sent, measurement.foreign_cores
    return replace(
        measurement,
        rounds=measurement.rounds[start:end],
        sent=None if sent is None else sent[start:end],
        foreign_cores=None if foreign is None else foreign[start:end],
    )

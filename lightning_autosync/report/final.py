"""The comparison at the end of a tuning run: the winner and its opponents, measured side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field

from lightning_autosync.documents import Record, Taken, checked
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.step_time import Interval, paired_ratio

Kind = Literal["plan", "builder", "finalist", "ddp", "contender"]


@dataclass(frozen=True)
class Contender:
    """One contender of the comparison.

    Attributes:
        name: as in the table.
        kind: ``plan`` (the winner), the best ``builder``, another ``finalist``, ``ddp``, or another ``contender``.
        exactness: ``exact``, ``low precision`` or ``relaxed or lossy``.
        rounds: seconds a step, by round.
    """

    name: str
    kind: Kind
    exactness: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


_LENIENT = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
"""A run tells more of its last comparison than a report shows."""


class _Measured(Record):
    model_config = _LENIENT

    kind: Kind
    exactness: str = Field(alias="class")
    rounds: tuple[Taken, ...] = Field(alias="round_seconds", min_length=1)


class _Opponents(Record):
    model_config = _LENIENT

    ddp: str
    builder: str | None = None


class _Told(Record):
    """What a tuning run writes."""

    model_config = _LENIENT

    contenders: dict[str, _Measured]
    winner: str
    opponents: _Opponents
    left_out: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Final:
    """All contenders by name, and which of them play a part in the summary.

    Attributes:
        winner: the plan to run; it may be the builder's.
        ddp: the best DDP.
        builder: the best builder; None if none ran, or if it was left out.
        left_out: why plans are not in it that should have been, by name.
    """

    contenders: Mapping[str, Contender]
    winner: str
    ddp: str
    builder: str | None
    left_out: Mapping[str, str]

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Final:
        """From plain data, as a tuning run writes it.

        Raises:
            DocumentError: a field is missing or wrong.
        """
        told = checked(_Told, data, f"{where}: final")
        contenders = {
            name: Contender(name, one.kind, one.exactness, one.rounds) for name, one in told.contenders.items()
        }
        made = cls(contenders, told.winner, told.opponents.ddp, told.opponents.builder, told.left_out)
        missing = {made.winner, made.ddp, made.builder or made.ddp} - contenders.keys()
        if missing or len({len(one.rounds) for one in contenders.values()}) != 1:
            lacking = f"no contender is named '{min(missing)}'" if missing else "contenders have unequal rounds"
            raise DocumentError(f"{where}: final.contenders: {lacking}")
        return made

    @property
    def best(self) -> Contender:
        return self.contenders[self.winner]

    def speedup(self, opponent: str) -> Interval:
        """How many times as fast as the opponent the winner is, paired by round."""
        return paired_ratio(self.contenders[opponent].rounds, self.best.rounds)

    def compared(self) -> list[tuple[Contender, Interval]]:
        """Every contender with its time over that of the best DDP, paired by round; fastest first."""
        reference = self.contenders[self.ddp].rounds
        ordered = sorted(self.contenders.values(), key=lambda one: one.median)
        return [(one, paired_ratio(one.rounds, reference)) for one in ordered]

"""Limits on a peer's silence, which follow the intervals between its beats.

This is the phi accrual failure detector (Hayashibara et al., 2004): a peer is suspected when, given the intervals so
far, a silence of this length has a probability of ``10 ** -phi``.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from lightning_autosync.documents import unknown_name
from lightning_autosync.errors import DocumentError


@dataclass(frozen=True)
class HeartbeatSettings:
    """Settings for beats and for the silence of peers.

    Args:
        interval: longest time in seconds between beats, which are sent about twice as often.
        shortest: smallest limit on silence in seconds. It leaves time for calls that let no other thread run.
        longest: largest limit on silence in seconds, however irregular the beats are.
        phi: negative decimal logarithm of the accepted probability of a false suspicion.
        redial: seconds in which a dropped or silent connection must be replaced. A hanging peer is lost after at
            most ``longest + redial``.
    """

    interval: float = 0.5
    shortest: float = 5.0
    longest: float = 20.0
    phi: float = 8.0
    redial: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.interval < self.shortest <= self.longest:
            raise DocumentError(
                f"heartbeat: expected 0 < interval < shortest <= longest; got interval {self.interval:g} s, shortest "
                f"{self.shortest:g} s, longest {self.longest:g} s"
            )
        if not 0 < self.phi <= 15 or self.redial <= 0:
            raise DocumentError(
                f"heartbeat: expected 0 < phi <= 15 and redial > 0 s; got phi {self.phi:g}, redial {self.redial:g} s"
            )

    @cached_property
    def deviations(self) -> float:
        """Number of standard deviations above the mean that corresponds to ``phi``."""
        return -statistics.NormalDist().inv_cdf(10.0**-self.phi)


class SilenceLimit:
    """The limit on one peer's silence, learnt from its last hundred beats."""

    def __init__(self, settings: HeartbeatSettings) -> None:
        self._settings = settings
        self._intervals: deque[float] = deque(maxlen=100)
        self._last: float | None = None

    def beat(self, now: float) -> None:
        """Note a beat at ``now`` (monotonic seconds)."""
        if self._last is not None:
            self._intervals.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """Ignore the interval before the next beat, because this process was stopped or the connection replaced."""
        self._last = None

    @property
    def seconds(self) -> float:
        """Longest silence in seconds that is not suspicious."""
        settings = self._settings
        if len(self._intervals) < 2:
            return settings.longest
        mean, deviation = statistics.fmean(self._intervals), statistics.pstdev(self._intervals)
        # Very regular beats would make the limit too tight, so the deviation is at least a quarter of the interval.
        limit = mean + settings.deviations * max(deviation, settings.interval / 4)
        return min(max(limit, settings.shortest), settings.longest)


STALL = 60.0
"""Default seconds without progress after which a group's average fails."""


def read_heartbeat(given: HeartbeatSettings | Mapping[str, float] | None) -> HeartbeatSettings:
    """Settings from a mapping of names to values; missing names have their defaults.

    Raises:
        DocumentError: a name is unknown, a value is no number, or values do not fit each other.
    """
    if given is None or isinstance(given, HeartbeatSettings):
        return given or HeartbeatSettings()
    names = [field.name for field in fields(HeartbeatSettings)]
    if not isinstance(given, Mapping):
        raise DocumentError(f"heartbeat: expected a mapping with keys {', '.join(names)}; got {given!r}")
    if unknown := sorted(set(given) - {*names}):
        raise DocumentError(f"heartbeat.{unknown[0]}: {unknown_name(unknown[0], names)}")
    return HeartbeatSettings(**{name: read_seconds(f"heartbeat.{name}", value) for name, value in given.items()})


def read_seconds(name: str, value: object) -> float:
    """``value`` as a float, if it is a finite number above 0; ``name`` is its name in errors.

    Raises:
        DocumentError: it is no such number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DocumentError(f"{name}: {value!r} is not a finite number above 0")
    return float(value)

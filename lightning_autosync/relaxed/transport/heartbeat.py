"""When silence means loss: a deadline that follows the intervals between a peer's signs of life.

After "The phi accrual failure detector" (Hayashibara et al., 2004): a peer is suspected when, by the intervals seen so
far, so long a silence would have a probability of ``10 ** -phi``.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from lightning_autosync.errors import DocumentError


@dataclass(frozen=True)
class HeartbeatSettings:
    """How often to send beats, and how long a peer may be silent.

    Args:
        interval: seconds between beats where nothing else is sent.
        shortest: seconds of silence that are always borne: a process may be busy with something that lets no other
            thread run.
        longest: seconds of silence that are never exceeded, however irregular the beats were.
        phi: minus the decimal logarithm of the accepted probability of a false suspicion.
        redial: seconds that re-opening a connection may take which dropped, or over which nothing comes any more; so a
            peer that hangs is given up after at most ``longest + redial``.
    """

    interval: float = 0.5
    shortest: float = 5.0
    longest: float = 20.0
    phi: float = 8.0
    redial: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.interval < self.shortest <= self.longest:
            raise DocumentError(
                f"heartbeat: interval {self.interval:g} s, shortest {self.shortest:g} s and longest "
                f"{self.longest:g} s must be positive and grow in this order"
            )
        if not 0 < self.phi <= 15 or self.redial <= 0:
            raise DocumentError(f"heartbeat: phi {self.phi:g} must lie in (0, 15] and redial {self.redial:g} s above 0")

    @cached_property
    def deviations(self) -> float:
        """How many standard deviations above the mean ``phi`` lies."""
        return -statistics.NormalDist().inv_cdf(10.0**-self.phi)


class SilenceLimit:
    """How long one peer may be silent, in seconds, learnt from its last hundred beats."""

    def __init__(self, settings: HeartbeatSettings) -> None:
        self._settings = settings
        self._intervals: deque[float] = deque(maxlen=100)
        self._last: float | None = None

    def beat(self, now: float) -> None:
        """A beat came at ``now`` (seconds, monotonic)."""
        if self._last is not None:
            self._intervals.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """Do not count the time before the next beat: this process or the connection was away."""
        self._last = None

    @property
    def seconds(self) -> float:
        """The longest silence that is not yet suspicious."""
        settings = self._settings
        if len(self._intervals) < 2:
            return settings.longest
        mean, deviation = statistics.fmean(self._intervals), statistics.pstdev(self._intervals)
        # Beats that come like clockwork say little about the next delay: never below a quarter of the interval.
        limit = mean + settings.deviations * max(deviation, settings.interval / 4)
        return min(max(limit, settings.shortest), settings.longest)


STALL = 60.0
"""Seconds without progress after which a group's average is given up, unless a job says otherwise."""


def read_heartbeat(given: HeartbeatSettings | Mapping[str, float] | None) -> HeartbeatSettings:
    """Settings from a mapping of names; others keep their defaults.

    Raises:
        DocumentError: a name is unknown, a value is no number, or they do not fit each other.
    """
    if given is None or isinstance(given, HeartbeatSettings):
        return given or HeartbeatSettings()
    allowed = ", ".join(field.name for field in fields(HeartbeatSettings))
    if not isinstance(given, Mapping):
        raise DocumentError(f"heartbeat: {given!r} is no mapping of {allowed}")
    if unknown := sorted(set(given) - {field.name for field in fields(HeartbeatSettings)}):
        raise DocumentError(f"heartbeat.{unknown[0]}: not known; allowed: {allowed}")
    return HeartbeatSettings(**{name: read_seconds(f"heartbeat.{name}", value) for name, value in given.items()})


def read_seconds(name: str, value: object) -> float:
    """Check a finite number above 0, which errors call ``name``.

    Raises:
        DocumentError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DocumentError(f"{name}: {value!r} is no finite number above 0")
    return float(value)

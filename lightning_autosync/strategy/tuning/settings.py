"""Settings of the tuning inside a job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_autosync.documents import unknown_name
from lightning_autosync.errors import DocumentError

DEFAULT_CACHE = "default"
"""Name of the user's own cache directory."""


@dataclass(frozen=True)
class TuningSettings:
    """How a strategy tunes itself while it trains.

    Attributes:
        probe: maximum seconds to measure the links of the job, before training where no cluster is given, and again
            when they seem to have changed; 0 never measures them.
        search: maximum seconds to search for plans by simulation before training, and to predict them again beside it;
            twice as many with ``overlap="step"``.
        plans: number of plans that may be tried on training steps; 0 trains by the first one.
        warm_up: synchronized passes before the first trial.
        passes: maximum number of passes of each of two plans that are compared; twice as many where a gain is not yet
            sure.
        horizon: passes that are expected to follow a trial. A plan is tried if it is expected to gain more over these
            passes than its trial costs.
        accelerators: whether a job on GPUs measures plans before its first step. Otherwise it trains by the backend's
            all-reduce.
        cache: directory in which rank 0 remembers the plan for later jobs; ``default`` is the user's cache directory
            (see `TuningCache`), None remembers nothing.

    Raises:
        DocumentError: a value is out of range.
    """

    probe: float = 10.0
    search: float = 5.0
    plans: int = 6
    warm_up: int = 10
    passes: int = 16
    horizon: int = 1000
    accelerators: bool = False
    cache: str | None = DEFAULT_CACHE

    def __post_init__(self) -> None:
        least = {"search": 0.1, "warm_up": 1, "passes": 4, "horizon": 1}
        if not isinstance(self.cache, str | None):
            raise DocumentError(f"tuning.cache: {self.cache!r} is not the name of a directory, 'default' or None")
        if not isinstance(self.accelerators, bool):
            raise DocumentError(f"tuning.accelerators: {self.accelerators!r} is not True or False")
        for field in [each for each in fields(self) if each.name not in ("cache", "accelerators")]:
            value, lowest = getattr(self, field.name), least.get(field.name, 0)
            whole = field.type == "int"
            known = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not known or not lowest <= value < math.inf:
                kind = "a whole number" if whole else "a number of seconds"
                raise DocumentError(f"tuning.{field.name}: {value!r} is not {kind} of at least {lowest:g}")


TuningArgument = Literal["auto", "off"] | TuningSettings | Mapping[str, Any]


def read_tuning(value: object) -> TuningSettings | None:
    """Settings from the argument ``tuning``, which may be a mapping of them; None turns tuning off.

    Raises:
        DocumentError: the argument has another value.
    """
    if isinstance(value, TuningSettings):
        return value
    if isinstance(value, Mapping):
        names = [field.name for field in fields(TuningSettings)]
        if unknown := [name for name in value if name not in names]:
            raise DocumentError(f"tuning.{unknown[0]}: {unknown_name(str(unknown[0]), names)}")
        return TuningSettings(**value)
    if value not in ("auto", "off"):
        raise DocumentError(f"tuning: {value!r} is {unknown_name(value, ('auto', 'off', 'TuningSettings(...)'))}")
    return TuningSettings() if value == "auto" else None

"""How trials look in pictures, and what their marks say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_autosync.report.figures.style import BLUE, GREY, INK, OCHRE, PURPLE, TEAL
from lightning_autosync.report.tuning.document import Trial
from lightning_autosync.report.units import milliseconds
from lightning_autosync.search.trial_attributes import BASELINE

_BASELINE_LOOK = (GREY, "s")
_LOOKS = ((BLUE, "o"), (TEAL, "^"), (PURPLE, "D"), (OCHRE, "v"), (INK, "P"), (BLUE, "h"), (TEAL, "p"))
"""Unlike each other, the lines of DDP and builders, and the crosses of failed trials."""


def looks(origins: Sequence[str]) -> Mapping[str, tuple[str, str]]:
    """A colour and a marker for each origin, in the order in which they come; builders' plans always look the same."""
    others = [origin for origin in dict.fromkeys(origins) if origin != BASELINE]
    made = {BASELINE: _BASELINE_LOOK} if BASELINE in origins else {}
    return made | {origin: _LOOKS[number % len(_LOOKS)] for number, origin in enumerate(others)}


def tooltip(trial: Trial) -> str:
    """What there is to say of one trial, in one line."""
    parts = [f"trial {trial.number}", trial.origin + (f" ({trial.builder})" if trial.builder else ""), trial.state]
    if trial.seconds is not None:
        parts.append(f"measured {milliseconds(trial.seconds)}")
    if trial.predicted is not None:
        parts.append(f"predicted when proposed {milliseconds(trial.predicted)}")
    if trial.error:
        parts.append(trial.error)
    return ", ".join(parts)

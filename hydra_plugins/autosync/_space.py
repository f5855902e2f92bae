"""The space of a sweep: from overrides in Hydra's syntax to Optuna's distributions, and back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, QuotedString, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from hydra_plugins.autosync._config import SweepError

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Parameter:
    """One key that is swept.

    Attributes:
        key: the text before the ``=`` of an override.
        distribution: its values.
        words: for a choice, each value as an override writes it.
    """

    key: str
    distribution: BaseDistribution
    words: Mapping[Any, str] | None = None

    @property
    def name(self) -> str:
        """The key as studies name it: without ``+``."""
        return self.key.lstrip("+")

    def override(self, value: Scalar) -> str:
        """The override that sets the key to ``value``."""
        return f"{self.key}={value if self.words is None else self.words[value]}"

    def values(self) -> list[Scalar]:
        """Every value, for a grid.

        Raises:
            SweepError: they are infinitely many.
        """
        if isinstance(self.distribution, CategoricalDistribution):
            return list(self.distribution.choices)
        step = getattr(self.distribution, "step", None)
        if step is None or not isinstance(self.distribution, IntDistribution | FloatDistribution):
            raise SweepError(
                f"{self.key}: a grid cannot enumerate an interval; give a choice or a range, or set "
                "hydra/sweeper/sampler=tpe"
            )
        low, high = self.distribution.low, self.distribution.high
        return [low + number * step for number in range(round((high - low) / step) + 1)]


@dataclass(frozen=True)
class Space:
    """The parameters of a sweep.

    Attributes:
        fixed: overrides that every trial has.
        parameters: what differs between trials.
    """

    fixed: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    def overrides(self, values: Mapping[str, Any]) -> list[str]:
        """The overrides of the trial with these values, by name."""
        return [*self.fixed, *(parameter.override(values[parameter.name]) for parameter in self.parameters)]

    def grid(self) -> Iterator[dict[str, Scalar]]:
        """Every combination; the last key changes fastest."""
        names = [parameter.name for parameter in self.parameters]
        for values in itertools.product(*(parameter.values() for parameter in self.parameters)):
            yield dict(zip(names, values, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """The space as plain data."""
        swept = {
            parameter.name: json.loads(distribution_to_json(parameter.distribution)) for parameter in self.parameters
        }
        return {"fixed": sorted(self.fixed), "parameters": swept}


def read_space(params: Mapping[str, Any], arguments: Sequence[str], config_loader: Any = None) -> Space:
    """The space of the config's ``params`` and of the command line's overrides.

    A key on the command line replaces the one in ``params``. A key with a single value is not swept.

    Raises:
        SweepError: a sweep cannot be read.
    """
    parser = OverridesParser.create(config_loader=config_loader)
    overrides = {_name(override): override for override in parser.parse_overrides(_lines(params))}
    overrides |= {_name(override): override for override in parser.parse_overrides(list(arguments))}
    fixed = [str(override.input_line) for override in overrides.values() if not override.is_sweep_override()]
    swept = [_parameter(override) for override in overrides.values() if override.is_sweep_override()]
    return Space(tuple(fixed), tuple(swept))


def _lines(params: Mapping[str, Any]) -> list[str]:
    for key, value in params.items():
        if not isinstance(value, bool | int | float | str):
            raise SweepError(f"hydra.sweeper.params.{key}: expected text such as 'choice(a,b)', got {value!r}")
    return [f"{key}={value}" for key, value in params.items()]


def _name(override: Override) -> str:
    """Identifies the key of an override, without ``+``."""
    return f"{override.key_or_group}@{override.package or ''}"


def _parameter(override: Override) -> Parameter:
    key, sweep = override.get_key_element(), override.value()
    try:
        if isinstance(sweep, RangeSweep):
            return Parameter(key, _range(sweep))
        if isinstance(sweep, IntervalSweep):
            return Parameter(key, _interval(sweep))
    except ValueError as error:
        raise SweepError(f"{override.input_line}: {error}") from None
    return _choice(override, key)


def _range(sweep: RangeSweep) -> BaseDistribution:
    values = sorted(sweep.range())
    if not values:
        raise ValueError("the range is empty")
    step = abs(sweep.step)
    if all(isinstance(value, int) for value in values):
        return IntDistribution(values[0], values[-1], log="log" in sweep.tags, step=step)
    return FloatDistribution(values[0], values[-1], log="log" in sweep.tags, step=step)


def _interval(sweep: IntervalSweep) -> BaseDistribution:
    if isinstance(sweep.start, float) or isinstance(sweep.end, float):
        return FloatDistribution(sweep.start, sweep.end, log="log" in sweep.tags)
    assert sweep.start is not None
    assert sweep.end is not None
    return IntDistribution(sweep.start, sweep.end, log="log" in sweep.tags)


def _choice(override: Override, key: str) -> Parameter:
    if getattr(override.value(), "shuffle", False):
        raise SweepError(f"{key}: shuffle is not allowed, because the sampler orders the trials; leave it out")
    words = list(override.sweep_string_iterator())
    if not words:
        raise SweepError(f"{override.input_line}: the choice is empty")
    if len(set(words)) < len(words):
        raise SweepError(f"{override.input_line}: a value is given twice")
    values = [_scalar(raw, word) for raw, word in zip(override.sweep_iterator(), words, strict=True)]
    if len(set(values)) < len(values):  # 1 and True are equal to a dict, 1 and '1' to a reader of the study
        values = list(words)
    return Parameter(key, CategoricalDistribution(values), dict(zip(values, words, strict=True)))


def _scalar(raw: Any, word: str) -> Scalar:
    """A value as a study can hold it: lists and mappings as they are written."""
    if isinstance(raw, QuotedString):
        return str(raw.text)
    return raw if raw is None or isinstance(raw, bool | int | float | str) else word

"""Workloads of well-known models by name, derived from their layers without running them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lightning_autosync.documents import allowed_names, describe_validation_error
from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload import models
from lightning_autosync.workload.layers import LayerTrace
from lightning_autosync.workload.spec import Workload

FLOPS_PER_SECOND = 5e12
"""Approximate sustained float32 rate of a TITAN X or a T4, on which AutoSync was evaluated."""

_MODELS: dict[str, Callable[..., LayerTrace]] = {
    model.__name__: model
    for model in (
        models.vgg16,
        models.resnet50,
        models.resnet101,
        models.densenet121,
        models.densenet169,
        models.densenet201,
        models.inception_v3,
        models.bert_base,
        models.bert_large,
        models.gpt,
        models.ncf,
    )
}


def names() -> tuple[str, ...]:
    """Names of the models that ``build`` knows."""
    return tuple(_MODELS)


def arguments(name: str) -> dict[str, Any]:
    """The arguments of a model with their defaults.

    Raises:
        WorkloadError: there is no such model.
    """
    parameters = inspect.signature(_model(name)).parameters
    return {key: parameter.default for key, parameter in parameters.items()}


def build(name: str, *, flops_per_second: float = FLOPS_PER_SECOND, **chosen: Any) -> Workload:
    """The workload of a known model, in float32.

    Names and shapes are those of the public implementation. Times follow from the work of each layer at
    ``flops_per_second``: backward takes twice as long as forward and visits the layers in reverse. The optimizer's time
    is unknown (0).

    Args:
        name: one of ``names()``.
        flops_per_second: sustained rate of one rank, with two operations per multiply-accumulate.
        chosen: ``batch_size`` (samples per rank and step) and other arguments of ``arguments(name)``.

    Raises:
        WorkloadError: the model or an argument is unknown, or a value is not allowed.
    """
    defaults = arguments(name)
    if not _is_rate(flops_per_second):
        raise WorkloadError(f"{name}: flops_per_second must be positive and finite, got {flops_per_second!r}")
    checked = {key: _checked(name, key, value, defaults) for key, value in chosen.items()}
    try:
        return _model(name)(**checked).workload(name, flops_per_second)
    except ValidationError as error:
        raise WorkloadError(f"{name}: with these arguments, {describe_validation_error(error)}") from None
    except OverflowError:
        raise WorkloadError(f"{name}: with these arguments, a size or a time is too large") from None


def _model(name: str) -> Callable[..., LayerTrace]:
    try:
        return _MODELS[name]
    except KeyError:
        raise WorkloadError(f"no model '{name}' in the catalogue; {allowed_names(name, _MODELS)}") from None


def _checked(model: str, key: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    """The value, if it has the type of its default and sizes are at least 1.

    Raises:
        WorkloadError: the argument is unknown, or its value is not allowed.
    """
    if key not in defaults:
        raise WorkloadError(f"{model}: unknown argument '{key}'; {allowed_names(key, ('flops_per_second', *defaults))}")
    default = defaults[key]
    if isinstance(default, bool):
        allowed, fits = "true or false", isinstance(value, bool)
    elif isinstance(default, tuple):
        allowed = "a list of whole numbers, each at least 1"
        fits = _is_list(value) and len(value) > 0 and all(map(_is_size, value))
    else:
        allowed, fits = "a whole number, at least 1", _is_size(value)
    if not fits:
        raise WorkloadError(f"{model}: {key} must be {allowed}, got {value!r}")
    return tuple(value) if isinstance(default, tuple) else value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)

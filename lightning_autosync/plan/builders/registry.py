"""The registry of builders, and validation of the arguments that users give them.

A function of this package that is decorated with `register` is a builder. Another package registers its own builders by
an entry point of the group ``lightning_autosync.builders``; its value is a module that calls `register` on import.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, TypeVar, get_type_hints

import numpy
from pydantic import ValidationError, create_model

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Record, allowed_names, describe_validation_error
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.plugins import import_entry_points, mismatch
from lightning_autosync.plan.spec import SyncPlan, TopologyName
from lightning_autosync.workload import Workload

ENTRY_POINTS = "lightning_autosync.builders"


class Builder(Protocol):
    """Makes a plan by rule for a workload on a cluster.

    Further arguments are keywords with a default and a type, which may have bounds. ``topology`` is the topology of
    each message.
    """

    def __call__(self, workload: Workload, cluster: ClusterSpec, *, topology: TopologyName) -> SyncPlan: ...


class _FixedBuilder(Protocol):
    def __call__(self, workload: Workload, cluster: ClusterSpec) -> SyncPlan: ...


Function = TypeVar("Function", bound=Callable[..., SyncPlan])

_registered: dict[str, Callable[..., SyncPlan]] = {}
_relaxed: dict[str, Callable[..., SyncPlan]] = {}


def register(*, relaxed: bool = False, takes_topology: bool = True) -> Callable[[Function], Function]:
    """A decorator that registers a builder, which must satisfy `Builder`.

    Args:
        relaxed: whether the builder's plans are relaxed; such builders need not take ``topology``.
        takes_topology: False for a builder whose plans have a fixed topology.

    Raises:
        PlanError: raised at decoration, if the name is taken or the function lacks required arguments.
    """

    def add(builder: Function) -> Function:
        where = f"builder '{builder.__name__}' of {builder.__module__}"
        if other := {**_registered, **_relaxed}.get(builder.__name__):
            raise PlanError(f"{where}: {other.__module__} already has this name")
        pattern: Any = Builder if takes_topology and not relaxed else _FixedBuilder
        # Compare with a bound method, because builders have no `self`.
        if fault := mismatch(builder, pattern.__call__.__get__(object())):
            raise PlanError(f"{where}: {fault}")
        untyped = inspect.signature(builder).parameters.keys() - get_type_hints(builder).keys()
        if untyped:
            raise PlanError(f"{where}: argument '{min(untyped)}' has no type")
        (_relaxed if relaxed else _registered)[builder.__name__] = builder
        return builder

    return add


@cache
def _load() -> None:
    import_entry_points(ENTRY_POINTS)


def names() -> tuple[str, ...]:
    """Names of the builders of synchronous plans, which have a schedule; this package's builders come first."""
    _load()
    return tuple(_registered)


def relaxed_names() -> tuple[str, ...]:
    """Names of the builders of relaxed plans."""
    _load()
    return tuple(_relaxed)


def find(name: str) -> Callable[..., SyncPlan]:
    """The builder with this name.

    Raises:
        PlanError: there is no such builder.
    """
    _load()
    known = _registered | _relaxed
    if name not in known:
        told = allowed_names(name, known)
        raise PlanError(f"plan: '{name}' is neither a file (.yaml, .yml, .json) nor a builder; {told}")
    return known[name]


def build(name: str, workload: Workload, cluster: ClusterSpec, /, **arguments: Any) -> SyncPlan:
    """The plan of the builder with this name. Integers may also be floats such as 4e6, or numpy numbers.

    Raises:
        PlanError: there is no such builder, or it refuses these arguments.
    """
    builder = find(name)
    with errors_naming(builder):
        return builder(workload, cluster, **_checked(builder, arguments))


@contextmanager
def errors_naming(builder: Callable[..., Any]) -> Iterator[None]:
    """Turn pydantic's errors inside into errors that name the builder.

    Raises:
        PlanError: instead of a ``ValidationError``.
    """
    try:
        yield
    except ValidationError as error:
        raise PlanError(f"builder '{builder.__name__}': {describe_validation_error(error)}") from None


def _checked(builder: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The validated arguments, converted to the builder's types."""
    form = _form(builder)
    for name in arguments:
        if name not in form.model_fields:
            told = allowed_names(name, form.model_fields)
            raise PlanError(f"builder '{builder.__name__}' has no argument '{name}'; {told}")
    record = form(**{name: _plain(value) for name, value in arguments.items()})
    return {name: getattr(record, name) for name in arguments}


@cache
def _form(builder: Callable[..., Any]) -> type[Record]:
    """The keyword arguments of a builder as a record; cached, because a search builds many plans."""
    hints = get_type_hints(builder, include_extras=True)
    parameters = inspect.signature(builder).parameters.values()
    fields: dict[str, Any] = {
        one.name: (hints[one.name], one.default) for one in parameters if one.kind is one.KEYWORD_ONLY
    }
    return create_model(builder.__name__, __base__=Record, **fields)


def _plain(value: Any) -> Any:
    value = value.tolist() if isinstance(value, numpy.generic | numpy.ndarray) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value

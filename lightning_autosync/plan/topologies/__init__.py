"""The registry of topologies.

Each file of this package defines a subclass of `Topology` and ends with ``register(...)``; it needs no other reference.
Another package registers its own topologies by an entry point of the group ``lightning_autosync.topologies``; its value
is a module that calls `register` on import.
"""

from __future__ import annotations

from functools import cache

from lightning_autosync.documents import unknown_name
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.plugins import import_entry_points, import_modules
from lightning_autosync.plan.topologies.base import MODES, Facts, MessageCut, Method, Site, Topology, TreeTopology

ENTRY_POINTS = "lightning_autosync.topologies"

_registered: dict[str, Topology] = {}
_methods: dict[str, tuple[Topology, Method]] = {}


def register(topology: Topology) -> None:
    """Register a topology, so that plans and plan spaces can name it.

    Raises:
        PlanError: its name or the name of one of its methods is taken, or ``encoded_as`` is not one of `MODES`.
    """
    if topology.encoded_as not in MODES:
        raise PlanError(
            f"topology '{topology.name}' of {type(topology).__module__}: encoded_as is '{topology.encoded_as}'; "
            f"allowed: {', '.join(MODES)}"
        )
    taken = [_registered.get(topology.name), *(_methods.get(method.name, (None,))[0] for method in topology.offers)]
    for other in taken:
        if other is not None:
            raise PlanError(
                f"topology '{topology.name}' of {type(topology).__module__}: its name or one of its methods is already "
                f"registered by {type(other).__module__}.{type(other).__name__}; rename it"
            )
    _registered[topology.name] = topology
    _methods.update({method.name: (topology, method) for method in topology.offers})


def find(name: str) -> Topology:
    """The topology with this name.

    Raises:
        PlanError: there is no such topology.
    """
    _load()
    if name not in _registered:
        raise PlanError(f"topology: '{name}' is {unknown_name(name, names())}")
    return _registered[name]


def names() -> tuple[str, ...]:
    """Names of all topologies; this package's topologies come first."""
    _load()
    return tuple(sorted(_registered, key=lambda name: (_is_foreign(_registered[name]), name)))


def everywhere() -> tuple[str, ...]:
    """Names of the topologies that any group can use on any cluster."""
    return tuple(name for name in names() if _registered[name].everywhere)


def methods(facts: Facts, dense: bool) -> tuple[str, ...]:
    """Names of the methods worth trying on a cluster, for dense or row-wise messages, in a fixed order."""
    _load()
    found = [method for topology, method in _methods.values() if topology.pays(method, facts, dense)]
    return tuple(method.name for method in sorted(found, key=lambda method: (method.place, method.name)))


def method(name: str) -> tuple[Topology, Method]:
    """The topology that offers a method, and the method.

    Raises:
        PlanError: no topology offers it.
    """
    _load()
    if name not in _methods:
        raise PlanError(f"method: '{name}' is {unknown_name(name, _methods)}")
    return _methods[name]


@cache
def _load() -> None:
    import_modules(__name__, __path__)
    import_entry_points(ENTRY_POINTS)


def _is_foreign(topology: Topology) -> bool:
    return not type(topology).__module__.startswith(f"{__name__}.")


__all__ = [
    "MODES",
    "Facts",
    "MessageCut",
    "Method",
    "Site",
    "Topology",
    "TreeTopology",
    "everywhere",
    "find",
    "method",
    "methods",
    "names",
    "register",
]

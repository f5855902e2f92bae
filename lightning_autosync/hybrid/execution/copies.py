"""Comparisons of the copies that ranks have of the same part of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.replicas import ReplicaCheck, warn_of_shortened
from lightning_autosync.errors import ExchangeError
from lightning_autosync.hybrid.execution.split_model import Part, SplitModel
from lightning_autosync.workload import shared_parameters, shortened_rows


@dataclass
class _Copies:
    """Parts of which the same ranks have copies.

    Attributes:
        trained: those that train, by name.
        frozen: the others.
    """

    check: ReplicaCheck
    parts: Mapping[str, Part]
    trained: dict[str, Tensor] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)


class CopyChecks:
    """Compares all ranks with the same part of a parameter, at regular intervals and when asked; collective.

    Copies that compute the same gradient are not reduced, so nothing else would show that they differ. Tables with
    ``max_norm`` and parameters that the module tells DDP to ignore are left out, as in data parallelism.

    Args:
        every: number of reductions between comparisons, as of `ReplicaCheck`.
    """

    def __init__(self, split: SplitModel, every: int) -> None:
        mesh = split.mesh
        self._everyone = mesh.group(mesh.dimensions)
        # Sorted, because comparisons are collective and ranks must make them in the same order.
        found = sorted(_by_dimensions(split).items())
        self._copies = [_Copies(ReplicaCheck(every, mesh.group(dimensions)), parts) for dimensions, parts in found]
        self.follow()

    def follow(self) -> None:
        """Look again which parameters train."""
        for copies in self._copies:
            every = {name: part.parameter for name, part in copies.parts.items()}
            copies.trained = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
            copies.frozen = {name: parameter for name, parameter in every.items() if not parameter.requires_grad}

    def count(self) -> None:
        """Count a reduction, and compare the copies if a comparison is due; see `ReplicaCheck.count`.

        Raises:
            ExchangeError: copies differ (raised on every rank of the mesh).
        """
        if any(copies.check.is_due for copies in self._copies):
            self._together(lambda copies: copies.check.count(copies.trained, copies.frozen))
            return
        for copies in self._copies:
            copies.check.count(copies.trained, copies.frozen)

    def run(self) -> None:
        """Compare all copies now, those of frozen parameters too.

        Raises:
            ExchangeError: copies differ (raised on every rank of the mesh).
        """
        self._together(lambda copies: copies.check.run({**copies.trained, **copies.frozen}))

    def _together(self, compare: Callable[[_Copies], None]) -> None:
        # Ranks that have no such copy must not go on alone, so all of them hear of a difference.
        faults = []
        for copies in self._copies:
            try:
                compare(copies)
            except ExchangeError as error:
                faults.append(str(error))
        found = [fault for theirs in gather_json(faults, self._everyone) for fault in theirs]
        if found:
            raise ExchangeError(found[0])


def _by_dimensions(split: SplitModel) -> dict[tuple[int, ...], dict[str, Part]]:
    """The parts to compare, by the dimensions of the mesh along which ranks have copies of them."""
    shortened = shortened_rows(split.module)
    shared = {parameter for _, parameter in shared_parameters(split.module)}
    parts = {name: part for name, part in split.parts.items() if part.parameter in shared}
    warn_of_shortened(name for name, part in parts.items() if part.parameter in shortened)
    found: dict[tuple[int, ...], dict[str, Part]] = {}
    for name, part in parts.items():
        dimensions = tuple(k for k in split.mesh.dimensions if k not in part.shard.dimensions)
        if dimensions and part.parameter not in shortened:
            found.setdefault(dimensions, {})[name] = part
    return found

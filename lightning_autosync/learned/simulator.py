"""The interface of simulators, the replay as a simulator, and the files of saved simulators."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy
from numpy.typing import NDArray
from pydantic import Field

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Document, write_bytes
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned.context import Contexts
from lightning_autosync.learned.dataset.sample import Sample
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.replay.constants import Constants
from lightning_autosync.workload import Workload

HEADER = "simulator.json"


class SimulatorError(DocumentError):
    """A saved simulator cannot be read, or a simulator cannot run here."""


class Header(Document):
    """The header file of a saved simulator.

    Attributes:
        kind: name of the simulator, as in ``SIMULATORS``.
        constants: costs of the hosts that its replay uses.
        settings: description of its ensemble; empty for the replay.
        weights: SHA-256 of the file of weights, from which the file's name is derived; None without weights.
    """

    # Since 3, weights are named by their checksum. Older networks were trained on other features: all-reduced messages
    # had the last rank's rate instead of the slowest one.
    FORMAT: ClassVar[str] = "autosync-simulator/3"
    ERROR: ClassVar[type[DocumentError]] = SimulatorError

    kind: Annotated[str, Field(max_length=64)]
    constants: Constants = Constants()
    settings: dict[str, Any] = Field(default_factory=dict)
    weights: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


def write_simulator(
    directory: str | os.PathLike[str],
    kind: str,
    constants: Constants,
    settings: dict[str, Any] | None = None,
    weights: bytes | None = None,
) -> None:
    """Write a simulator into a directory, which is created if necessary.

    An interruption leaves the previous simulator intact: new weights have a file name of their own, they become valid
    when the header that names them is written, and the old weights are removed last.
    """
    directory = Path(directory)
    checksum, before = None, _weights_of(directory)
    if weights is not None:
        checksum = hashlib.sha256(weights).hexdigest()
        write_bytes(directory / _weights_file(checksum), weights)
    header = Header(kind=kind, constants=constants, settings=settings or {}, weights=checksum)
    header.save(directory / HEADER)
    if before is not None and before != checksum:
        (directory / _weights_file(before)).unlink(missing_ok=True)


def _weights_of(directory: Path) -> str | None:
    """The checksum of the weights of a directory's simulator; None if there is no simulator, or it has no weights."""
    try:
        return read_header(directory).weights
    except SimulatorError:
        return None


def _weights_file(checksum: str) -> str:
    return f"weights-{checksum[:12]}.safetensors"


def read_header(directory: str | os.PathLike[str], kind: str | None = None) -> Header:
    """Read ``simulator.json`` of a directory.

    Raises:
        SimulatorError: there is none, it is invalid, has another format version, or is not of ``kind``.
    """
    path = Path(directory) / HEADER
    if not path.is_file():
        raise SimulatorError(f"{directory}: not a simulator: it has no {HEADER}; `autosync fit` writes one")
    header = Header.load(path)
    if kind is not None and header.kind != kind:
        raise SimulatorError(f"{path}: kind: expected '{kind}', got '{header.kind}'")
    return header


def read_weights(directory: str | os.PathLike[str], header: Header) -> tuple[Path, bytes]:
    """The path of the weights that a header names, and their bytes.

    Raises:
        SimulatorError: the header names none, the file is missing, or its checksum is wrong.
    """
    if header.weights is None:
        raise SimulatorError(f"{Path(directory) / HEADER}: weights: missing; simulator '{header.kind}' needs them")
    path = Path(directory) / _weights_file(header.weights)
    try:
        content = path.read_bytes()
    except OSError as cause:
        raise SimulatorError(
            f"{path}: cannot be read ({cause.strerror}), but {HEADER} needs it; copy both files of the "
            "simulator, or fit it again"
        ) from None
    if hashlib.sha256(content).hexdigest() != header.weights:
        raise SimulatorError(
            f"{path}: altered: its SHA-256 is not the one in {HEADER}; restore it from a copy, or fit it again"
        )
    return path, content


Floats = NDArray[numpy.float64]


class Estimate(NamedTuple):
    """Step times of several plans, arrays [plans].

    Attributes:
        seconds: seconds of a step.
        deviation: standard deviation of the logarithm of ``seconds`` over an ensemble; 0 without an ensemble.
    """

    seconds: Floats
    deviation: Floats


@runtime_checkable
class Estimator(Protocol):
    """Estimates step times of plans without a cluster, and learns from measured plans."""

    def estimate(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Estimate:
        """Estimate the step times of synchronous plans for one workload on one cluster.

        Raises:
            ClusterError: the rates of the cluster are unknown.
            PlanError: a plan has no schedule, or is not for this workload and cluster.
        """
        ...

    def fit(self, samples: Sequence[Sample]) -> None:
        """Train on measured plans, starting from what was loaded or fitted before.

        This takes seconds for some hundred samples.
        """
        ...


@runtime_checkable
class Simulator(Estimator, Protocol):
    """An estimator that can be saved."""

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the files that `load_simulator` reads."""
        ...


class ReplayEstimator:
    """The replay alone, which does not learn from samples.

    Args:
        constants: costs of the hosts; None takes the defaults.
    """

    KIND = "replay"

    def __init__(self, constants: Constants | None = None) -> None:
        self.constants = constants or Constants()
        self._contexts = Contexts(self.constants)

    def estimate(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Estimate:
        """The replay's step times, with deviation 0."""
        replay = self._contexts.of(workload, cluster).replay
        schedules = (compile_plan(plan, workload, cluster) for plan in plans)
        seconds = numpy.array([replay.predict(schedule).step_time for schedule in schedules], dtype=numpy.float64)
        return Estimate(seconds, numpy.zeros(len(seconds)))

    def fit(self, samples: Sequence[Sample]) -> None:
        """Do nothing: the constants come from a probe, never from plans."""

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the constants."""
        write_simulator(directory, self.KIND, self.constants)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> ReplayEstimator:
        """Read what `save` wrote.

        Raises:
            SimulatorError: it is not a simulator, is of another kind, or has another format version.
        """
        return cls(read_header(directory, cls.KIND).constants)

"""The errors that the package raises, and the one for packages of extras that are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "dgl": "learn",
    "hydra": "tune",
    "jinja2": "report",
    "markupsafe": "report",
    "matplotlib": "report",
    "numba": "tune",
    "omegaconf": "tune",
    "optuna": "tune",
    "pandas": "learn",
    "pyarrow": "learn",
    "ray": "ray",
    "safetensors": "tune",
    "sklearn": "tune",
    "submitit": "slurm",
}
"""The extra of this package that installs each optional package, by the name under which Python imports that."""


class AutoSyncError(Exception):
    """Base class of every error of this package; its message says what is wrong, where, and what is allowed."""


class DocumentError(AutoSyncError, ValueError):
    """A file or an argument cannot be used."""


class UnwritableError(DocumentError, OSError):
    """A file cannot be written, for example because the disk is full or read-only."""


class ClusterError(DocumentError):
    """A cluster description is wrong or does not fit the job."""


class WorkloadError(DocumentError):
    """A workload description is wrong or does not fit the model."""


class PlanError(DocumentError):
    """A plan is wrong, or was made for another model or cluster."""


class EquivalenceError(PlanError):
    """A split model does not compute the same as the unsplit one, or the two cannot be compared."""


class MissingPackageError(AutoSyncError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


class TuningError(AutoSyncError, RuntimeError):
    """A tuning run cannot continue; its study keeps the results so far."""


class PredictorError(AutoSyncError, RuntimeError):
    """The process that predicts plans beside a job has failed; the job can go on without it."""


class ExchangeError(AutoSyncError, RuntimeError):
    """An exchange between ranks failed: a peer is lost, a timeout expired, or peers disagree."""


class OpeningError(ExchangeError):
    """A rank could not open connections or buffers; raised on every rank, so all can go on without them."""


class PeerLost(ExchangeError):  # noqa: N818 - an event, named as one
    """A required process is gone: it died, was silent for too long, or has left.

    Attributes:
        peer: rank of the process.
        why: reason.
    """

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(f"rank {peer} is lost: {why}")
        self.peer = peer
        self.why = why

    def __reduce__(self) -> tuple[type[PeerLost], tuple[int, str]]:
        return type(self), (self.peer, self.why)


class MeshTimeout(ExchangeError):  # noqa: N818 - an event, named as one
    """No message arrived within the timeout."""


class Expelled(ExchangeError):  # noqa: N818 - an event, named as one
    """The other processes continue without this one, which can rejoin under a new incarnation."""


class GroupBroken(ExchangeError):  # noqa: N818 - an event, named as one
    """A group's average failed, and this member keeps its values.

    Attributes:
        generation: number of the group.
        members: ranks of the group.
        lost: ranks of the members that are gone.
        why: reason.
    """

    def __init__(self, generation: int, members: tuple[int, ...], lost: tuple[int, ...], why: str) -> None:
        super().__init__(f"group {generation} of ranks {', '.join(map(str, members))} broke: {why}")
        self.generation = generation
        self.members = members
        self.lost = lost
        self.why = why

    def __reduce__(self) -> tuple[type[GroupBroken], tuple[int, tuple[int, ...], tuple[int, ...], str]]:
        return type(self), (self.generation, self.members, self.lost, self.why)


@contextmanager
def needed_for(feature: str) -> Iterator[None]:
    """A context for imports of optional packages.

    Args:
        feature: what cannot be done without them, as the subject of the message.

    Raises:
        MissingPackageError: one of `EXTRAS` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = error.name or ""
        if package not in EXTRAS:  # such as a part of a package that is installed
            raise
        raise MissingPackageError(
            f'{feature} needs {package}, which is not installed: pip install ".[{EXTRAS[package]}]" in a checkout of '
            "lightning-autosync"
        ) from None

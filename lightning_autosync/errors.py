"""The errors that users of the package can meet."""

from __future__ import annotations


class AutoSyncError(Exception):
    """Base of every error of this package; its message says what, where and what is allowed."""


class DocumentError(AutoSyncError, ValueError):
    """A file or an argument cannot be used."""


class UnwritableError(DocumentError, OSError):
    """A file cannot be written: its disk is full or read-only, or its folder is no folder."""


class ClusterError(DocumentError):
    """A cluster description is wrong or does not fit the job."""


class WorkloadError(DocumentError):
    """A workload description is wrong or does not fit the model."""


class PlanError(DocumentError):
    """A synchronization plan is wrong, or made for another model or cluster."""


class EquivalenceError(PlanError):
    """A split model does not compute what the unsplit one does, or the two cannot be compared."""


class TuningError(AutoSyncError, RuntimeError):
    """A tuning run cannot go on; its study keeps the results so far."""


class ExchangeError(AutoSyncError, RuntimeError):
    """An exchange between ranks failed: a lost peer, a time-out, or peers that disagree."""


class PeerLost(ExchangeError):  # noqa: N818 - an event, named as one
    """A process that this one needs is gone: it died, was silent for too long, or has left."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(f"rank {peer} is lost: {why}")
        self.peer = peer
        self.why = why

    def __reduce__(self) -> tuple[type[PeerLost], tuple[int, str]]:
        return type(self), (self.peer, self.why)


class MeshTimeout(ExchangeError):  # noqa: N818 - an event, named as one
    """No message came within the time-out."""


class Expelled(ExchangeError):  # noqa: N818 - an event, named as one
    """The other processes continue without this one, which can come back under a new incarnation."""


class GroupBroken(ExchangeError):  # noqa: N818 - an event, named as one
    """A group's average failed, and this member keeps its values. ``lost`` are the members that are gone."""

    def __init__(self, generation: int, members: tuple[int, ...], lost: tuple[int, ...], why: str) -> None:
        super().__init__(f"group {generation} of ranks {', '.join(map(str, members))} broke: {why}")
        self.generation = generation
        self.members = members
        self.lost = lost
        self.why = why

    def __reduce__(self) -> tuple[type[GroupBroken], tuple[int, tuple[int, ...], tuple[int, ...], str]]:
        return type(self), (self.generation, self.members, self.lost, self.why)

"""The errors that a user of the package can meet."""

from __future__ import annotations


class AutoSyncError(Exception):
    """Base of every error of this package; its message says what, where and what is allowed."""


class DocumentError(AutoSyncError, ValueError):
    """A file or a value handed in cannot be used."""


class ClusterError(DocumentError):
    """A cluster description is wrong or does not fit the job."""


class WorkloadError(DocumentError):
    """A workload description is wrong or does not fit the model."""


class PlanError(DocumentError):
    """A synchronization plan is wrong, or made for another model or cluster."""


class ExchangeError(AutoSyncError, RuntimeError):
    """An exchange between ranks failed: a lost peer, a time-out, or peers that disagree."""

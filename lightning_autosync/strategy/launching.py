"""What is refused before a strategy starts the ranks of its job, so that one process says it and not each rank."""

from __future__ import annotations

from typing import Any

from lightning_autosync.documents import counted
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.strategy.resolution import check_ranks, check_size
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.shares.cuts import check_length


class CheckedLaunch:
    """``launch`` of the launcher of a strategy, which first compares plan, cluster and batch shares with the job.

    It replaces the method on the launcher, so that all classes of launchers of Lightning keep their types, and can be
    sent to processes that are spawned.

    Args:
        strategy: a strategy with a launcher.
    """

    def __init__(self, strategy: Any, settings: StrategySettings) -> None:
        self._strategy, self._settings = strategy, settings

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Launch the ranks, and call ``function`` on each of them.

        Raises:
            ClusterError: the cluster has another number of ranks than the job.
            PlanError: the plan or ``batch_shares`` has.
            DocumentError: other programs started more ranks on this host than the job has devices.
        """
        strategy, trainer = self._strategy, kwargs.get("trainer")
        _check_place(strategy)
        # Validation uses neither. Ranks that others launch as well compare it together at setup: those with
        # the right cluster must not wait for one that has ended.
        launches_all = strategy.num_nodes == 1 and not strategy.cluster_environment.creates_processes_externally
        if launches_all and (trainer is None or trainer.state.fn == "fit"):
            if self._settings.cluster is not None:
                check_size(self._settings.cluster, strategy.num_nodes, strategy.num_processes)
            if isinstance(self._settings.plan, SyncPlan):
                check_ranks(self._settings.plan, self._settings.source, strategy.num_nodes, strategy.num_processes)
            if isinstance(self._settings.batch_shares, tuple):
                check_length(self._settings.batch_shares, strategy.num_processes)
        return type(strategy.launcher).launch(strategy.launcher, function, *args, **kwargs)


def _check_place(strategy: Any) -> None:
    """Refuse a rank for which this host has no device, before Lightning looks for it by its index."""
    place, devices = strategy.cluster_environment.local_rank(), strategy.num_processes
    if place >= devices:
        raise DocumentError(
            f"devices={devices}, num_nodes={strategy.num_nodes}: local rank {place} has no device, because the ranks "
            f"of this job run on fewer hosts, with at least {counted(place + 1, 'rank')} on this one; set devices to "
            "the ranks of a host, and num_nodes to the number of hosts"
        )

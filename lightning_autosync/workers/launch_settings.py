"""The config group ``launch``: where a verb's workers run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Record
from lightning_autosync.errors import DocumentError
from lightning_autosync.workers.emulation import EmulatedLaunch
from lightning_autosync.workers.errors import LaunchError
from lightning_autosync.workers.launch import Launch, LocalLaunch


class LaunchSettings(Record):
    """Where workers run.

    Attributes:
        kind: ``local`` puts all ranks on the loopback interface, ``emulated`` behind emulated links of the cluster.
    """

    kind: Literal["local", "emulated"] = "local"

    @contextmanager
    def open(self, cluster: ClusterSpec | None) -> Iterator[Launch]:
        """The place, for as long as the block runs.

        Raises:
            DocumentError: emulated links need a cluster to emulate.
            LaunchError: links cannot be emulated here; the message names the launch that works everywhere.
        """
        if self.kind == "local":
            yield LocalLaunch()
            return
        if cluster is None:
            raise DocumentError("cluster: missing; launch=emulated needs one, as in cluster=fat_node_star")
        try:
            launch = EmulatedLaunch(cluster)
        except LaunchError as error:
            raise LaunchError(f"launch=emulated: {error} (launch=local)") from None
        with launch:
            yield launch

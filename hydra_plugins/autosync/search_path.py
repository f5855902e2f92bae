"""This package's config groups (cluster, model, sync, ...) in every Hydra application: ``cluster: four_equal``."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

import lightning_autosync

PROVIDER = "lightning-autosync"
PACKAGED = "pkg://lightning_autosync.conf"


class AutoSyncSearchPath(SearchPathPlugin):
    """Appends the groups, so that an application's own options of the same names come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(PROVIDER, configuration_path())


def configuration_path() -> str:
    """Where the groups are: in the package if it was installed from a wheel, in a checkout beside it."""
    package = Path(lightning_autosync.__file__).parent
    if (package / "conf" / "cluster").is_dir():
        return PACKAGED
    return f"file://{package.parent / 'conf'}"

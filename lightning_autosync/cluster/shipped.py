"""The clusters that ship with the package, and finding a cluster by name, path or value."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import ClusterError

_SUFFIXES = (".yaml", ".yml", ".json")


def shipped_clusters() -> dict[str, Path]:
    """The file of every shipped cluster, by name, in order of name."""
    return {path.stem: path for path in sorted((configuration_directory() / "cluster").glob("*.yaml"))}


def configuration_directory() -> Path:
    """``conf``: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "cluster").is_dir():
            return candidate
    raise ClusterError(f"conf: not found in {package} nor beside it; the installation is incomplete")


def resolve_cluster(value: ClusterSpec | str | os.PathLike[str]) -> ClusterSpec:
    """A cluster from itself, from the path of its file, or from the name of a shipped one.

    Text is a path if it ends in .yaml, .yml or .json or has a directory in it, and a name otherwise.

    Raises:
        ClusterError: the file is wrong, no shipped cluster has that name, or ``value`` is none of these.
    """
    if isinstance(value, ClusterSpec):
        return value
    if not isinstance(value, str | os.PathLike):
        raise ClusterError(f"cluster: expected a ClusterSpec, a path or a name, got {type(value).__name__}")
    text = os.fspath(value)
    if isinstance(value, os.PathLike) or text.endswith(_SUFFIXES) or os.path.dirname(text):
        return ClusterSpec.load(text)
    shipped = shipped_clusters()
    if text not in shipped:
        raise ClusterError(f"cluster: no shipped cluster is named '{text}'; there are {', '.join(shipped)}")
    return ClusterSpec.load(shipped[text])

"""Cluster files: those shipped with the package, by name, and AutoDist's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.cluster.units import warn_of_bare_numbers
from lightning_autosync.documents import allowed_names, checked, is_path, naming_lines, read_data
from lightning_autosync.errors import ClusterError


def shipped_clusters() -> dict[str, Path]:
    """The files of the shipped clusters by name, sorted by name."""
    return {path.stem: path for path in sorted((configuration_directory() / "cluster").glob("*.yaml"))}


def configuration_directory() -> Path:
    """The directory ``conf``: inside the package when installed from a wheel, next to it in a checkout.

    Raises:
        ClusterError: it is missing.
    """
    package = Path(__file__).parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "cluster").is_dir():
            return candidate
    raise ClusterError(f"conf: not found in {package} nor beside it; the installation is incomplete")


def resolve_cluster(value: ClusterSpec | str | os.PathLike[str]) -> ClusterSpec:
    """A cluster from a spec, from the path of a file, or from the name of a shipped cluster (see `is_path`).

    Raises:
        ClusterError: the file is wrong, no shipped cluster has this name, or ``value`` has another type.
    """
    if isinstance(value, ClusterSpec):
        return value
    if not isinstance(value, str | os.PathLike):
        raise ClusterError(f"cluster: expected a ClusterSpec, a path or a name, got {type(value).__name__}")
    if is_path(value):
        spec = ClusterSpec.load(value)
        warn_of_bare_numbers(read_data(value, ClusterError), os.fspath(value))
        return spec
    name, shipped = os.fspath(value), shipped_clusters()
    if name not in shipped:
        raise ClusterError(f"cluster: no shipped cluster is named '{name}'; {allowed_names(name, shipped, 3)}")
    return ClusterSpec.load(shipped[name])


_GBPS = 1e9 / 8


class _AutoDistNode(BaseModel):
    """One entry of ``nodes``; its login settings (``ssh_config``) are ignored."""

    address: str
    cpus: list[int] = []
    gpus: list[int] = []
    chief: bool = False
    network_bandwidth: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class _AutoDistFile(BaseModel):
    nodes: list[_AutoDistNode] = Field(min_length=1)


def read_resource_spec(path: str | os.PathLike[str]) -> ClusterSpec:
    """The cluster of an AutoDist ``resource_spec.yml``.

    Each address becomes a node with one device per GPU, or one device if it lists no GPUs. All nodes are linked to one
    switch with their ``network_bandwidth`` (in Gbit/s; 1 by default, as in AutoDist). The chief comes first, so it runs
    rank 0.

    Raises:
        ClusterError: the file cannot be read, a field is wrong, or there are several chiefs.
    """
    nodes = _read_nodes(path)
    chiefs = [node.address for node in nodes if node.chief]
    if len(chiefs) > 1:
        raise ClusterError(f"{path}: nodes: only one node can be chief, not {len(chiefs)}: {', '.join(chiefs)}")
    nodes.sort(key=lambda node: not node.chief)
    fields: dict[str, Any] = {
        "format": ClusterSpec.FORMAT,
        "name": Path(path).stem,
        "nodes": [_node(node) for node in nodes],
    }
    if len(nodes) > 1:
        fields |= {"switches": ["switch"], "links": [_link(node) for node in nodes]}
    return ClusterSpec.from_dict(fields, source=str(path))


def _read_nodes(path: str | os.PathLike[str]) -> list[_AutoDistNode]:
    data = read_data(path, ClusterError)
    if not isinstance(data, dict):
        raise ClusterError(f"{path}: expected a mapping with 'nodes', got {type(data).__name__}")
    with naming_lines(path):
        return checked(_AutoDistFile, data, str(path), ClusterError).nodes


def _node(node: _AutoDistNode) -> dict[str, Any]:
    return {"name": node.address, "address": node.address, "devices": len(set(node.gpus)) or 1}


def _link(node: _AutoDistNode) -> dict[str, Any]:
    return {"a": node.address, "b": "switch", "bandwidth": node.network_bandwidth * _GBPS}

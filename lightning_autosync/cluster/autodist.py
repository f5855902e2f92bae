"""Reading AutoDist's cluster files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.documents import checked, naming_lines, read_data
from lightning_autosync.errors import ClusterError

_GBPS = 1e9 / 8


class _AutoDistNode(BaseModel):
    """One entry of ``nodes``; how to log in (``ssh_config``) does not matter here."""

    address: str
    cpus: list[int] = []
    gpus: list[int] = []
    chief: bool = False
    network_bandwidth: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class _AutoDistFile(BaseModel):
    nodes: list[_AutoDistNode] = Field(min_length=1)


def read_resource_spec(path: str | os.PathLike[str]) -> ClusterSpec:
    """The cluster of an AutoDist ``resource_spec.yml``.

    Each address becomes a node with a device per GPU, or one device where it lists none. All nodes hang on
    one switch by links of their ``network_bandwidth`` (Gbit/s, 1 where absent, as in AutoDist). The chief
    comes first and so runs rank 0.

    Raises:
        ClusterError: the file cannot be read, a field is wrong, or there are several chiefs.
    """
    nodes = _read_nodes(path)
    chiefs = [node.address for node in nodes if node.chief]
    if len(chiefs) > 1:
        raise ClusterError(f"{path}: nodes: one node can be chief, not {len(chiefs)}: {', '.join(chiefs)}")
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

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_autosync.cluster import read_resource_spec
from lightning_autosync.errors import ClusterError

RESOURCES = """
nodes:
  - address: 10.0.0.2
    cpus: [0, 1]
    ssh_config: key
  - address: 10.0.0.1
    gpus: [0, 1, 2, 3]
    chief: true
    network_bandwidth: 50
ssh:
  key: {username: me, key_file: /home/me/key}
"""


def read(text: str, folder: Path) -> object:
    path = folder / "resources.yml"
    path.write_text(text)
    return read_resource_spec(path)


def test_a_resource_spec_becomes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "resources.yml"
    path.write_text(RESOURCES)
    spec = read_resource_spec(path)
    assert spec.name == "resources"
    assert [(node.name, node.address, node.devices) for node in spec.nodes] == [
        ("10.0.0.1", "10.0.0.1", 4),
        ("10.0.0.2", "10.0.0.2", 1),
    ]
    assert [link.bandwidth for link in spec.links] == [6.25e9, 1.25e8]


def test_one_node_needs_no_links(tmp_path: Path) -> None:
    path = tmp_path / "resources.yml"
    path.write_text("nodes: [{address: localhost, gpus: [0, 1]}]")
    spec = read_resource_spec(path)
    assert (spec.world_size, spec.links) == (2, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "expected a mapping with 'nodes', got list"),
        ("ssh: {}", "nodes: missing"),
        ("nodes: []", "nodes: List should have at least 1 item"),
        ("nodes: [{gpus: [0]}]", "nodes[0].address: missing"),
        ("nodes: [{address: a, gpus: two}]", "nodes[0].gpus: Input should be a valid list"),
        (
            "nodes: [{address: a, network_bandwidth: 0}]",
            "nodes[0].network_bandwidth: Input should be greater",
        ),
        (
            "nodes: [{address: a, chief: true}, {address: b, chief: true}]",
            "one node can be chief, not 2: a, b",
        ),
        ("nodes: [{address: a}, {address: a}]", "nodes[1].name: 'a' is taken"),
        ("nodes: [", "not valid YAML"),
    ],
)
def test_wrong_resource_specs_name_file_and_field(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)) as caught:
        read(text, tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "resources.yml"))

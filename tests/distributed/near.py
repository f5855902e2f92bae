"""A command that stands for ssh, and clusters of nodes that it reaches: all of them this machine."""

from __future__ import annotations

from pathlib import Path

from lightning_autosync.cluster import ClusterSpec

SCRIPT = """#!/bin/sh
# Like ssh: a clean environment, a shell for one line, and a greeting that nobody asked for.
[ "$1" = 127.0.0.1 ] || { echo "no route to $1" >&2; exit 255; }
echo Welcome to $1
exec env -i HOME="$HOME" PATH="$PATH" sh -c "$2"
"""


def near_command(folder: Path) -> str:
    """The command, written to ``folder``."""
    path = folder / "near"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return str(path)


def cluster(*addresses: str | None) -> ClusterSpec:
    """One node an address, all on one switch."""
    nodes = [{"name": f"node{number}", "address": address} for number, address in enumerate(addresses)]
    links = [{"a": node["name"], "b": "switch"} for node in nodes]
    return ClusterSpec.from_dict(
        {"format": ClusterSpec.FORMAT, "name": "near", "nodes": nodes, "switches": ["switch"], "links": links}
    )

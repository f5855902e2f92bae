"""Where the ranks of the examples run."""

from __future__ import annotations

from lightning_autosync.measure.emulation.netns import require_namespaces
from lightning_autosync.measure.errors import LaunchError


def launch() -> str:
    """``emulated`` where links can be emulated (as root on Linux), else ``local``, with the reason printed."""
    try:
        require_namespaces()
    except LaunchError as error:
        print(f"All ranks talk over loopback, so plans for slow links gain nothing here. {error}")
        return "local"
    return "emulated"

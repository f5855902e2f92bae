"""DGL, imported when a graph simulator is used and never before."""

from __future__ import annotations

import os
from types import ModuleType

from lightning_autosync.simulator.learned.files import SimulatorError


def load_dgl() -> ModuleType:
    """The module ``dgl`` on torch.

    Raises:
        SimulatorError: it is not installed, or cannot be loaded.
    """
    # Unless told, DGL asks for its backend by writing a file into the home directory, and says so.
    os.environ.setdefault("DGLBACKEND", "pytorch")
    try:
        import dgl
    except ImportError as error:
        raise SimulatorError(
            f"dgl: cannot be imported ({error}); graph simulators need it: pip install 'dgl>=1.1.3,<2' (Python 3.11 or "
            "older), or take simulator=linear, recurrent or replay"
        ) from None
    module: ModuleType = dgl
    return module

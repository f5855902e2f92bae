"""DGL, imported when a graph simulator is used and never before."""

from __future__ import annotations

import os
import re
from types import ModuleType

from lightning_autosync.learned.files import SimulatorError

_LEAST, _BELOW = (1, 1, 3), (2,)
"""Versions from which on, and below which, its interface is the one that is used here."""


def load_dgl() -> ModuleType:
    """The module ``dgl`` on torch.

    Raises:
        SimulatorError: it is not installed, cannot be loaded, or is of a version that is not supported.
    """
    # Unless told, DGL asks for its backend by writing a file into the home directory, and says so.
    os.environ.setdefault("DGLBACKEND", "pytorch")
    try:
        import dgl
    # It looks for its library itself (RuntimeError where it finds none) and opens it by ctypes (OSError).
    except (ImportError, RuntimeError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise _refusal(f"cannot be imported ({why})") from None
    module: ModuleType = dgl
    version = str(getattr(module, "__version__", "unknown"))
    if not _LEAST <= tuple(map(int, re.findall(r"\d+", version)[:3])) < _BELOW:
        raise _refusal(f"version {version} is not supported")
    return module


def _refusal(why: str) -> SimulatorError:
    return SimulatorError(
        f"dgl: {why}; graph simulators need it: pip install 'dgl>=1.1.3,<2' (Python 3.11 or older), or take "
        "simulator=linear, recurrent or replay"
    )

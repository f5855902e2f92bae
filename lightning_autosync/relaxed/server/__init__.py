"""Parameter servers, which keep and update slices of the parameters and of the optimizer's state."""

from __future__ import annotations

from lightning_autosync.relaxed.server.client import ParameterServer
from lightning_autosync.relaxed.server.server import ShardServer, serve

__all__ = ["ParameterServer", "ShardServer", "serve"]

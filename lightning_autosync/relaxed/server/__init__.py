"""Parameter servers that keep slices of the parameters and of the optimizer's state, and update both."""

from __future__ import annotations

from lightning_autosync.relaxed.server.client import ParameterServer
from lightning_autosync.relaxed.server.clock import StalenessClock
from lightning_autosync.relaxed.server.server import ShardServer, serve

__all__ = ["ParameterServer", "ShardServer", "StalenessClock", "serve"]

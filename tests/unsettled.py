"""Imported first by the server of `forked`: what it imports is no garbage, so Python need not look for any."""

from __future__ import annotations

import gc

gc.disable()  # until tests.settled

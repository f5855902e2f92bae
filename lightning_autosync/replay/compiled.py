"""`compiled`: the decorator of functions that numba compiles, and the only place that imports numba."""

from __future__ import annotations

from lightning_autosync.errors import needed_for

# The functions below it would also run in plain Python, but hundreds of times slower.
with needed_for("The simulation of plans"):
    from numba import njit

compiled = njit(cache=True, nogil=True)

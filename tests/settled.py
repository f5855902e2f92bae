"""Imported last by the server of `forked`: collections of garbage in its forks leave out what it has imported.

Python's collector would visit a million objects in each of them, and write to them: the kernel would copy the pages.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()

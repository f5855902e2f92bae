"""Pairs of jobs, one under DDP and one under AutoSync, that must end alike; ``python -m tests.parity`` runs them."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
for _folder in (_TESTS, _TESTS / "strategy"):  # whose modules are used here
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

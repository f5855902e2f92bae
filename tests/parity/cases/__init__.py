"""All cases, by name."""

from __future__ import annotations

from parity.case import Case
from parity.cases import controls, fabric, gradients, lightning, local, loops, manual, optimizers, structure

FAMILIES = [
    gradients.family,
    optimizers.family,
    manual.family,
    structure.family,
    loops.family,
    fabric.family,
    local.family,
    lightning.family,
]
CASES: dict[str, Case] = {}
for _family in FAMILIES:
    for _case in _family.cases:
        if _case.name in CASES:
            raise ValueError(f"two cases are named '{_case.name}'")
        CASES[_case.name] = _case

CONTROLS: dict[str, Case] = {case.name: case for case in controls.family.cases}
"""Pairs that must be found to be different."""

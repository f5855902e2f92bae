"""Two runs of a job with deterministic algorithms end with the same bits: no times decide how gradients are summed."""

from __future__ import annotations

import pytest
import tuning_jobs


@pytest.mark.parametrize("deterministic", [False, True, "warn"])
def test_two_runs_have_the_same_bits_if_algorithms_are_deterministic(quartet, deterministic: bool | str) -> None:
    """Among four ranks, plans add gradients in different orders."""
    for found in quartet.run(tuning_jobs.repeated, deterministic=deterministic):
        assert (found["distance"] == 0.0) is bool(deterministic)
        assert (found["switches"] == [0, 0]) is bool(deterministic)
        lines = [line for line in found["told"] if "torch's deterministic algorithms are on" in line]
        assert len(lines) == 2 * bool(deterministic)
        for report in found["reports"]:
            assert ("no other plan is tried: torch's deterministic" in report) is bool(deterministic)

"""The table that compares group averages of partial reduces with those of gloo."""

from __future__ import annotations

from io import StringIO

from benchmarks.group_averages import groups_table
from rich.console import Console


def test_a_way_that_takes_half_the_time_has_a_speedup_of_two() -> None:
    text = StringIO()
    rounds = [(0.010, 0.020), (0.020, 0.040), (0.010, 0.020)]  # seconds of the mesh and of gloo
    Console(file=text, width=120).print(groups_table("average of a group", [(2, 25.0, rounds)]))
    (row,) = (line for line in text.getvalue().splitlines() if "2.00x" in line)
    assert "10.00" in row
    assert "20.00" in row
    assert "speedup over gloo" in text.getvalue()

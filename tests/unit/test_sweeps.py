"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

from itertools import product

from sweeps import crossed

CHANGES = [("add", 1), ("remove", 2), ("replace", 3)]


def test_of_crossed_lists_each_value_runs_at_least_once() -> None:
    cases = crossed(CHANGES, ["native", "star"])
    assert [case.values for case in cases] == [(*change, way) for change, way in product(CHANGES, ["native", "star"])]
    short = [case.values for case in cases if not case.marks]
    assert {values[:2] for values in short} == {*CHANGES}
    assert {values[2] for values in short} == {"native", "star"}
    assert len(short) == len(CHANGES)
    assert all(case.marks[0].name == "slow" for case in cases if case.marks)

"""Sizes and suggestions as text for people."""

from __future__ import annotations

import pytest

from lightning_autosync.documents import bytes_text, did_you_mean, unknown_name


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (412, "412 B"),
        (999.4, "999 B"),
        (999.6, "1 kB"),
        (25_960, "26 kB"),
        (8_294_400, "8.29 MB"),
        (999_600_000, "1 GB"),
        (12.5e9, "12.5 GB"),
        (4e12, "4 TB"),
        (5.5e16, "55000 TB"),
    ],
)
def test_the_unit_of_a_size_is_the_one_that_fits(size: float, text: str) -> None:
    assert bytes_text(size) == text


def test_the_nearest_names_are_suggested() -> None:
    known = ["two_racks_2to1", "two_racks_8to1", "ring"]
    assert did_you_mean("two_racks_8", known) == "did you mean 'two_racks_8to1'?"
    both = "did you mean two_racks_8to1=... or two_racks_2to1=...?"
    assert did_you_mean("two_racks_8", known, "{}=...".format, most=3) == both
    assert did_you_mean("mesh", known) == ""


def test_an_unknown_name_is_told_with_the_nearest_one_and_all_others() -> None:
    assert unknown_name("prob", ["probe", "search"]) == "not known; did you mean 'probe'? allowed: probe, search"
    assert unknown_name("x", ["probe", "search"]) == "not known; allowed: probe, search"

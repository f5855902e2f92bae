"""Short labels differ where names differ, and keep their numbers."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given
from sweeps import examples

from lightning_autosync.documents import short_labels

WORDS = st.sampled_from(["layers", "encoder", "attention", "weight", "a", "…", "lay…s"]) | st.integers(0, 200).map(str)
NAMES = st.lists(WORDS, min_size=1, max_size=6).map(".".join) | st.text(max_size=30)


@given(st.lists(NAMES, max_size=6), st.integers(1, 40))
@examples(60)
def test_labels_tell_names_apart_and_keep_numbers_and_short_names(names: list[str], most: int) -> None:
    labels = short_labels(names, most)
    assert len(set(zip(names, labels, strict=True))) == len(set(names)) == len(set(labels))
    for name, label in zip(names, labels, strict=True):
        assert re.findall(r"\d+", label) == re.findall(r"\d+", name)
        assert len(label) <= len(name)
        if len(name) <= most:
            assert label == name


@pytest.mark.parametrize("most", [16, 28, 34])
def test_labels_of_layers_are_short(most: int) -> None:
    names = [f"encoder.layers.{layer}.attention.weight" for layer in (1, 11)]
    labels = short_labels(names, most)
    assert all(len(label) <= most for label in labels)
    assert [re.search(r"\d+", label).group() for label in labels] == ["1", "11"]  # type: ignore[union-attr]


def test_names_that_would_look_alike_keep_more() -> None:
    one, other = short_labels(["beginning_middle_end", "beginning_muddle_end"], 12)
    assert one != other
    assert max(len(one), len(other)) < len("beginning_middle_end")

"""A selection of the pairs in every run of the tests, all in the long one, and whether differences are found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sweeps import sweep

from parity.cases import CASES, CONTROLS
from parity.listed import REASONS
from parity.matrix import DIFFERENT, Crew, crew, pairs

SELECTION = {
    "data replaced in on_after_backward": "default",
    "gradients kept for later": "servers",
    "as views, noise added": "default",
    "create graph": "default",
    "LBFGS": "servers",
    "sharpness aware by hand": "trees",
    "sparse embedding with sparse adam": "ring",
    "adversaries, toggled": "default",
    "convolution, channels last, fused": "default",
    "parameter: complex": "ring",
    "parameter: empty": "trees",
    "buffers of all kinds": "native",
    "reentrant checkpoints, 2 uses, static graph": "native",
    "scripted part": "default",
    "callback: stochastic weight averaging": "default",
    "written by DDP, resumed by AutoSync": "default",
    "written by AutoSync, resumed by DDP": "native",
    "fabric, clipped and accumulated": "default",
    "ignored by one name of two": "default",
    "attack that ends earlier on one rank": "default",
    "attack that ends earlier by hand": "ring",
    "pictures on one rank": "default",
    "wrapper called by hand": "default",
    "hand over after a wrapper call": "ring",
    "fabric module without its wrapper": "default",
    "fabric second pass through one graph": "ring",
    "fabric forward within no sync and backward outside": "default",
}
"""Case, and the plan that it runs by."""

LATER = (
    "gradients kept for later", "as views, noise added", "parameter: empty", "attack that ends earlier by hand",
    "hand over after a wrapper call", "fabric second pass through one graph", "pictures on one rank", "scripted part",
)  # fmt: skip
"""Cases that resemble others."""

FOUND = {
    "gradients that one side halves": "float32[",
    "a weight that is off by little": "/notes/weights'//net.0.bias",
    "a note that one side has": "under AutoSync only",
    "an error on one side": "DDP: ends; AutoSync: ValueError: only here",
    "an assertion that fails on both sides": "AssertionError",
    "an error that was not foreseen": "the case itself is wrong",
    "nothing noted": "nothing was noted",
}
"""Pairs that differ, and a part of what is told of them."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew() as found:
        yield found


@pytest.mark.parametrize("name", sweep(SELECTION, [name for name in SELECTION if name not in LATER]))
def test_a_pair_ends_alike(ranks: Crew, name: str) -> None:
    (verdict,) = pairs([CASES[name]], ranks, [SELECTION[name]])
    assert verdict.ending != DIFFERENT, verdict.told


@pytest.mark.parametrize("name", FOUND)
def test_differences_are_found(ranks: Crew, name: str) -> None:
    (verdict,) = pairs([CONTROLS[name]], ranks)
    assert verdict.ending == DIFFERENT
    assert FOUND[name] in verdict.told


def test_only_cases_that_exist_are_listed() -> None:
    assert {name.split(" | ")[0] for name in REASONS} <= set(CASES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_pairs_end_alike(ranks: Crew) -> None:
    verdicts = list(pairs(CASES.values(), ranks))
    assert len(verdicts) >= 250
    assert [(each.case.name, each.plan, each.told) for each in verdicts if each.ending == DIFFERENT] == []

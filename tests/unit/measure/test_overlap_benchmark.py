"""The benchmark of steps that overlap refuses wrong names before it starts ranks."""

from __future__ import annotations

from unittest import mock

import pytest
from benchmarks import step_overlap


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vgg16", "vgg61"], "step_overlap: no model 'vgg61' in the catalogue; did you mean 'vgg16'?"),
        (["vgg16", "round=3"], "step_overlap: 'round': not known; did you mean 'rounds'\\? allowed: rounds, rate, "),
        (["vgg16", "clusters=four_equal,four_equals"], "step_overlap: .*'four_equals'"),
    ],
)
def test_a_wrong_name_is_one_message_before_ranks_start(arguments: list[str], message: str) -> None:
    with mock.patch.object(step_overlap, "EmulatedLaunch") as launch, pytest.raises(SystemExit, match=message):
        step_overlap.main(arguments)
    assert not launch.called

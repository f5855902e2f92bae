"""Who owns gradients: as under DDP, the user, with the parameters' strides and whatever the user does with them."""

from __future__ import annotations

import gradient_calls
import pytest

CASES = [
    ("Net", "other_data"),
    ("Net", "kept"),
    ("Net", "flat"),
    ("Net", "detached"),
    ("Net", "late_hooks"),
    ("Strided", "plain"),
    ("Strided", "fused"),
    ("Strided", "strides"),
    ("Strided", "other_data"),
    ("Waves", "plain"),
    ("Waves", "kept"),
    ("Twice", "plain"),
    ("Withheld", "plain"),
]


@pytest.mark.parametrize("topology", ["native", "tree", "shared_memory"])
@pytest.mark.parametrize(("model", "job"), CASES)
def test_gradients_are_those_of_ddp_whatever_a_user_does_with_them(pool, model: str, job: str, topology: str) -> None:
    for gap in pool.run(gradient_calls.gap, model=model, job=job, topology=topology):
        assert gap < 2e-6


@pytest.mark.parametrize("topology", ["native", "shared_memory"])
@pytest.mark.parametrize("case", [("Net", "plain"), ("Strided", "fused"), ("Strided", "strides"), ("Waves", "plain")])
def test_gradients_as_views_are_those_of_ddp_with_views(pool, case: tuple[str, str], topology: str) -> None:
    model, job = case
    arguments = {"model": model, "job": job, "topology": topology, "gradient_as_bucket_view": True}
    for gap in pool.run(gradient_calls.gap, **arguments):
        assert gap < 2e-6

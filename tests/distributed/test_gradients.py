"""Who owns gradients: as under DDP, the user, with the parameters' strides and whatever the user does with them."""

from __future__ import annotations

import gradient_calls
import pytest
from sweeps import crossed

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


@pytest.mark.parametrize(
    ("model", "job", "topology"), crossed(CASES, ["native", "tree", "shared_memory", "halving_doubling"])
)
def test_gradients_are_those_of_ddp_whatever_a_user_does_with_them(pool, model: str, job: str, topology: str) -> None:
    for gap in pool.run(gradient_calls.gap, model=model, job=job, topology=topology):
        assert gap < 2e-6


VIEWS = [("Net", "plain"), ("Strided", "fused"), ("Strided", "strides"), ("Waves", "plain")]


@pytest.mark.parametrize(("model", "job", "topology"), crossed(VIEWS, ["native", "shared_memory"]))
def test_gradients_as_views_are_those_of_ddp_with_views(pool, model: str, job: str, topology: str) -> None:
    arguments = {"model": model, "job": job, "topology": topology, "gradient_as_bucket_view": True}
    for gap in pool.run(gradient_calls.gap, **arguments):
        assert gap < 2e-6

"""The gradients by which a probe measures what one costs a main thread."""

from __future__ import annotations

from itertools import groupby, pairwise

from lightning_autosync.measure.probe.costs import _layers


def test_a_main_thread_rests_between_the_layers_of_a_probe() -> None:
    """Without rests, the caches of its core never hold what other ranks use, and a gradient seems to cost half."""
    workload = _layers(9)
    layers = [(ready, len(list(members))) for ready, members in groupby(workload.variables, lambda v: v.ready or 0.0)]
    assert [count for _, count in layers] == [3, 3, 3]
    assert all(later - earlier >= 5e-4 for (earlier, _), (later, _) in pairwise(layers))
    assert workload.backward_time > layers[-1][0]

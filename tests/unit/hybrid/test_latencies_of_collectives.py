"""What latencies cost in hybrid plans, against times measured with gloo over links that delay every byte by 20 ms."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.conversions import COLLECTIVES
from lightning_autosync.hybrid.mesh import Links
from lightning_autosync.hybrid.pricing import BUCKET, Pricing
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.replay.rings import WITH_NOTICE

ONE_WAY = 0.02
MEASURED = {
    2: {"all_reduce": 81.9e-3, "all_gather": 41.1e-3, "reduce_scatter": 41.0e-3, "all_to_all": 41.1e-3},
    4: {"all_reduce": 246.6e-3, "all_gather": 124.3e-3, "reduce_scatter": 42.2e-3, "all_to_all": 41.6e-3},
}
"""Seconds of collectives of 128 numbers, by number of ranks; the slowest rank, in the best of three runs."""


def pricing(ranks: int, one_way: float = ONE_WAY, **rates: str) -> Pricing:
    cluster = ClusterSpec.uniform(ranks, bandwidth="1 Gbit/s", latency=one_way / 2)
    return Pricing((ranks,), range(ranks), Links(cluster), HybridRates(**rates))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", MEASURED)
def test_each_hop_waits_for_the_receivers_notice(ranks: int, collective: str) -> None:
    assert pricing(ranks).byte_and_call(collective, (0,))[1] == pytest.approx(MEASURED[ranks][collective], 0.05)


@pytest.mark.parametrize(("collective", "hops"), [("all_reduce", 6), ("all_gather", 3), ("reduce_scatter", 3)])
def test_nccl_needs_no_notice(collective: str, hops: int) -> None:
    late, at_once = (pricing(4, one_way, backend="nccl").byte_and_call(collective, (0,)) for one_way in (ONE_WAY, 0.0))
    assert late[1] - at_once[1] == pytest.approx(hops * ONE_WAY)


def test_large_gradients_hide_latencies_that_are_shorter_than_a_piece() -> None:
    """Pieces of 1 MiB take 8 ms: of all latencies of 4 ms with the notice, only the last piece's counts."""
    one_way = 2e-3
    late, at_once = (pricing(4, way).gradients((0,), BUCKET) for way in (one_way, 0.0))
    assert late - at_once == pytest.approx(WITH_NOTICE * one_way, rel=1e-3)

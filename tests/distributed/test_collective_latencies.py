"""gloo's collectives over delayed links, beside the cost model of hybrid plans."""

from __future__ import annotations

import latency_calls
import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.mesh import Links
from lightning_autosync.hybrid.pricing import Pricing
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.workers import LaunchError, WorkerPool

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(UNABLE), reason=UNABLE)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_small_collectives_take_the_latencies_that_are_predicted(ranks: int) -> None:
    cluster = ClusterSpec.uniform(ranks, bandwidth="1 Gbit/s", latency="10 ms")
    with EmulatedLaunch(cluster) as launch, WorkerPool(ranks, launch) as pool:
        found = pool.run(latency_calls.seconds_of_collectives, elements=128)
    pricing = Pricing((ranks,), range(ranks), Links(cluster), HybridRates())
    for collective in found[0]:
        _, predicted = pricing.byte_and_call(collective, (0,))
        # No byte is early, but other load on this machine may delay one. A notice too much or too little is a factor.
        assert 0.95 * predicted < max(each[collective] for each in found) < 1.7 * predicted

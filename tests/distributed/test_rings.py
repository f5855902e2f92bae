"""Which way the rings of gloo go: the replay counts on it."""

from __future__ import annotations

import pytest
import ring_calls

from lightning_autosync.replay.stages import BACKWARDS, ONWARDS


@pytest.mark.parametrize(("collective", "way"), [("all_reduce", BACKWARDS), ("all_gather", ONWARDS)])
def test_a_ring_goes_its_way(pool, collective: str, way: int) -> None:
    found = pool.run(ring_calls.traffic, collective=collective)
    owner = {(ours, theirs): rank for rank, connections in enumerate(found) for ours, theirs, _ in connections}
    for rank, connections in enumerate(found):
        sent = [0] * pool.world_size
        for ours, theirs, count in connections:
            if (theirs, ours) in owner:
                sent[owner[theirs, ours]] += count
        assert sent[(rank + way) % pool.world_size] > 0.95 * sum(sent) > 1e6

"""Which nodes may hang on one switch: those that send each other more than others when everybody sends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

LEAST_STEP = 0.05
"""Of the logarithm of rates, between the merge that makes a group and the one that takes it up."""


def candidate_groups(contrast: NDArray[numpy.float64]) -> Iterator[tuple[int, ...]]:
    """Groups of nodes worth a test, parts before the whole; by average linkage.

    Args:
        contrast: [nodes, nodes] what each pair got while everybody sent to everybody, relative to what it would get
            on one switch. Pairs behind a common bottleneck get less, and leave more to the others.
    """
    nodes = len(contrast)
    if nodes < 4:
        return
    logarithm = numpy.log(numpy.maximum(contrast, 1e-3))
    nearness = (logarithm + logarithm.T) / 2
    numpy.fill_diagonal(nearness, 0.0)
    distance = nearness[~numpy.eye(nodes, dtype=bool)].max() - nearness
    numpy.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), method="average")
    taken_up = {int(part): row[2] for row in tree for part in row[:2]}
    members: dict[int, tuple[int, ...]] = {node: (node,) for node in range(nodes)}
    for merge, (one, other, height, size) in enumerate(tree, start=nodes):
        members[merge] = tuple(sorted(members[int(one)] + members[int(other)]))
        if size <= nodes - 2 and taken_up[merge] - height > LEAST_STEP:
            yield members[merge]

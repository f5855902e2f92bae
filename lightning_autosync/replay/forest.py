"""The trees of schedules as arrays, each kept once."""

from __future__ import annotations

import numba
import numpy
from numpy.typing import NDArray

from lightning_autosync.replay.network import Integers, Network

NOTHING = -1
"""In place of a tree: no way."""


class Forest:
    """Trees by number.

    Attributes:
        parents: [trees, ranks] as in `Tree.parents`.
        order: [trees, ranks] ranks, each after its parent.
        sizes: [trees, ranks] how many ranks hang on a rank, itself included.
    """

    def __init__(self, network: Network) -> None:
        self.ranks = network.ranks
        self.parents: Integers = numpy.zeros((0, self.ranks), dtype=numpy.int32)
        self.order: Integers = self.parents
        self.sizes: Integers = self.parents
        self._network = network
        self._rows: dict[tuple[int, ...], int] = {}
        self._stars: dict[int, int] = {}
        self._new: list[NDArray[numpy.int32]] = []

    def row(self, parents: tuple[int, ...]) -> int:
        """The number of a tree; arrays know it after `settle`."""
        found = self._rows.get(parents)
        if found is None:
            found = self._rows[parents] = self._add(numpy.array(parents, dtype=numpy.int32))
        return found

    def star(self, root: int) -> int:
        """The number of the star around ``root``."""
        found = self._stars.get(root)
        if found is None:
            parents = numpy.full(self.ranks, root, dtype=numpy.int32)
            parents[root] = -1
            found = self._stars[root] = self._add(parents)
        return found

    def settle(self) -> None:
        """Bring the arrays up to date, and the network's routes with them."""
        if not self._new:
            return
        parents = numpy.stack(self._new)
        self._new = []
        order, sizes = _measure(parents)
        self.parents = numpy.concatenate([self.parents, parents])
        self.order = numpy.concatenate([self.order, order])
        self.sizes = numpy.concatenate([self.sizes, sizes])
        used = numpy.zeros((self.ranks, self.ranks), dtype=numpy.bool_)
        rows, children = numpy.nonzero(parents >= 0)
        above = parents[rows, children]
        used[children, above] = True
        used[above, children] = True
        self._network.find_routes(numpy.flatnonzero(used))

    def _add(self, parents: NDArray[numpy.int32]) -> int:
        self._new.append(parents)
        return len(self.parents) + len(self._new) - 1


@numba.njit(cache=True)
def _measure(parents: Integers) -> tuple[Integers, Integers]:
    """Orders (each rank after its parent) and subtree sizes of trees [trees, ranks]."""
    trees, ranks = parents.shape
    order, sizes = numpy.empty_like(parents), numpy.ones_like(parents)
    missing = numpy.empty(ranks, dtype=numpy.int32)
    for tree in range(trees):
        missing[:] = 0
        for rank in range(ranks):
            if parents[tree, rank] >= 0:
                missing[parents[tree, rank]] += 1
        # Leaves go to the back; a rank follows when all that hangs on it has gone.
        place, head = ranks, ranks
        for rank in range(ranks):
            if missing[rank] == 0:
                place -= 1
                order[tree, place] = rank
        while head > 0:
            head -= 1
            rank = order[tree, head]
            parent = parents[tree, rank]
            if parent >= 0:
                sizes[tree, parent] += sizes[tree, rank]
                missing[parent] -= 1
                if missing[parent] == 0:
                    place -= 1
                    order[tree, place] = parent
    return order, sizes

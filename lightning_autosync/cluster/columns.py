"""Column generation: the linear programs behind packings of trees."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy
from numpy.typing import NDArray
from scipy.sparse import csc_array, diags_array, hstack, vstack

from lightning_autosync.errors import ClusterError

Vector = NDArray[numpy.float64]
Column = TypeVar("Column", bound=Hashable)

_TOLERANCE = 1e-6
_TRACE = 1e-9


@dataclass(frozen=True)
class Packing(Generic[Column]):
    """An optimal packing.

    Attributes:
        rate: sum of the weights, in the unit of the capacities.
        columns: all generated columns, used or not.
        loads: sparse matrix [channels, columns] of channel loads.
        prices: [channels] dual price of a load on each channel. All capacities together cost ``rate``, and every column
            costs at least 1 up to a millionth.
    """

    rate: float
    columns: tuple[Column, ...]
    loads: csc_array
    prices: Vector


def generate_columns(
    capacities: Vector,
    seeds: Iterable[Column],
    load: Callable[[Sequence[Column]], csc_array],
    price: Callable[[Vector], Iterable[Column]],
) -> Packing[Column]:
    """Column generation: add columns until none improves the rate by more than a millionth.

    Args:
        capacities: [channels] rate of each channel.
        seeds: columns to start with, at least one.
        load: function from columns to the number of uses of each channel [channels, columns].
        price: function from dual prices [channels] to cheap columns, one of which is a cheapest one.
    """
    columns = list(dict.fromkeys(seeds))
    loads = load(columns)
    known = set(columns)
    while True:
        rate, duals = _solve(loads, capacities)
        found = [column for column in dict.fromkeys(price(duals)) if column not in known]
        loads_found = load(found)
        cheap = numpy.flatnonzero(loads_found.T @ duals < 1 - _TOLERANCE)
        if not len(cheap):
            return Packing(rate, tuple(columns), loads, duals)
        columns += [found[index] for index in cheap]
        known.update(columns)
        loads = hstack([loads, loads_found[:, cheap]], format="csc")


def cheapest_weights(packing: Packing[Column], capacities: Vector, rate: float, costs: Vector, work: Vector) -> Vector:
    """[columns] weights of the columns of ``packing`` that reach ``rate`` at minimal cost.

    The cost is the sum of ``costs`` [columns] plus the largest sum of ``work`` [workers, columns] of a worker, both per
    unit of weight.
    """
    unit = float(capacities.min())
    goal = -numpy.ones((1, len(packing.columns)))
    rows = vstack([_filled(packing.loads, capacities), csc_array(goal), csc_array(work)])
    most_work = numpy.append(numpy.zeros(len(capacities) + 1), -numpy.ones(len(work)))
    limits = numpy.concatenate([numpy.ones(len(capacities)), [-rate / unit], numpy.zeros(len(work))])
    program = hstack([rows, csc_array(most_work[:, None])], format="csc")
    result = _optimize(numpy.append(costs, 1.0), program, limits)
    return numpy.asarray(result.x[:-1]) * unit


def _solve(loads: csc_array, capacities: Vector) -> tuple[float, Vector]:
    """The best rate over these columns, and the dual price [channels] of a load on each channel."""
    unit = float(capacities.min())
    result = _optimize(-numpy.ones(loads.shape[1]), _filled(loads, capacities), numpy.ones(len(capacities)))
    duals = numpy.maximum(-result.ineqlin.marginals, 0.0) * unit / capacities
    return -float(result.fun) * unit, duals


def _filled(loads: csc_array, capacities: Vector) -> csc_array:
    """Utilization of each channel by a weight equal to the smallest capacity; keeps the program well scaled."""
    return diags_array(capacities.min() / capacities) @ loads


def _optimize(costs: Vector, rows: csc_array, limits: Vector) -> Any:
    from scipy.optimize import linprog  # late: it takes long to import

    result = linprog(costs, A_ub=rows, b_ub=limits, method="highs")
    if not result.success:
        raise ClusterError(f"tree packing: the linear program failed: {result.message}")
    return result


def without_traces(prices: Vector, capacities: Vector) -> Vector:
    """[channels] the prices, 0 where the share in the cost of all capacities is below a billionth.

    The solver leaves such prices on channels that do not bind.
    """
    costs = prices * capacities
    return numpy.where(costs < _TRACE * costs.sum(), 0.0, prices)


def both_ways(prices: Vector) -> Vector:
    """[channels] prices on symmetric links, each the mean over both directions of a link.

    Trees that are used both ways do not tell the directions of a link apart, but other pairs of trees do.
    """
    mean: Vector = (prices + prices[numpy.arange(len(prices)) ^ 1]) / 2
    return mean

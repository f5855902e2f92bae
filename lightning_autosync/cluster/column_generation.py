"""Packing linear programs with too many columns to write down, solved by column generation.

Maximise the summed weight of columns so that on every channel the weighted loads stay within the capacity.
The columns come from a ``price`` function that finds those that are cheapest under the channels' dual prices;
a column that costs less than 1 improves the program (Dantzig and Wolfe 1960).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csc_array, diags_array, hstack, vstack

from lightning_autosync.errors import ClusterError

Vector = NDArray[numpy.float64]
Column = TypeVar("Column", bound=Hashable)

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Packing(Generic[Column]):
    """An optimal packing.

    Attributes:
        rate: the summed weight, in the unit of the capacities.
        columns: every column met on the way, used or not.
        loads: one column of channel loads for each, shape (channels, columns), sparse.
        prices: of a load on each channel, shape (channels,): all capacities together cost ``rate``, and no column costs
            less than 1 by more than a millionth.
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
    """Pack until no column improves the rate by more than a millionth.

    Args:
        capacities: what each channel carries, shape (channels,).
        seeds: columns to start with, at least one.
        load: how often columns use each channel, shape (channels, columns).
        price: columns that are cheapest under dual prices of shape (channels,), among them a cheapest one.
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
    """Weights of the columns of ``packing``, shape (columns,), that reach ``rate`` at least cost.

    The cost is the summed ``costs``, shape (columns,), plus the most that one worker does of ``work``, shape
    (workers, columns), each per weight.
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
    """The best rate over these columns, and the dual price of a load on each channel."""
    unit = float(capacities.min())
    result = _optimize(-numpy.ones(loads.shape[1]), _filled(loads, capacities), numpy.ones(len(capacities)))
    duals = numpy.maximum(-result.ineqlin.marginals, 0.0) * unit / capacities
    return -float(result.fun) * unit, duals


def _filled(loads: csc_array, capacities: Vector) -> csc_array:
    """How full a weight of the least capacity makes each channel; keeps the program well scaled."""
    return diags_array(capacities.min() / capacities) @ loads


def _optimize(costs: Vector, rows: csc_array, limits: Vector) -> Any:
    result = linprog(costs, A_ub=rows, b_ub=limits, method="highs")
    if not result.success:
        raise ClusterError(f"tree packing: the linear program failed: {result.message}")
    return result

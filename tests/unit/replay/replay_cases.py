"""Schedules made by hand, of one megabyte a message, for links of one megabyte a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import (
    AllReduce,
    AllToAll,
    Compressor,
    Message,
    PairwiseReduce,
    Round,
    Schedule,
    Tree,
    TreeTransfer,
)
from lightning_autosync.plan.schedule import Transfer
from lightning_autosync.replay import Constants, Prediction, Replay
from lightning_autosync.workload import Variable, Workload

RATE = 1e6
ELEMENTS = 250_000
IDEAL = Constants.ideal()


def one_switch(ranks: int, **fields: Any) -> ClusterSpec:
    return ClusterSpec.uniform(nodes=ranks, bandwidth=RATE, **fields)


def tree(parents: Sequence[int], pieces: int = 10, second_root: int = -1) -> TreeTransfer:
    shape = Tree(tuple(parents))
    return TreeTransfer(0, ELEMENTS, shape, shape, ELEMENTS // pieces, second_root)


def in_pairs(order: Sequence[int], halves: bool = False, pieces: int = 1) -> PairwiseReduce:
    return PairwiseReduce(0, ELEMENTS, ELEMENTS // pieces, tuple(order), halves)


def all_reduce() -> AllReduce:
    return AllReduce(0, ELEMENTS)


def owned_by(owners: Sequence[int]) -> AllToAll:
    step = ELEMENTS // len(owners)
    return AllToAll((*range(0, step * len(owners), step), ELEMENTS), tuple(owners))


def schedule(
    ranks: int,
    transfers: Sequence[Transfer],
    priorities: Sequence[int] = (),
    compressor: Compressor | None = None,
) -> Schedule:
    """One message for each transfer."""
    return Schedule(
        ranks,
        tuple(
            Message(
                index=index,
                name=f"message{index}",
                variables=(f"variable{index}",),
                numel=ELEMENTS - 1,
                dtype="float32",
                axis=0,
                rows=0,
                compressor=compressor or Compressor(),
                priority=priorities[index] if priorities else 0,
                rounds=(Round(ELEMENTS, (transfer,)),),
            )
            for index, transfer in enumerate(transfers)
        ),
    )


def workload(messages: int = 1, ready: Sequence[float] = (), **times: float) -> Workload:
    return Workload(
        name="by hand",
        variables=tuple(
            Variable(name=f"variable{index}", shape=(ELEMENTS - 1,), ready=ready[index] if ready else None)
            for index in range(messages)
        ),
        **times,
    )


def price(
    cluster: ClusterSpec,
    transfers: Sequence[Transfer],
    detail: Any = "frames",
    work: Workload | None = None,
    constants: Constants = IDEAL,
    **fields: Any,
) -> Prediction:
    """Predict the step of a schedule of ``transfers``."""
    made = schedule(cluster.world_size, transfers, **fields)
    return Replay(work or workload(len(transfers)), cluster, constants).predict(made, detail)

"""`HybridRates`: a document with the costs of computation and collectives on the machines of a job."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lightning_autosync.cluster import FRAMING
from lightning_autosync.documents import Document, Record

_Rate = Annotated[float, Field(ge=1, le=1e30)]
_Cost = Annotated[float, Field(ge=0, le=1e3)]


class CollectiveRate(Record):
    """Costs of one kind of collective.

    Attributes:
        call: seconds per call.
        peer: seconds per other rank that takes part.
        host: core-seconds per byte that a rank sends, including receiving, adding and copying.
        wire: factor on the time of its bytes on the links by their rates, with all groups active at once.
    """

    call: _Cost
    peer: _Cost
    host: _Cost
    wire: Annotated[float, Field(ge=0.1, le=100)] = 1.0


class HybridRates(Document):
    """Compute rates of one rank and costs of collectives, for one backend.

    The defaults are those of gloo on a server with two cores. With gloo a reduce-scatter is an all-to-all and a local
    sum, because gloo's own ``reduce_scatter`` sends as much as an all-reduce.

    Attributes:
        backend: backend of ``torch.distributed``.
        cores: number of cores that all ranks share, as on one machine; None gives each rank its own core.
        flops: floating-point operations per second of matrix products.
        memory: bytes per second that operations read and write.
        operation: seconds per operation, independent of its size.
        layer: seconds per call of a plan's layer on top of its operations, forward and backward together.
        update: bytes of parameters per second that the optimizer updates.
        framing: bytes on a link for each byte of payload.
        all_gather, reduce_scatter, all_reduce, all_to_all: costs of the collectives.
    """

    FORMAT: ClassVar[str] = "autosync-hybrid-rates/1"

    backend: Literal["gloo", "nccl"] = "gloo"
    cores: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    flops: _Rate = 60e9
    memory: _Rate = 8e9
    operation: _Cost = 6e-6
    layer: _Cost = 60e-6
    update: _Rate = 0.8e9
    framing: Annotated[float, Field(ge=1, le=1e3)] = FRAMING
    all_gather: CollectiveRate = CollectiveRate(call=120e-6, peer=30e-6, host=0.6e-9)
    reduce_scatter: CollectiveRate = CollectiveRate(call=150e-6, peer=35e-6, host=0.9e-9)
    all_reduce: CollectiveRate = CollectiveRate(call=130e-6, peer=50e-6, host=0.7e-9)
    all_to_all: CollectiveRate = CollectiveRate(call=130e-6, peer=35e-6, host=0.7e-9)

    def crowd(self, ranks: int) -> float:
        """Factor, at least 1, by which host work takes longer because ``ranks`` share too few cores."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

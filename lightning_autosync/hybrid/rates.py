"""`HybridRates`: what computation and collectives cost on the machines of a job, as a document."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lightning_autosync.cluster import FRAMING
from lightning_autosync.documents import Document, Record

_Rate = Annotated[float, Field(ge=1, le=1e30)]
_Cost = Annotated[float, Field(ge=0, le=1e3)]


class CollectiveRate(Record):
    """Costs of one kind of collective beside the time of its bytes on the links.

    Attributes:
        call: seconds of a call.
        peer: seconds for each other rank that takes part.
        host: core-seconds for each byte that a rank sends, with receiving, adding and copying.
        wire: how much longer the links take for its bytes than their rates say, all groups active at once.
    """

    call: _Cost
    peer: _Cost
    host: _Cost
    wire: Annotated[float, Field(ge=0.1, le=100)] = 1.0


class HybridRates(Document):
    """What one rank computes in a second, and what collectives cost, for one backend.

    The defaults are those of gloo on a server with two cores. There a sum that is cut is an all-to-all and a local
    sum, for gloo's own ``reduce_scatter`` sends as much as an all-reduce.

    Attributes:
        backend: of ``torch.distributed``.
        cores: how many cores all ranks share, as on one machine; None gives each rank its own.
        flops: floating-point operations per second of products of matrices.
        memory: bytes per second that operations read and write.
        operation: seconds of each operation, however small.
        layer: seconds of each call of a layer of a plan beyond its operations, forward and backward together.
        update: bytes per second of parameters that the optimizer updates.
        framing: bytes on a link for each byte of payload.
        all_gather, reduce_scatter, all_reduce, all_to_all: the collectives.
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
        """By how much a core-second is longer because ranks share cores."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

"""`Constants`: what a host adds to the cost of bytes on a wire, as a document."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lightning_autosync.documents import Document, Record


class CodecRates(Record):
    """Bytes/s of uncompressed values that one core encodes or decodes, by what is done to them.

    ``rows`` is the merging of touched rows; for ``powersgd`` the bytes are those of the matrices.
    """

    fp16: PositiveFloat = 10e9
    bf16: PositiveFloat = 20e9
    int8: PositiveFloat = 1.0e9
    topk: PositiveFloat = 0.3e9
    powersgd: PositiveFloat = 2.5e9
    rows: PositiveFloat = 0.5e9

    def seconds_per_byte(self, kind: str) -> float:
        """Seconds a byte for a compressor's kind or ``rows``; ``none`` costs nothing."""
        return 0.0 if kind == "none" else 1 / float(getattr(self, kind))


class Constants(Document):
    """Costs of the hosts, measured once on the machines of a job and good for every plan on them.

    The defaults are those of gloo and of this package's transport on one current server core.

    Attributes:
        framing: bytes on the wire for each byte of payload: Ethernet, IP and TCP headers.
        message_cost: seconds of one core to send or to receive one piece of a collective.
        frame_cost: the same for a frame on a tree, which this package's own transport carries.
        host_cost: seconds of one core for each byte that it sends or receives.
        sharing_loss: share by which transfers take longer for each further full channel on their way: connections that
            share several full channels do not keep all of them full all the time.
        copy_rate: bytes/s of packing gradients and of copying within a host.
        reduce_rate: bytes/s that one core adds to a buffer.
        encode, decode: bytes/s of the compressors.
        cores: how many cores all ranks share, as emulated ranks on one machine do; None gives each rank its own.
        collectives: how many of the backend's collectives are under way at once; gloo has two threads for them.
    """

    FORMAT: ClassVar[str] = "autosync-constants/1"

    framing: Annotated[float, Field(ge=1)] = 1514 / 1448
    message_cost: NonNegativeFloat = 20e-6
    frame_cost: NonNegativeFloat = 40e-6
    host_cost: NonNegativeFloat = 0.35e-9
    sharing_loss: NonNegativeFloat = 0.045
    copy_rate: PositiveFloat = 4e9
    reduce_rate: PositiveFloat = 4e9
    encode: CodecRates = CodecRates()
    decode: CodecRates = CodecRates(int8=2.2e9, topk=2e9, rows=1e9)
    cores: PositiveFloat | None = None
    collectives: Annotated[int, Field(ge=1)] = 2

    @classmethod
    def ideal(cls) -> Constants:
        """Hosts that cost nothing: only links and their latencies remain."""
        free = CodecRates(**dict.fromkeys(CodecRates.model_fields, 1e30))
        return cls(
            framing=1,
            message_cost=0,
            frame_cost=0,
            host_cost=0,
            sharing_loss=0,
            copy_rate=1e30,
            reduce_rate=1e30,
            encode=free,
            decode=free,
        )

    def crowd(self, ranks: int) -> float:
        """By how much a step takes longer because ``ranks`` share too few cores."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

"""`Constants`: what a host adds to the cost of bytes on a wire, as a document."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from lightning_autosync.cluster.units import FRAMING
from lightning_autosync.documents import Document, Integer, Record

FASTEST = 1e30
"""Bytes/s of hosts that cost nothing."""
Cores = Annotated[float, Field(ge=1e-3, le=1e6)]
"""How many cores ranks share."""
_Rate = Annotated[float, Field(ge=1, le=FASTEST)]
_Cost = Annotated[float, Field(ge=0, le=1e3)]


class CodecRates(Record):
    """Bytes/s of uncompressed values that one core encodes or decodes, by what is done to them.

    ``rows`` is the merging of touched rows; for ``powersgd`` the bytes are those of the matrices.
    """

    fp16: _Rate = 2.9e9
    bf16: _Rate = 49e9
    int8: _Rate = 7.2e9
    topk: _Rate = 0.52e9
    powersgd: _Rate = 4.6e9
    rows: _Rate = 1.3e9

    def seconds_per_byte(self, kind: str) -> float:
        """Seconds a byte for a compressor's kind or ``rows``; ``none`` costs nothing."""
        return 0.0 if kind == "none" else 1 / float(getattr(self, kind))


class Constants(Document):
    """Costs of the hosts, measured once on the machines of a job and good for every plan on them.

    ``autosync probe`` fits them to measurements that are not plans, named below in brackets. The defaults are what it
    found, to two digits, with gloo and this package's transport on a server with two cores, the links emulated::

        autosync probe launch=emulated cluster=four_equal every_pair=false head=0.15 window=0.2

    but for ``burst``, ``cores`` and ``accelerated``, which are of the links and the job, not of the software.

    Attributes:
        framing: bytes on the wire for each byte of payload: Ethernet, IP and TCP headers [full frames].
        message_cost: seconds of one core to send or to receive one piece of a collective [core-seconds of an
            all-reduce of 128 numbers a rank].
        message_delay: seconds from the arrival of such a piece until a thread of the backend takes it [the time of
            that all-reduce].
        pair_cost: seconds of one core to send or to receive one pair's message of an all-to-all, be it empty
            [core-seconds of an all-to-all of one number].
        collective_cost: seconds of every rank's main thread for a collective [a backward pass with 72 messages, and
            with one].
        frame_cost: seconds of one core to send or to receive one frame on a tree, which this package's own transport
            carries, among many [core-seconds of 512 small frames each way].
        wake_up: seconds from the arrival of a lone frame until the transport's thread takes it [a frame to and fro].
        gradient_cost: seconds of one core for each gradient: the hook, and autograd around it [a backward pass of 72
            tiny gradients, and of 8].
        host_cost: seconds of one core for each byte that it sends or receives [core-seconds of large frames].
        merge_cost: seconds of one core to take apart, merge or pack one set of touched rows, be it empty [merging small
            sets].
        sharing_loss: share by which transfers take longer for each further full channel on their way: connections that
            share several full channels do not keep all of them full all the time [everybody sends to everybody].
        burst: bytes that pass a rested link at once before its rate holds, as token buckets let them [the beginning
            of single flows].
        copy_rate: bytes/s of packing gradients and of copying within a host [copying 16 MiB].
        scan_rate: bytes/s of a table that one core searches for touched rows [searching 4 MiB].
        reduce_rate: bytes/s that one core adds to a buffer [adding 16 MiB].
        encode, decode: bytes/s of the compressors [4 MiB of normal values].
        cores: how many cores all ranks share, as emulated ranks on one machine do; None gives each rank its own [asked
            of the system]. Costs in core-seconds are those while all of them are busy.
        collectives: how many of the backend's collectives are under way at once; gloo has two threads for them [asked
            of the backend].
        accelerated: whether gradients are computed elsewhere than on the core that packs them, so that packing goes on
            while the next ones are computed [what the job says].
    """

    FORMAT: ClassVar[str] = "autosync-constants/1"

    framing: Annotated[float, Field(ge=1, le=1e3)] = FRAMING
    message_cost: _Cost = 23e-6
    message_delay: _Cost = 0.43e-6
    pair_cost: _Cost = 33e-6
    collective_cost: _Cost = 38e-6
    frame_cost: _Cost = 8.8e-6
    wake_up: _Cost = 0.0
    gradient_cost: _Cost = 13e-6
    host_cost: _Cost = 0.28e-9
    merge_cost: _Cost = 60e-6
    sharing_loss: _Cost = 0.0012
    burst: Annotated[float, Field(ge=0, le=1e18)] = 0.0
    copy_rate: _Rate = 26e9
    scan_rate: _Rate = 2e9
    reduce_rate: _Rate = 26e9
    encode: CodecRates = CodecRates()
    decode: CodecRates = CodecRates(fp16=72e9, bf16=67e9, int8=19e9, topk=37e9, powersgd=2.5e9, rows=8.3e9)
    cores: Cores | None = None
    collectives: Annotated[Integer, Field(ge=1, le=1024)] = 2
    accelerated: bool = False

    @classmethod
    def ideal(cls) -> Constants:
        """Hosts that cost nothing: only links and their latencies remain."""
        free = CodecRates(**dict.fromkeys(CodecRates.model_fields, FASTEST))
        made: dict[str, Any] = {"framing": 1, "encode": free, "decode": free}
        for name in cls.model_fields:
            if name.endswith("_rate"):
                made[name] = FASTEST
            elif name.endswith(("_cost", "_delay", "_loss", "wake_up")):
                made[name] = 0
        return cls(**made)

    def hop_delay(self, collective: bool, ranks: int) -> float:
        """Seconds that a hop among ``ranks`` takes beyond its time on the wire.

        The cores' time of a collective's pieces is not in it: all ranks handle theirs at once, step by step, so that
        they add up to the time for which hosts are busy.
        """
        return self.crowd(ranks) * (self.message_delay if collective else 2 * self.frame_cost + self.wake_up)

    def crowd(self, ranks: int) -> float:
        """Factor by which host work takes longer because ``ranks`` share too few cores; at least 1."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

"""`Constants`: a document with the host costs of communication."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from lightning_autosync.cluster.units import FRAMING
from lightning_autosync.documents import Document, Integer, Record
from lightning_autosync.plan.builders.rows import ADDING_RATE

FASTEST = 1e30
"""Bytes/s of an ideal host: large enough that its costs vanish."""
Cores = Annotated[float, Field(ge=1e-3, le=1e6)]
"""Number of cores that all ranks share."""
_Rate = Annotated[float, Field(ge=1, le=FASTEST)]
_Cost = Annotated[float, Field(ge=0, le=1e3)]


class CodecRates(Record):
    """Bytes/s of uncompressed values that one core encodes, by kind of codec; see `DecodeRates` for decoding.

    ``rows`` is the rate of merging touched rows, with empty caches. For ``powersgd`` the bytes are those of matrices.
    """

    fp16: _Rate = 2.9e9
    bf16: _Rate = 49e9
    int8: _Rate = 7.2e9
    topk: _Rate = 0.52e9
    powersgd: _Rate = 4.6e9
    rows: _Rate = ADDING_RATE

    def seconds_per_byte(self, kind: str) -> float:
        """Seconds per byte for a compressor's kind or ``rows``; 0 for ``none``."""
        return 0.0 if kind == "none" else 1 / float(getattr(self, kind))


class DecodeRates(CodecRates):
    """The rates of decoding; their defaults are those of decoding."""

    fp16: _Rate = 72e9
    bf16: _Rate = 67e9
    int8: _Rate = 19e9
    topk: _Rate = 37e9
    powersgd: _Rate = 2.5e9
    rows: _Rate = 8.3e9


class Constants(Document):
    """Costs of the hosts, measured once on the machines of a job and valid for every plan on them.

    ``autosync probe`` fits them to micro-benchmarks, named below in brackets. The defaults are its results, to two
    digits, with gloo and this package's transport on a server with two cores and emulated links::

        autosync probe launch=emulated cluster=four_equal every_pair=false head=0.15 window=0.2

    ``exchange_cost``, ``pass_cost``, ``finish_cost``, ``unpack_cost``, ``step_cost`` and ``due_cost`` were measured
    later on a server a third as fast, and scaled. ``burst``, ``cores`` and ``accelerated`` describe the links and the
    job, so their defaults are not measured.

    Attributes:
        framing: bytes on the wire for each byte of payload, because of Ethernet, IP and TCP headers [full frames].
        message_cost: core-seconds to send or to receive one piece of a collective [core-seconds of an all-reduce of
            128 numbers per rank].
        message_delay: seconds from the arrival of such a piece until a thread of the backend takes it [time of that
            all-reduce].
        pair_cost: core-seconds to send or to receive one pair's message of an all-to-all, even an empty one
            [core-seconds of an all-to-all of one number].
        collective_cost: seconds of every rank's main thread per collective [backward passes with 72 messages and
            with one].
        frame_cost: core-seconds to send or to receive one of many frames on a tree, with this package's own transport
            [core-seconds of 512 small frames each way].
        wake_up: seconds from the arrival of a single frame until the transport's thread takes it [round trip of a
            frame].
        exchange_cost: core-seconds of a rank to start and complete a message on trees, without its frames [core-seconds
            of 64 messages of one frame].
        gradient_cost: core-seconds per gradient, for the hook and the autograd work around it [backward passes with 72
            tiny gradients and with 9].
        pass_cost: core-seconds of the main thread for a backward pass and the wait after it, without those of gradients
            and messages [backward passes with 9 tiny gradients in a message].
        finish_cost: core-seconds of the main thread to take the sum of a message that has arrived [72 messages and one
            that have arrived].
        unpack_cost: core-seconds to copy a mean into its gradient, without the copy of its bytes [messages of 72 tiny
            gradients and of 9 that have arrived].
        step_cost: core-seconds of the main thread to make the optimizer's step for one message by itself, in a step
            that overlaps, without the work of the optimizer on its parameters [steps with 72 messages and with
            one, each with overlap and without].
        due_cost: core-seconds of the main thread for each parameter, to remember its step and to make it later
            [messages of 72 tiny gradients and of 9, each with overlap and without].
        host_cost: core-seconds per byte sent or received [core-seconds of large frames].
        merge_cost: core-seconds to unpack, merge or pack one set of touched rows, even an empty one [a few
            merges of two small sets, beginning with empty caches].
        sharing_loss: relative slowdown of a transfer for each further full channel on its route. Connections that
            share several full channels do not keep all of them full all the time [every rank sends to every rank].
        burst: bytes that an idle link sends at once before its rate applies, as with token buckets [start of single
            flows].
        copy_rate: bytes/s of packing gradients and of copying within a host [copying 16 MiB].
        scan_rate: bytes/s at which one core searches a table for touched rows [searching 4 MiB, with an eighth of the
            rows touched and empty caches].
        reduce_rate: bytes/s that one core adds to a buffer [adding 16 MiB].
        encode, decode: bytes/s of the compressors [4 MiB of normally distributed values].
        cores: number of cores that all ranks share, as emulated ranks on one machine do; None gives each rank its own
            core [asked of the system]. Costs in core-seconds hold while all cores are busy.
        collectives: number of collectives that the backend runs at once; gloo has two threads for them [asked of the
            backend].
        restarts: whether hosts make the congestion window of a connection smaller while it is idle. Linux does, unless
            ``net.ipv4.tcp_slow_start_after_idle`` is 0 or its congestion control is BBR [asked of the system].
        accelerated: whether gradients are computed on an accelerator, so that the core packs one gradient while the
            next ones are computed [stated by the job].
        computing: cores that a rank's computation occupies while it lasts, where ranks share cores; None is one core,
            or its part of the shared ones. Nothing if ``accelerated`` [measured by jobs: the CPU time of the thread
            that computes].
    """

    FORMAT: ClassVar[str] = "autosync-constants/1"

    framing: Annotated[float, Field(ge=1, le=1e3)] = FRAMING
    message_cost: _Cost = 23e-6
    message_delay: _Cost = 0.43e-6
    pair_cost: _Cost = 33e-6
    collective_cost: _Cost = 38e-6
    frame_cost: _Cost = 8.8e-6
    wake_up: _Cost = 0.0
    exchange_cost: _Cost = 10e-6
    gradient_cost: _Cost = 13e-6
    pass_cost: _Cost = 0.2e-3
    finish_cost: _Cost = 4e-6
    unpack_cost: _Cost = 1.4e-6
    step_cost: _Cost = 21e-6
    due_cost: _Cost = 3.2e-6
    host_cost: _Cost = 0.28e-9
    merge_cost: _Cost = 60e-6
    sharing_loss: _Cost = 0.0012
    burst: Annotated[float, Field(ge=0, le=1e18)] = 0.0
    copy_rate: _Rate = 26e9
    scan_rate: _Rate = 2.8e9
    reduce_rate: _Rate = 26e9
    encode: CodecRates = CodecRates()
    decode: DecodeRates = DecodeRates()
    cores: Cores | None = None
    collectives: Annotated[Integer, Field(ge=1, le=1024)] = 2
    restarts: bool = True
    accelerated: bool = False
    computing: Annotated[float, Field(ge=0, le=1)] | None = None

    @classmethod
    def ideal(cls) -> Constants:
        """Constants of ideal hosts without any cost: only links and their latencies remain."""
        free = dict.fromkeys(CodecRates.model_fields, FASTEST)
        made: dict[str, Any] = {"framing": 1, "encode": free, "decode": free, "restarts": False}
        for name in cls.model_fields:
            if name.endswith("_rate"):
                made[name] = FASTEST
            elif name.endswith(("_cost", "_delay", "_loss", "wake_up")):
                made[name] = 0
        return cls(**made)

    def hop_delay(self, collective: bool, ranks: int) -> float:
        """Seconds that a hop among ``ranks`` takes beyond its time on the wire.

        For a collective this excludes the core time of its pieces. All ranks handle theirs at once, step by step, so
        that time already counts as load on the hosts.
        """
        return self.crowd(ranks) * (self.message_delay if collective else 2 * self.frame_cost + self.wake_up)

    def computing_cores(self, ranks: int) -> float:
        """Cores that the computation of each of ``ranks`` occupies while it lasts; see ``computing``."""
        if self.accelerated:
            return 0.0
        return 1 / self.crowd(ranks) if self.computing is None else self.computing

    def shared_host_cost(self, ranks: int) -> float:
        """Seconds in which shared cores of a typical host let ``ranks`` send, or receive, a byte each.

        It is 0 if ``cores`` is None, and if computation takes no core because of an accelerator. The threshold of
        `cores_limit` was measured in these seconds, so a measured ``host_cost`` does not count.
        """
        typical: float = type(self).model_fields["host_cost"].default
        return typical * ranks / self.cores if self.cores and not self.accelerated else 0.0

    def crowd(self, ranks: int) -> float:
        """Factor, at least 1, by which host work takes longer because ``ranks`` share too few cores."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

"""`Prediction`: the result of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Annotated, Any, ClassVar

import numpy
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from lightning_autosync.documents import PLAIN, Duration, TimeOffset

Share = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True)
class Span:
    """A named interval, in seconds from the start of the step."""

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    name: str
    start: TimeOffset
    end: TimeOffset

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class MessageSpan(Span):
    """A message: ``ready`` when every rank has its last gradient, ``start`` when its first bytes move, ``end`` when
    the last rank has the sum."""

    ready: TimeOffset


@dataclass(frozen=True)
class Timeline:
    """A step, predicted or measured.

    Attributes:
        step_time: seconds of the whole step.
        messages: spans of the messages, in schedule order.
        compute: [ranks] spans of the forward pass, the backward pass and the optimizer step.
        links: utilization (0 to 1) of each direction of a link in the step, by its name ``a > b``: bytes carried,
            divided by the bytes that its rate allows. Empty if unknown.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    step_time: Duration
    messages: tuple[MessageSpan, ...]
    compute: tuple[tuple[Span, ...], ...]
    links: Mapping[str, Share]

    def to_dict(self) -> dict[str, Any]:
        """The timeline as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step and its causes.

    Attributes:
        step_time: seconds of the whole step.
        synchronization_time: seconds from the first message's start until all ranks have all sums.
        timeline: messages, compute and links.
        hosts: [ranks] utilization of the core that communicates.
        cores: utilization of the shared cores by communication and the main threads' work for it; above 1 if the work
            exceeds the step. None if ranks have cores of their own.
        critical_path: spans that the step waits for, one after the other.
        demand: [messages, channels] seconds for which each message keeps each channel busy. Channels are the directions
            of the links as in :attr:`~lightning_autosync.cluster.LinkGraph.channels`, the host of each rank, and the
            shared cores, if any.
        frames: number of frames that all ranks send in a step.
        taking: [messages] seconds of a main thread to take the sum of each message, and to make its optimizer's step by
            itself, if steps overlap; without the work of the optimizer on the parameters.
        passing: seconds of a main thread for a pass, without those of gradients and messages.
    """

    step_time: float
    synchronization_time: float
    timeline: Timeline
    hosts: tuple[float, ...]
    cores: float | None
    critical_path: tuple[Span, ...]
    demand: NDArray[numpy.float64] = field(repr=False, compare=False)
    frames: int
    taking: tuple[float, ...] = field(repr=False, compare=False)
    passing: float = field(repr=False, compare=False)

    @property
    def busy(self) -> float:
        """Utilization of the shared cores, or on average of the cores that communicate."""
        return fmean(self.hosts) if self.cores is None else self.cores

"""`Prediction`: what a replay says about a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

import numpy
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from lightning_autosync.documents import PLAIN, Moment, Spent

Share = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True)
class Span:
    """Something that lasts; seconds from the beginning of the step."""

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    name: str
    start: Moment
    end: Moment

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class MessageSpan(Span):
    """A message: ``ready`` when its last gradient is there on every rank, ``start`` when bytes first move, ``end``
    when the last rank has the sum."""

    ready: Moment


@dataclass(frozen=True)
class Timeline:
    """A step, predicted or measured.

    Attributes:
        step_time: seconds of the whole step.
        messages: in schedule order.
        compute: for each rank, its forward pass, backward pass and optimizer step.
        links: share of the step, 0 to 1, in which each direction of a link is busy, by its name ``a > b``: the part of
            what its rate carries in the step that it does carry. Empty where that is not known.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    step_time: Spent
    messages: tuple[MessageSpan, ...]
    compute: tuple[tuple[Span, ...], ...]
    links: Mapping[str, Share]

    def to_dict(self) -> dict[str, Any]:
        """The timeline as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Prediction:
    """What a step takes and why.

    Attributes:
        step_time: seconds of the whole step.
        synchronization_time: seconds from the first message's start until all ranks have all sums.
        timeline: messages, compute and links.
        hosts: share of the step in which the core that communicates on each rank is busy.
        cores: share of the step in which the cores that all ranks share are busy, with what communicates and what the
            main threads do for it; above 1 where they cannot do it in that time. None where ranks have cores of their
            own.
        critical_path: what the step waits for, one after the other.
        demand: [messages, channels] seconds for which each message keeps each channel busy: the directions of the links
            as in :attr:`~lightning_autosync.cluster.LinkGraph.channels`, the host of each rank, and, if cores are
            shared, those.
    """

    step_time: float
    synchronization_time: float
    timeline: Timeline
    hosts: tuple[float, ...]
    cores: float | None
    critical_path: tuple[Span, ...]
    demand: NDArray[numpy.float64] = field(repr=False, compare=False)

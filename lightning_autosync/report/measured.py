"""What the ranks recorded of a step, as a timeline like the predicted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_autosync.engine.tracing import StepTrace, Times
from lightning_autosync.plan import Schedule
from lightning_autosync.replay import MessageSpan, Span, Timeline


def measured_timeline(schedule: Schedule, traces: Sequence[StepTrace], links: Mapping[str, float]) -> Timeline:
    """One step of all ranks, which began it together.

    A message is ready when the last rank has packed it, starts when the first rank hands it over and ends when the
    last rank has the sum; one that no rank sent is left out.

    Args:
        schedule: what ran.
        traces: of each rank.
        links: share of the step in which each direction of a link was busy; empty where that was not measured.
    """
    spans = []
    for message in schedule.messages:
        started = _known([trace.started for trace in traces], message.index)
        completed = _known([trace.completed for trace in traces], message.index)
        if started and completed:
            ready = _known([trace.ready for trace in traces], message.index)
            start = min(started)
            spans.append(MessageSpan(message.name, start, max(completed), max(ready, default=start)))
    return Timeline(
        step_time=max(trace.end for trace in traces),
        messages=tuple(spans),
        compute=tuple(_compute(trace) for trace in traces),
        links=links,
    )


def _known(times: Sequence[Times], index: int) -> list[float]:
    """The times of one message that are known, of all ranks."""
    return [seconds for of_rank in times if (seconds := of_rank[index]) is not None]


def _compute(trace: StepTrace) -> tuple[Span, ...]:
    return (
        Span("forward", 0.0, trace.forward),
        Span("backward", trace.forward, trace.backward),
        Span("optimizer", trace.synchronized, trace.end),
    )

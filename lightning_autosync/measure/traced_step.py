"""The timeline of one step from what its ranks recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_autosync.engine.tracing import StepTrace, Times
from lightning_autosync.plan import Schedule
from lightning_autosync.replay import MessageSpan, Span, Timeline


def timeline_of(schedule: Schedule, traces: Sequence[StepTrace], links: Mapping[str, float]) -> Timeline:
    """The timeline of one step, which all ranks began together.

    A message is ready when the last rank has packed it. It starts when the first rank hands it to the transport and
    ends when the last rank has the sum. Messages that no rank sent are left out.

    Args:
        traces: [ranks] records of the step.
        links: busy share of each direction of a link; empty if not measured.
    """
    spans = []
    for message in schedule.messages:
        started = _known([trace.started for trace in traces], message.index)
        completed = _known([trace.completed for trace in traces], message.index)
        if started and completed:
            ready = _known([trace.ready for trace in traces], message.index)
            start = min(started)
            spans.append(MessageSpan(message.name, start, max(completed), max(ready, default=start)))
    compute = tuple(
        (
            Span("forward", 0.0, trace.forward),
            Span("backward", trace.forward, trace.backward),
            Span("optimizer", trace.synchronized, trace.end),
        )
        for trace in traces
    )
    return Timeline(max(trace.end for trace in traces), tuple(spans), compute, links)


def _known(times: Sequence[Times], index: int) -> list[float]:
    """The known times of one message on all ranks."""
    return [seconds for of_rank in times if (seconds := of_rank[index]) is not None]

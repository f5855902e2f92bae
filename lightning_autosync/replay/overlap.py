"""The time of a step whose sums travel beside the next forward pass (``overlap="step"``), and its lower bound."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_autosync.cluster import ClusterSpec, synchronization_limit
from lightning_autosync.plan.schedule import Schedule, first_parameters_first
from lightning_autosync.replay.bound import changed_bytes
from lightning_autosync.replay.compute import ready_times
from lightning_autosync.replay.prediction import Prediction, Span, Timeline
from lightning_autosync.workload import Workload

if TYPE_CHECKING:
    from lightning_autosync.replay.replay import Replay


def overlapped_step_time(
    schedule: Schedule, workload: Workload, replay: Replay, prediction: Prediction | None = None
) -> float:
    """Step time with ``overlap="step"``, whose messages leave in the order of the forward pass; see `overlapped_step`.

    A schedule that says that steps wait takes its usual time.

    Args:
        schedule: a schedule for the workload.
        workload: the workload.
        replay: a replay of the workload on its cluster.
        prediction: the prediction of the schedule without overlap, if it is known.
    """
    if schedule.waits:
        return (prediction or replay.predict(schedule)).step_time
    return overlapped_step(*_in_forward_order(schedule, workload, replay, prediction))


def overlapped_timeline(schedule: Schedule, workload: Workload, replay: Replay, prediction: Prediction) -> Timeline:
    """The step of `overlapped_step_time`, from the beginning of the backward pass to that of the next one.

    Gaps between spans of the forward pass are waits for sums, and the time to take them. The optimizer's whole work is
    shown at the end, though a job does it by and by. Arguments are those of `overlapped_step_time`.
    """
    if schedule.waits:
        return prediction.timeline
    ordered, workload, prediction = _in_forward_order(schedule, workload, replay, prediction)
    seconds, forward = _overlapped(ordered, workload, prediction)
    timeline = prediction.timeline
    begin = min(backward.start for _, backward, *_ in timeline.compute)
    compute = []
    for passes in timeline.compute:
        _, backward, *optimizer = passes
        spans = [backward, *forward[passes]]
        for each in optimizer:
            spans.append(Span(each.name, spans[-1].end, spans[-1].end + each.seconds))
        compute.append(tuple(replace(span, start=span.start - begin, end=span.end - begin) for span in spans))
    messages = tuple(
        replace(each, ready=each.ready - begin, start=each.start - begin, end=each.end - begin)
        for each in timeline.messages
    )
    used = timeline.step_time / seconds if seconds else 0.0
    return Timeline(seconds, messages, tuple(compute), {name: used * share for name, share in timeline.links.items()})


def _in_forward_order(
    schedule: Schedule, workload: Workload, replay: Replay, prediction: Prediction | None
) -> tuple[Schedule, Workload, Prediction]:
    """The arguments of `overlapped_step` for messages that leave in the order of the forward pass."""
    ordered = first_parameters_first(schedule, [variable.name for variable in workload.variables])
    if prediction is None or ordered.tree_edges():  # priorities count on trees only
        prediction = replay.predict(ordered)
    return ordered, workload, prediction


def overlapped_step(schedule: Schedule, workload: Workload, prediction: Prediction) -> float:
    """Seconds of a step, in the long run, if each layer waits for its own parameters only.

    A main thread takes a message's sum, and makes the optimizer's step for it, when the first layer reads one of its
    parameters. Before it waits for a sum, it does so for messages that have come.

    In the forward pass, layers run in the reverse order of the backward pass, with times in the same proportions. A
    layer begins when the one before it has ended and the messages of its parameters have come. Messages end as long
    after the backward pass as in ``prediction``; those of one step do not delay those of the next, except that no link
    and no host can be busy for longer than the step. A message on trees that travels beside a collective of the backend
    is taken to end no earlier than that: the backend queues much on the links, and connections of trees little, so
    urgent messages come late there (measured: 100 ms in place of 10). Messages for which the engine waits at the end of
    the backward pass do not overlap: those of PowerSGD, all-to-all exchanges, rows by the backend's collectives, and
    shared memory.

    Args:
        schedule: the messages, with their priorities; see `first_parameters_first`.
        workload: the workload.
        prediction: the prediction of the schedule without overlap.
    """
    return _overlapped(schedule, workload, prediction)[0]


def _overlapped(
    schedule: Schedule, workload: Workload, prediction: Prediction
) -> tuple[float, dict[tuple[Span, ...], list[Span]]]:
    """The result of `overlapped_step`, and the spans of layers in the forward pass that follows a rank's passes."""
    found: dict[tuple[Span, ...], list[Span]] = {}
    steps = [float(prediction.demand.sum(axis=0).max(initial=0.0))]
    arrivals = _arrivals(schedule, prediction)
    waited = [message.index for message in schedule.messages if message.waits_in_backward]
    waits = max((arrivals[index] for index in waited), default=0.0)
    message_of = {name: message.index for message in schedule.messages for name in message.variables}
    layers = [({message_of[name] for name in names}, share) for names, share in _layers(workload)]
    for passes in set(prediction.timeline.compute):
        forward, backward, *optimizer = passes
        spans = found[passes] = []
        now = max(backward.end, waits) + prediction.passing
        left = {message.index for message in schedule.messages} - {*waited}
        for needed, share in layers:
            while awaited := needed & left:
                index = min(awaited)
                come = [one for one in left if arrivals[one] <= now] if arrivals[index] > now else []
                index = min(come, default=index)
                left.remove(index)
                now = max(now, arrivals[index]) + prediction.taking[index]
            spans.append(Span(forward.name, now, now + share * forward.seconds))
            now = spans[-1].end
        steps.append(now - backward.end + backward.seconds + sum(span.seconds for span in optimizer))
    return max(steps), found


def _arrivals(schedule: Schedule, prediction: Prediction) -> list[float]:
    """Seconds at which the sums of messages come; see `overlapped_step`."""
    spans = prediction.timeline.messages
    collectives = [spans[message.index] for message in schedule.messages if message.collective]
    arrivals = [span.end for span in spans]
    for message in schedule.messages:
        own = spans[message.index]
        if not message.collective:
            beside = (other.end for other in collectives if other.start < own.end and own.start < other.end)
            arrivals[message.index] = max([own.end, *beside])
    return arrivals


def least_overlapped_step(workload: Workload, cluster: ClusterSpec, framing: float = 1.0, burst: float = 0.0) -> float:
    """Lower bound in seconds on a step with overlap in the long run, for every exact plan.

    The last gradients of the backward pass are the first that the next forward pass needs. So between the time when a
    layer's gradients are ready and its next forward pass, the gradients of this layer and of all earlier ones are
    synchronized. In the rest of the step, this layer and all later ones run forward, and backward runs until the
    gradients are ready. Layers are those of `overlapped_step`; each reads all its parameters at once.

    Arguments and errors are those of `least_step`.
    """
    speeds = [node.speed for node in cluster.nodes]
    passes = workload.forward_time + workload.backward_time
    found = [(passes + workload.optimizer_time) / min(speeds)]
    limit, size, rest = synchronization_limit(cluster), 0.0, 1.0
    # The last gradient may be ready before the backward pass ends; messages then overlap with the end of the pass.
    beside = workload.forward_time + max(ready_times(workload).values())
    for names, share in _layers(workload):
        size += sum(changed_bytes(workload.variable(name)) for name in names)
        found.append(limit.seconds(framing * size, burst) + rest * beside / max(speeds))
        rest -= share
    return max(found)


def _layers(workload: Workload) -> list[tuple[list[str], float]]:
    """Variables whose gradients are ready together, in the order of the forward pass, and shares of the pass."""
    by_time: dict[float, list[str]] = {}
    for name, seconds in ready_times(workload).items():
        by_time.setdefault(seconds, []).append(name)
    times = sorted(by_time, reverse=True)
    whole = times[0] or 1.0
    return [
        (by_time[time], (time - before) / whole if times[0] else 1.0)
        for time, before in zip(times, [*times[1:], 0.0], strict=True)
    ]

"""Functions that the benchmark of memory calls in workers: the bytes of tensors, as torch's allocator counts them."""

from __future__ import annotations

import time

from torch.profiler import ProfilerActivity, profile

_profile: list[profile] = []
_since: list[int] = []


def begin() -> None:
    """Count from here on."""
    _profile[:] = [profile(activities=[ProfilerActivity.CPU], profile_memory=True)]
    _profile[0].start()


def mark() -> None:
    """The peak counts from here on."""
    _since[:] = [time.time_ns()]


def peak() -> int:
    """The most bytes since `mark` of tensors that were made since `begin`."""
    _profile[0].stop()
    events = _profile[0].profiler.kineto_results.events()  # type: ignore[union-attr]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            if event.start_ns() >= _since[0]:
                most = max(most, held)
    return most

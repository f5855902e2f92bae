"""A session opens its launch, and closes it however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure import session as module
from lightning_autosync.measure.session import MeasurementSession
from lightning_autosync.measure.workers import LaunchError


def test_what_carries_the_traffic_of_workers_is_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(module, "LoadMeter", counted.append)
    monkeypatch.setattr(MeasurementSession, "pool", SimpleNamespace(pids=[1, 2]))
    monkeypatch.setattr(MeasurementSession, "_is_here", True)
    session = MeasurementSession(ClusterSpec.uniform(2), cast(Any, None), timeout=1.0)
    session.watch_load()
    session._launch = cast(Any, SimpleNamespace(relays=[3]))
    session.watch_load()
    monkeypatch.setattr(MeasurementSession, "_is_here", False)
    session.watch_load()
    assert counted == [[1, 2], [1, 2, 3], None]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), LaunchError("hardly any bytes pass")])
def test_a_failed_check_of_links_closes_the_launch(failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    @contextmanager
    def opened(cluster: ClusterSpec) -> Iterator[None]:
        events.append("opened")
        try:
            yield
        finally:
            events.append("closed")

    def check(launch: Any) -> None:
        raise failure

    monkeypatch.setattr(module, "measured_links", check)
    session = MeasurementSession(ClusterSpec.uniform(2), cast(Any, SimpleNamespace(open=opened)), timeout=1.0)
    with pytest.raises(type(failure)), session:
        pass
    assert events == ["opened", "closed"]

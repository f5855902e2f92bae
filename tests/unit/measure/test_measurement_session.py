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

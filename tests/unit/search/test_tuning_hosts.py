"""With which costs of hosts a tuning run predicts plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from priced_session import PricedSession
from tuning_world import World, configuration

from lightning_autosync.learned import ReplayEstimator
from lightning_autosync.replay import Constants
from lightning_autosync.search.tuning import run as tuning_run
from lightning_autosync.search.tuning.job import TuningJob
from lightning_autosync.search.tuning.settings import TuningSettings

Predicted = Callable[..., Constants]
"""Runs with these settings and returns the constants of its predictions."""


class SlowHosts(PricedSession):
    """Workers whose hosts are slow."""

    asked = 0

    def run(self, function: Callable[..., Any]) -> list[Any]:
        self.asked += 1
        return [Constants(gradient_cost=1e-3, cores=3).to_dict()]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> SlowHosts:
    session = SlowHosts(World().price)
    monkeypatch.setattr(TuningJob, "session", lambda job: session)
    monkeypatch.setattr(tuning_run, "compare", lambda *given: None)
    return session


@pytest.fixture
def predicted(session: SlowHosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Predicted:
    def run(**changed: Any) -> Constants:
        seen = list[Constants]()

        def estimator(constants: Constants) -> ReplayEstimator:
            seen.append(constants)
            return ReplayEstimator(constants)

        monkeypatch.setattr(tuning_run, "ReplayEstimator", estimator)
        settings = TuningSettings.parse({**configuration(budget=3), **changed})
        outcome = tuning_run.TuningRun(settings, tmp_path, ExitStack()).run()
        assert seen == [outcome.constants]
        assert outcome.result.constants == outcome.constants.to_dict()
        return outcome.constants

    return run


@pytest.mark.parametrize("search", [{"sampler": "random"}, {"sampler": "autosync"}])
def test_predictions_take_what_the_workers_measured(
    search: dict[str, Any], predicted: Predicted, session: SlowHosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = predicted(search={**search, "budget": 3, "batch": 3})
    assert (found.gradient_cost, found.cores, found.accelerated, session.asked) == (1e-3, 3, True, 1)
    assert (
        "predictions take the hosts' costs, measured on the workers: 1000 us a gradient (default: 13 us)" in caplog.text
    )


def test_hosts_are_not_measured_if_the_user_gave_their_constants(
    predicted: Predicted, session: SlowHosts, tmp_path: Path
) -> None:
    Constants(gradient_cost=7e-6, cores=4).save(tmp_path / "constants.yaml")
    found = predicted(constants=str(tmp_path / "constants.yaml"))
    assert (found.gradient_cost, found.cores, session.asked) == (7e-6, 4, 0)


def test_a_pretrained_simulator_keeps_the_hosts_of_its_dataset(predicted: Predicted, session: SlowHosts) -> None:
    found = predicted(search={"sampler": "autosync", "budget": 3, "batch": 3}, simulator={"kind": "pretrained"})
    assert (found.gradient_cost, session.asked) == (Constants().gradient_cost, 0)

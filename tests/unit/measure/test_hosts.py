"""With which constants a job is replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from lightning_autosync.measure.conditions import usable_cores
from lightning_autosync.measure.hosts import job_hosts, measured_hosts
from lightning_autosync.measure.probe.hosts import host_costs
from lightning_autosync.measure.session import MeasurementSession
from lightning_autosync.replay import Constants
from lightning_autosync.search.tuning.settings import TuningSettings

BURST = 128 * 1024


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize(
    ("launch", "cores", "burst"),
    [("emulated", usable_cores(), BURST), ("local", usable_cores(), 0.0), ("ssh", None, 0.0), ("torchrun", None, 0.0)],
)
def test_only_ranks_on_this_machine_share_its_cores_and_only_emulated_links_have_a_burst(
    launch: str, cores: int | None, burst: float, paced: bool
) -> None:
    found = job_hosts(launch, paced)
    assert (found.cores, found.burst, found.accelerated) == (cores, burst, paced)


def test_a_probe_tells_more_than_the_launch(tmp_path: Path) -> None:
    probed = Constants(cores=3, burst=5.0, host_cost=1e-9)
    probed.save(tmp_path / "constants.yaml")
    found = job_hosts("ssh", True, str(tmp_path / "constants.yaml"))
    assert found == probed.model_copy(update={"accelerated": True})


@pytest.mark.parametrize(("kind", "cores"), [("torchrun", None), ("local", usable_cores())])
def test_a_tuning_run_replays_with_the_hosts_of_its_launch(kind: str, cores: int | None) -> None:
    model = {"kind": "layers", "tensors": 4, "width": 8, "batch": 2}
    settings = TuningSettings.parse({"model": model, "launch": {"kind": kind}})
    found = job_hosts(settings.launch_kind, settings.is_paced, settings.constants)
    assert (found.cores, found.burst, found.accelerated) == (cores, 0.0, False)


class Workers:
    """Workers whose hosts cost this."""

    def __init__(self, costs: Constants) -> None:
        self._costs = costs

    def run(self, function: Any) -> list[dict[str, Any]]:
        assert function is host_costs
        return [self._costs.to_dict()]


@pytest.mark.parametrize(("launch", "burst"), [("emulated", BURST), ("ssh", 0.0)])
def test_workers_tell_what_their_hosts_cost_and_the_launch_what_its_links_do(launch: str, burst: float) -> None:
    costs = Constants(gradient_cost=52e-6, frame_cost=40e-6, cores=3)
    found, told = measured_hosts(cast(MeasurementSession, Workers(costs)), launch, paced=True)
    assert found == costs.model_copy(update={"burst": burst, "accelerated": True})
    assert told.endswith("measured on the workers: 52 us a gradient (default: 13 us)")


def test_workers_that_cannot_measure_leave_the_defaults() -> None:
    found, told = measured_hosts(cast(MeasurementSession, Workers(Constants(cores=3))), "local", paced=False)
    assert found == job_hosts("local", False)
    assert "could not measure" in told

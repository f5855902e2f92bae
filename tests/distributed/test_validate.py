"""`autosync validate` as a whole: cases measured on emulated links, interrupted, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_autosync.cli.validate import validate
from lightning_autosync.lab.validation.accuracy import ValidationResult
from lightning_autosync.lab.validation.measuring import load_measurements
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.workers import LaunchError
from lightning_autosync.replay import Constants

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.skipif(bool(UNABLE), reason=UNABLE)]

SETTINGS = {"cases": 2, "clusters": ["four_equal"], "families": ["vgg16", "ncf"], "seconds": 0.2, "probe_every": 1}


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(SETTINGS, tmp_path)
    path = tmp_path / "measurements.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    assert len(whole) == 2
    path.write_text(whole[0] + whole[1][:100])  # as if it had been killed while it wrote the second

    validate({**SETTINGS, "measurements": str(path)}, tmp_path / "resumed")
    again = path.read_text().splitlines(keepends=True)
    assert again[0] == whole[0]
    assert again[1] != whole[1]
    assert [json.loads(line)["key"] for line in again] == [json.loads(line)["key"] for line in whole]

    validate({**SETTINGS, "measurements": str(path)}, tmp_path / "complete")
    assert path.read_text() == "".join(again)
    result = json.loads((tmp_path / "complete" / "result.json").read_text())
    check_result(result, path)
    assert ValidationResult.read(tmp_path / "complete").to_dict() == result
    assert "Kendall tau: too few plans of the same workload and cluster" in capsys.readouterr().out


def check_result(result: dict, path: Path) -> None:
    """What is told is of the measurements in the file."""
    assert result["format"] == "autosync-validation/1"
    assert set(result["accuracy"]["pair"]) == {"four_equal, vgg16", "four_equal, ncf"}
    found = load_measurements(path)
    assert {case["key"] for case in result["cases"]} == set(found)
    for case in result["cases"]:
        measurement = found[case["key"]]
        assert case["measured_seconds"] == measurement.seconds
        assert case["measured_noise"] == measurement.noise
        assert len(measurement.steps) == 4
        assert all(len(steps) >= 3 and min(steps) > 0 for steps in measurement.steps)
        assert case["predicted_seconds"] > 0
        hosts = Constants.from_dict(measurement.hosts)
        assert hosts.accelerated
        assert hosts.burst == 128 * 1024
        assert hosts.frame_cost > 0

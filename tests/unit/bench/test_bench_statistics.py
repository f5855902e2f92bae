"""Round times, paired ratios, and what a result says of them."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from lightning_autosync.bench.picture import draw
from lightning_autosync.bench.result import FRAMING, Measurement, Result
from lightning_autosync.bench.settings import Settings
from lightning_autosync.bench.statistics import paired_ratio, relative_medians, round_time
from lightning_autosync.bench.table import remarks, result_table
from lightning_autosync.cluster import ClusterSpec


def test_a_round_takes_as_long_as_the_median_step_of_the_slowest_rank():
    assert round_time([[1.0, 2.0, 9.0], [3.0, 3.5, 4.0]]) == 3.5


def test_ratios_are_paired_by_round():
    """Load that slows both alike cancels, however large it is."""
    ratio = paired_ratio([1.1, 11.0, 110.0], [1.0, 10.0, 100.0])
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


def test_the_interval_narrows_with_rounds_and_holds_the_median():
    noisy = [1.0 + 0.1 * math.sin(7 * number) for number in range(100)]
    wide, narrow = (paired_ratio(noisy[:count], [1.0] * count) for count in (8, 100))
    assert wide.low < wide.median < wide.high
    assert narrow.low < narrow.median < narrow.high
    assert narrow.high - narrow.low < wide.high - wide.low


@pytest.mark.parametrize(("times", "reference"), [([], []), ([1.0], [1.0, 2.0])])
def test_unpaired_rounds_are_refused(times, reference):
    with pytest.raises(ValueError, match="paired by round"):
        paired_ratio(times, reference)


def test_relative_medians_see_through_a_busy_round():
    assert relative_medians({"a": [1.0, 40.0], "b": [2.0, 80.0], "c": [3.0, 120.0]}) == {"a": 0.5, "b": 1.0, "c": 1.5}


def result(times: dict[str, list[float]], launch: str = "local", deviation: float = 0.0) -> Result:
    """A result of two ranks whose contenders took ``times``, by round; names in ``ddp*`` are DDP's."""
    cluster = ClusterSpec.uniform(nodes=2, bandwidth=100e6)
    settings = Settings.parse(
        {
            "model": {"kind": "flat", "mib": 1.0},
            "launch": launch,
            "cluster": cluster.to_dict(),
            "ddp": {"bucket_cap_mb": ["default"], "gradient_as_bucket_view": [False, True]},
            "contenders": {"byteps": {"builder": "byteps"}},
        }
    )
    measurements = {
        name: Measurement(
            rounds=[[[seconds], [seconds / 2]] for seconds in rounds],
            sent=[1e6] * len(rounds),
            foreign_cores=[0.4] * len(rounds),
            deviation=deviation,
        )
        for name, rounds in times.items()
    }
    conditions = {"load_average_before": (0.3, 0.2, 0.1), "bytes_counted": "as told"}
    return Result(settings, cluster, 2**20, 0.010 * FRAMING if launch == "emulated" else None, conditions, measurements)


TIMES = {"ddp": [0.020, 0.040], "ddp_view": [0.016, 0.038], "byteps": [0.012, 0.030]}


def test_the_opponent_is_the_best_ddp():
    found = result(TIMES)
    assert found.best_ddp == "ddp_view"
    assert found.ratio("byteps").median == pytest.approx((0.012 / 0.016 + 0.030 / 0.038) / 2)
    assert found.ratio("byteps", "ddp").median == pytest.approx((0.6 + 0.75) / 2)


def test_the_share_of_the_bound_needs_emulated_links():
    assert result(TIMES).bound_share("byteps") is None
    assert result(TIMES, "emulated").bound_share("byteps") == pytest.approx(0.010 * FRAMING / 0.021)


def test_the_table_has_every_contender_and_the_remarks_what_spoils_it():
    found = result(TIMES, "emulated", deviation=0.5)
    printed = io.StringIO()
    Console(width=120, file=printed).print(result_table(found))
    text = printed.getvalue()
    for expected in (*TIMES, "of the bound", "21.00", "emulated links of uniform"):
        assert expected in text
    notes = "\n".join(remarks(found))
    assert "other processes kept 0.4 cores busy" in notes
    assert "byteps: gradients differ from DDP's by 5.0e-01" in notes
    assert "best DDP: ddp_view" in notes


def test_the_document_keeps_every_step_and_is_json():
    document = json.loads(json.dumps(result(TIMES).to_dict()))
    assert document["contenders"]["ddp"]["step_seconds_by_round_and_rank"] == [[[0.020], [0.010]], [[0.040], [0.020]]]
    assert document["contenders"]["byteps"]["bytes_per_step_and_rank"] == 1e6
    assert document["best_ddp"] == "ddp_view"
    assert document["emulated"] == {"links": False, "compute": False}


def test_the_picture_names_every_contender(tmp_path):
    draw(result(TIMES, "emulated"), tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in TIMES)

"""A job whose links became slow notices that they have recovered, by two passes of the plan that it used before."""

from __future__ import annotations

from typing import Any

import pytest
import recovery_jobs
from recovery_jobs import RECOVERED, SLOWED

from lightning_autosync.measure.errors import WorkerError

CASES: list[dict[str, Any]] = [
    {"trials": 0},
    {"trials": 1},
    {"trials": 1, "semantics": "compressed"},
    {"trials": 0, "overlap": "step"},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_former_plan_shows_that_links_have_recovered(duo, options: dict[str, Any]) -> None:
    """After the trials and in a trial, where steps overlap, and where gradients have lost something on the way."""
    for found in duo.run(recovery_jobs.recovery, **options):
        (slow, why), (again, reason) = found["measured"]
        assert SLOWED < slow < SLOWED + 20
        assert why == "steps wait 200% longer than before"
        assert RECOVERED < again < RECOVERED + 60
        words = "0.1 s, as against 0.3 s after links became slower and 0.1 s before"
        assert reason == f"steps with the earlier plan are fast again: {words}"
        assert found["slowing"] == [True, False]  # the plan for slow links does not become the earlier one
        in_vain = [number for number in found["former"] if number < RECOVERED]
        assert in_vain  # without a measurement
        assert len(found["former"]) - len(in_vain) == 2
        assert all(found["tunes"])  # so a checkpoint has what the present plan has lost
        assert found["clusters"][-1] == "pair"  # its connections must not be paced for slow links
        assert not any(found["kept"])  # in memory
        assert found["mistaken"] == []
        ends = [line for line in found["told"] if line.startswith("AutoSync: tuning has ended without a trial")]
        assert len(ends) == (0 if options["trials"] else 3)  # once for each of the links
        assert found["distance"] < 1e-5


def test_a_job_that_cannot_open_the_former_plan_measures_links_from_time_to_time(duo) -> None:
    for found in duo.run(recovery_jobs.recovery, trials=0, opens=False):
        assert found["former"] == []
        assert found["clusters"] == ["pair"]
        (slow, _), *others = found["measured"]
        assert {reason for _, reason in others} == {"links changed before in this job"}
        assert slow + 50 <= others[0][0] < slow + 80
        assert found["distance"] < 1e-5


def test_a_rank_that_fails_while_the_former_plan_is_used_ends_the_job_on_all_ranks(duo) -> None:
    with pytest.raises(WorkerError) as caught:
        duo.run(recovery_jobs.failing)
    assert "rank 1 raised OSError: a test says so" in str(caught.value)
    assert "rank 0 raised " in str(caught.value)

"""A rank meets a fault while its job tunes itself: nobody hangs, weights are right, and the rank is named."""

from __future__ import annotations

from unittest import mock

import pytest
from soak import Fault, Seen, Soak
from soak_calls import DELAY, EXCEPTION, KILL, STOP, TUNING, Injection
from tuning_soak_calls import AGAIN, END, EXCURSION, NO_CONNECTION, OPENING, OTHER_PLAN, PASS, SURVEY, tuning

from lightning_autosync import ClusterSpec
from lightning_autosync.measure.probe.quick import JobSurvey
from lightning_autosync.replay import Constants
from lightning_autosync.strategy.tuning import proposals

GOES_ON = {DELAY, NO_CONNECTION}
FAULTS = [
    (KILL, OPENING, 1),
    (NO_CONNECTION, OPENING, 1),
    (KILL, SURVEY, 1),
    (KILL, AGAIN, 1),
    (OTHER_PLAN, PASS, 8),
    (STOP, SURVEY, 2),
    (EXCEPTION, SURVEY, 1),
    (DELAY, SURVEY, 1),
    (STOP, OPENING, 2),
    (EXCEPTION, OPENING, 1),
    (DELAY, OPENING, 1),
    (NO_CONNECTION, OPENING, 2),
    (KILL, PASS, 9),
    (STOP, PASS, 12),
    (EXCEPTION, PASS, 10),
    (KILL, END, 1),
    (EXCEPTION, END, 1),
    (DELAY, AGAIN, 1),
    (STOP, AGAIN, 1),
    (KILL, EXCURSION, 1),
    (EXCEPTION, EXCURSION, 2),
    (STOP, EXCURSION, 1),
]


@pytest.fixture(scope="module")
def soak() -> Soak:
    return Soak()


def meet(soak: Soak, kind: str, moment: str, count: int, size: int, victim: int) -> Seen:
    fault = Fault(0, kind, TUNING, size, victim, 0, after=0.001, seconds=0.5, seed=1, moment=moment, count=count)
    return soak.run(fault)


def test_jobs_try_plans_on_a_machine_that_is_too_busy_to_measure_links() -> None:
    hosts = ClusterSpec.uniform(3, name="this job")
    busy = JobSurvey(hosts, 3.0, 1, "links of 3 nodes take 3.2 s or more to measure, the limit is 3 s")
    with (
        mock.patch.object(proposals, "survey_job", return_value=busy),
        mock.patch.object(proposals, "host_constants", return_value=Constants(cores=2)),
        tuning(0, Injection(None, 0, mock.Mock()), seed=0),
    ):
        links = proposals.find_links(None, nodes=3, devices=1, probe=3.0, timeout=10.0)
    assert links.fault == ""
    assert links.cluster.measured
    assert links.cluster.rank_nodes == hosts.rank_nodes


@pytest.mark.slow  # whole jobs, with an undisturbed one of each size beside them
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("kind", "moment", "count"), FAULTS)
def test_a_fault_around_a_switch_hangs_nobody_and_is_named(
    soak: Soak, kind: str, moment: str, count: int, size: int
) -> None:
    seen = meet(soak, kind, moment, count, size, victim=1)
    assert seen.struck
    assert not seen.bad, seen
    assert not seen.another, seen
    assert seen.ok == (kind in GOES_ON), seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KILL, STOP, EXCEPTION, NO_CONNECTION])
def test_so_does_one_of_the_first_rank(soak: Soak, kind: str) -> None:
    seen = meet(soak, kind, OPENING, 1, size=3, victim=0)
    assert seen.struck
    assert not seen.bad, seen
    assert seen.ok == (kind in GOES_ON), seen

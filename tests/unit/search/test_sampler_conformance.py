"""Optuna's own conformance suite for samplers, with and without a space of plans."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from clusters import uneven_cluster
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)

from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.workload import Variable, Workload

pytestmark = pytest.mark.slow

WORKLOAD = Workload(name="two", variables=(Variable(name="front", shape=(64, 9)), Variable(name="back", shape=(64,))))


class TestWithoutASpace(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return AutoSyncSampler


class TestForeignParametersWithASpace(BasicSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        space = PlanSpace(WORKLOAD, uneven_cluster(3))
        return lambda: AutoSyncSampler(space, population=8, batch=2)

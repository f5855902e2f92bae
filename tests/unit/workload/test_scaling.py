"""Workloads made smaller: the structure stays."""

from __future__ import annotations

import pytest

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload import Variable, Workload, catalogue
from lightning_autosync.workload.scaling import scaled, with_compute


@pytest.mark.parametrize("name", catalogue.names())
def test_names_order_and_proportions_stay(name: str) -> None:
    full = catalogue.build(name)
    small = scaled(full, 0.04)
    assert [v.name for v in small.variables] == [v.name for v in full.variables]
    assert small.ready_order == full.ready_order
    assert small.bytes == pytest.approx(0.04 * full.bytes, rel=0.15)
    assert small.backward_time == pytest.approx(0.04 * full.backward_time)
    assert [v.kind for v in small.variables] == [v.kind for v in full.variables]


def test_kernels_and_single_features_stay() -> None:
    workload = Workload(
        name="two", variables=(Variable(name="conv", shape=(64, 3, 7, 7)), Variable(name="b", shape=(1,)))
    )
    assert [v.shape for v in scaled(workload, 0.01).variables] == [(6, 1, 7, 7), (1,)]


def test_a_small_table_keeps_its_share_of_touched_rows() -> None:
    table = Variable(name="table", shape=(1000, 16), kind="row_sparse", rows=100.0)
    (small,) = scaled(Workload(name="table", variables=(table,)), 0.25).variables
    assert small.shape == (500, 8)
    assert small.rows == pytest.approx(50.0)


def test_times_are_brought_to_what_is_asked() -> None:
    paced = with_compute(catalogue.build("vgg16"), 0.3)
    assert paced.forward_time == pytest.approx(0.1)
    assert paced.backward_time == pytest.approx(0.2)
    assert max(v.ready or 0.0 for v in paced.variables) == pytest.approx(0.2)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_no_factor_below_zero(factor: float) -> None:
    with pytest.raises(WorkloadError, match="scale: must be above zero"):
        scaled(catalogue.build("ncf"), factor)


def test_unknown_times_cannot_be_brought_to_others() -> None:
    with pytest.raises(WorkloadError, match="its times are unknown"):
        with_compute(Workload(name="one", variables=(Variable(name="a", shape=(2,)),)), 0.1)

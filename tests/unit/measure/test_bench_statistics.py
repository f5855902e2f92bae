"""Round times, paired ratios, and what a result says of them."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from lightning_autosync.cluster import FRAMING, ClusterSpec
from lightning_autosync.measure.bench.output import draw, remarks, result_table, title
from lightning_autosync.measure.bench.preparation import prepare
from lightning_autosync.measure.bench.result import BenchDocument, BenchResult, ContenderMeasurement
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.hosts import Bound, least_step
from lightning_autosync.measure.step_time import paired_ratio, relative_medians, step_time
from lightning_autosync.workload import Variable, Workload


def test_a_round_takes_as_long_as_the_median_over_steps_of_the_mean_of_ranks():
    assert step_time([[1.0, 2.0, 9.0], [3.0, 3.5, 4.0]]) == 2.75
    assert step_time([[1.0, 2.0, 9.0], [3.0, 4.0, 8.0]], mean=True) == 5.0  # each rank makes some steps by itself


def test_ranks_whose_long_and_short_steps_take_turns_do_not_make_a_plan_slower():
    """As two sites do that exchange their sums: in 10 steps, each rank takes 10 times 44 ms."""
    east, west = [0.064, 0.024] * 5, [0.024, 0.064] * 5
    for count in (6, 9, 10):
        assert step_time([east[:count], west[:count]]) == pytest.approx(0.044)
        assert step_time([east[:count]] * 3 + [west[:count]]) == pytest.approx(0.044)


def test_a_pause_does_not_count():
    assert step_time([[1.0, 1.0, 1.0, 9.0, 1.0]]) == step_time([[1.0] * 3 + [9.0] + [1.0] * 3]) == 1.0


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
    with pytest.raises(ValueError, match="equal numbers of rounds"):
        paired_ratio(times, reference)


def test_relative_medians_see_through_a_busy_round():
    assert relative_medians({"a": [1.0, 40.0], "b": [2.0, 80.0], "c": [3.0, 120.0]}) == {"a": 0.5, "b": 1.0, "c": 1.5}


CONTENDERS = {
    "ddp_fp16": {"ddp": {"hook": "fp16"}},
    "ddp_post_local": {"ddp": {"hook": "post_local_sgd"}},
    "ddp_sparse": {"ddp": {}, "embeddings": "sparse"},
}


def result(
    times: dict[str, list[float]], launch: str = "local", deviation: float = 0.0, hooks: bool = False
) -> BenchResult:
    """A result of two ranks whose contenders took ``times``, by round; names in ``ddp*`` are DDP's."""
    cluster = ClusterSpec.uniform(nodes=2, bandwidth=100e6, latency=50e-6)
    settings = BenchSettings.parse(
        {
            "model": {"kind": "flat", "mib": 1.0},
            "launch": {"kind": launch},
            "cluster": cluster.to_dict(),
            "ddp": {"bucket_cap_mb": ["default"], "gradient_as_bucket_view": [False, True]},
            "contenders": {"byteps": {"builder": "byteps"}, **CONTENDERS}
            if hooks
            else {"byteps": {"builder": "byteps"}},
        }
    )
    measurements = {
        name: ContenderMeasurement(
            rounds=[[[1.5 * seconds], [seconds / 2]] for seconds in rounds],
            sent=[1e6] * len(rounds),
            foreign_cores=[0.4] * len(rounds),
            deviation=deviation,
        )
        for name, rounds in times.items()
    }
    conditions = {
        "load_average_before": (0.3, 0.2, 0.1),
        "bytes_counted": "as told",
        "machine": "here",
        "machines": ["here"] if launch != "ssh" else ["here", "there"],
        "cores": 2,
    }
    bound = Bound(0.010 * FRAMING, 0.0, "synchronization alone") if launch == "emulated" else None
    return BenchResult(settings, prepare(settings), bound, conditions, measurements)


TIMES = {"ddp": [0.020, 0.040], "ddp_view": [0.016, 0.038], "byteps": [0.012, 0.030]}


def test_the_opponent_is_the_best_ddp():
    found = result(TIMES)
    assert found.best_ddp == "ddp_view"
    assert found.speedup("byteps").median == pytest.approx((0.016 / 0.012 + 0.038 / 0.030) / 2)
    assert found.speedup("byteps", "ddp").median == pytest.approx((1 / 0.6 + 1 / 0.75) / 2)


def test_the_share_of_the_bound_needs_emulated_links():
    assert result(TIMES).bound_share("byteps") is None
    assert result(TIMES, "emulated").bound_share("byteps") == pytest.approx(0.010 * FRAMING / 0.021)


HOOKED = {**TIMES, "ddp_fp16": [0.001, 0.001], "ddp_post_local": [0.001, 0.001], "ddp_sparse": [0.001, 0.002]}


def test_neither_the_opponent_nor_the_bound_is_for_other_training():
    """Hooks and sparse embeddings are in the table, marked, but are not DDP well tuned."""
    found = result(HOOKED, "emulated", hooks=True)
    assert found.best_ddp == "ddp_view"
    assert found.best_exact == "byteps"
    assert found.bound_share("ddp_fp16") is None
    assert found.bound_share("ddp_view") is not None
    assert found.document().contenders["ddp_fp16"].exactness == "low precision"
    notes = "\n".join(remarks(found))
    assert "speedup of byteps over ddp_sparse, whose module has nn.Embedding(sparse=True): 0.07x [0.07, 0.08]" in notes


def test_classes_stay_together_in_the_table():
    printed = io.StringIO()
    Console(width=140, file=printed).print(result_table(result(HOOKED, "emulated", hooks=True)))
    rows = [line.split()[1] for line in printed.getvalue().splitlines() if line.startswith("│")]
    assert rows == ["ddp", "ddp_view", "byteps", "ddp_sparse", "ddp_fp16", "ddp_post_local"]


def test_periodic_contenders_are_judged_by_their_mean():
    rounds = [[[1.0, 1.0, 1.0, 5.0]]]
    assert ContenderMeasurement(rounds, None, None, 0.0, periodic=True).times == [2.0]
    assert ContenderMeasurement(rounds, None, None, 0.0).times == [1.0]


BURST = 128 * 1024


def test_the_bound_of_emulated_links_counts_framing_and_a_burst():
    """1 MB on four equal links: 1.5 times as much leaves each, of which a rested link passes 128 KiB at once."""
    cluster = ClusterSpec.star(bandwidths=[1e6] * 4)
    vector = Variable(name="a", shape=(250_000,), ready=0.1)
    work = Workload(name="dense", variables=(vector,), forward_time=0.5, backward_time=0.4)
    assert least_step(work, cluster).seconds == pytest.approx(0.5 + 0.1 + FRAMING * 1.5 - BURST / 1e6)
    small = Workload(name="small", variables=(Variable(name="a", shape=(1000,)),))
    assert least_step(small, cluster).seconds == 0.0
    assert "burst" in least_step(small, cluster).meaning


def test_the_table_has_every_contender_and_the_remarks_what_spoils_it():
    found = result(TIMES, "emulated", deviation=0.5)
    printed = io.StringIO()
    Console(width=120, file=printed).print(result_table(found))
    text = printed.getvalue()
    for expected in (*TIMES, "of bound", "21.00", "emulated links of uniform"):
        assert expected in text
    notes = "\n".join(remarks(found))
    assert "other processes or virtual machines kept 0.4 cores busy" in notes
    assert "byteps: gradients differ from DDP's by 5.0e-01" in notes
    assert "best DDP: ddp_view" in notes
    assert "in DDP's names, 'view' is gradient_as_bucket_view=True; other arguments have DDP's defaults" in notes


@pytest.mark.parametrize(
    ("launch", "links"),
    [
        ("local", "2 ranks, loopback"),
        ("emulated", "2 ranks, emulated links of uniform, natural rank order"),
        ("ssh", "2 ranks, links of uniform, natural rank order"),
    ],
)
def test_the_title_tells_where_the_ranks_were(launch, links):
    found = result(TIMES, launch)
    assert title(found).endswith(links)
    notes = "\n".join(remarks(found))
    assert "load average 0.3 before, 2 cores: rank 0's machine, here" in notes


def test_emulated_links_have_no_short_latency_for_whoever_plans_or_predicts():
    assert [link.latency for link in result(TIMES, "emulated").cluster.links] == [0.0, 0.0]
    assert [link.latency for link in result(TIMES, "ssh").cluster.links] == [50e-6, 50e-6]


def test_hooks_that_begin_with_exact_steps_have_no_deviation():
    """Their first step, which is what is compared, is DDP's own all-reduce."""
    contenders = result(HOOKED, "emulated", deviation=1e-3, hooks=True).document().to_dict()["contenders"]
    assert contenders["ddp_post_local"]["gradient_deviation"] is None
    assert contenders["ddp_fp16"]["gradient_deviation"] == 1e-3
    assert contenders["byteps"]["gradient_deviation"] == 1e-3


def test_the_document_keeps_every_step_and_is_json():
    document = json.loads(json.dumps(result(TIMES).document().to_dict()))
    assert document["contenders"]["ddp"]["step_seconds_by_round_and_rank"] == [[[0.030], [0.010]], [[0.060], [0.020]]]
    assert document["contenders"]["byteps"]["bytes_per_step_and_rank"] == 1e6
    assert document["best_ddp"] == "ddp_view"
    assert document["emulated"] == {"links": False, "compute": False}
    assert document["best_exact_plan"] == "byteps"
    assert document["workload"]["bytes"] == 2**20


def test_files_that_also_have_ratios_of_times_are_read():
    document = result(TIMES).document().to_dict()
    for contender in document["contenders"].values():
        contender |= {f"ratio_to_{which}_ddp": {"median": 1, "low": 1, "high": 1} for which in ("best", "first")}
    read = BenchDocument.from_dict(document)
    assert read.contenders["byteps"].speedup_over_best_ddp.median == result(TIMES).speedup("byteps").median
    assert "ratio" not in json.dumps(read.to_dict())


def test_the_picture_names_every_contender(tmp_path):
    draw(result(TIMES, "emulated"), tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in TIMES)

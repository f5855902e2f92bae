"""The report of a tuning run that may split operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.conversions import COLLECTIVES
from lightning_autosync.hybrid.rates import CollectiveRate, HybridRates
from lightning_autosync.report.hybrid import write_hybrid_report
from lightning_autosync.search.hybrid.result import HybridTrial, HybridTuningResult

FREE = CollectiveRate(call=0.0, peer=0.0, host=0.0)
RATES = HybridRates(flops=1e9, memory=1e9, operation=0.0, layer=0.0, update=1e9, **dict.fromkeys(COLLECTIVES, FREE))
SECONDS = {"split": 0.05, "byteps": 0.08, "ddp_view": 0.1, "ddp": 0.2}
KINDS = {"split": "plan", "byteps": "builder", "ddp_view": "ddp", "ddp": "ddp"}


def compared() -> HybridTuningResult:
    def contender(name: str) -> dict[str, Any]:
        return {"kind": KINDS[name], "class": "exact", "round_seconds": [SECONDS[name]] * 5}

    plan = HybridPlan(mesh=(2,), layers=(LayerPlan(module="up", signature=("col",)),))
    trial = HybridTrial(number=0, name="split", origin="search", state="complete", seconds=0.05, plan=plan.to_dict())
    return HybridTuningResult(
        cluster=ClusterSpec.uniform(2, bandwidth="1 Gbit/s").to_dict(),
        rates=RATES.to_dict(),
        model="m",
        weight_bytes=8,
        search_seconds=0.1,
        trials=(trial,),
        final={
            "contenders": {name: contender(name) for name in SECONDS},
            "winner": "split",
            "opponents": {"ddp": "ddp_view", "builder": "byteps"},
        },
        winner="split",
    )


def test_each_contender_has_its_speedup_over_the_best_ddp(tmp_path: Path) -> None:
    write_hybrid_report(compared(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    shown = {"split": "2.00x", "byteps": "1.25x", "ddp_view": "1.00x", "ddp": "0.50x"}
    for name, speedup in shown.items():
        row = page.split(f'<tr><th scope="row">{name}</th><td>{KINDS[name]}</td>')[1].split("</tr>")[0]
        assert f">{speedup} (" in row
    assert "over the best DDP (ddp_view)" in page


def test_a_failure_is_told(tmp_path: Path) -> None:
    failed = compared().model_copy(update={"failure": "no worker can be started"})
    write_hybrid_report(failed, tmp_path / "report.html")
    assert "The run failed: no worker can be started." in (tmp_path / "report.html").read_text()


def test_the_lines_name_the_best_ddp() -> None:
    lines = list(compared().lines())
    assert "speedup over the best DDP, ddp_view: 2.00x [2.00, 2.00]" in lines
    assert "speedup over byteps: 1.60x [1.60, 1.60]" in lines

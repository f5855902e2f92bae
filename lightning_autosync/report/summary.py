"""The result of a tuning run, as sentences and as one row of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lightning_autosync.documents import counted
from lightning_autosync.measure.step_time import CONFIDENCE, Interval
from lightning_autosync.report.rendering import milliseconds
from lightning_autosync.report.tuning_run import TuningRun
from lightning_autosync.search.tuning.comparison import MIN_ROUNDS, PREDICTED, FinalComparison


def summary_row(run: TuningRun) -> dict[str, Any]:
    """A summary as plain data: what was tuned, how, and the result.

    ``over_ddp`` and ``over_builder`` are speedups of the best plan (``median``, ``low``, ``high``), paired by round of
    the final comparison; None if not measured. ``left_out`` maps plans that failed in it to reasons.
    """
    final = run.final
    builder = None if final is None else final.builder
    return {
        "directory": str(run.directory),
        "workload": run.workload.name,
        "cluster": run.cluster.name,
        "sampler": run.sampler,
        "seed": run.seed,
        "trials": len(run.trials),
        "seconds": None if run.result.best is None else run.best_seconds,
        "over_ddp": None if final is None else asdict(final.speedup(final.ddp)),
        "over_builder": None if final is None or builder is None else asdict(final.speedup(builder)),
        "left_out": {} if final is None else dict(final.left_out),
        "bound_share": None if run.result.best is None else bound_share(run),
        "hit_rate": run.hit_rate,
        "trials_to_98_percent": run.trials_to_98,
        "trials_per_minute": run.result.timing.trials_per_minute,
        "emulated": run.result.emulated,
    }


def summary(run: TuningRun) -> list[str]:
    """The paragraphs at the top of a report."""
    return [text for text in (" ".join(_result(run)), " ".join(_search(run)), _honesty(run)) if text]


def faster(ratio: Interval) -> str:
    """``1.51 times as fast (95% interval 1.49 to 1.52) as``, or ``as fast within noise`` if 1 is in the interval."""
    interval = f"{CONFIDENCE:.0%} interval {ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.low <= 1 <= ratio.high:
        return f"as fast within noise ({ratio.median:.2f} times, {interval}) as"
    return f"{ratio.median:.2f} times as fast ({interval}) as"


def bound_share(run: TuningRun) -> float | None:
    """The bound divided by the best plan's step time; None without a bound or if the plan is not exact."""
    if run.bound is None or run.plan is None or run.plan.semantics != "exact":
        return None
    return run.bound.seconds / run.best_seconds


def _result(run: TuningRun) -> Iterator[str]:
    best, final = run.result.best, run.final
    if best is None:
        yield "No trial completed, so there is no plan."
        return
    yield f"The best plan ({best.source}) takes {milliseconds(run.best_seconds)} a step."
    if final is None:
        yield "It was not measured side by side with its opponents, so this run gives no speedup."
        yield from _loose_times(run)
        return
    yield from _claims(final)
    if (share := bound_share(run)) is not None:
        yield f"That is {share:.0%} of the speed that any exact method can reach on these links."


def _claims(final: FinalComparison) -> Iterator[str]:
    claims = [f"{faster(final.speedup(final.ddp))} the best-tuned DDP ({final.ddp})"]
    if final.builder is not None and final.builder != final.winner:
        claims.append(f"{faster(final.speedup(final.builder))} the best hand-made builder ({final.builder})")
    if PREDICTED in final.contenders and final.winner != PREDICTED:
        claims.append(f"{faster(final.speedup(PREDICTED))} the plan found by prediction alone")
    yield f"In interleaved rounds it was {', and '.join(claims)}."
    if not final.has_enough_rounds:
        yield f"{final.rounds} rounds are too few to be sure: use rounds={MIN_ROUNDS} or more."
    if final.builder == final.winner:
        yield "In the rounds that choose the winner, no searched plan was faster than this builder's."
    for name, why in final.left_out.items():
        yield f"{name} failed in this comparison and was left out: {why}."


def _loose_times(run: TuningRun) -> Iterator[str]:
    if run.ddp_seconds is not None:
        yield f"During the search the best-tuned DDP took {milliseconds(run.ddp_seconds)}."
    if run.builder_seconds is not None:
        yield f"The best builder took {milliseconds(run.builder_seconds)}."


def _search(run: TuningRun) -> Iterator[str]:
    states = [trial.state for trial in run.trials]
    pruned, failed = states.count("pruned"), states.count("failed")
    tried = counted(len(states), "plan")
    yield f"The run tried {tried}; {pruned} were stopped early as clear losers and {failed} failed."
    if why := run.result.unsearched:
        yield f"{why[0].upper()}{why[1:]}."
    if run.hit_rate is not None:
        yield f"Of {len(run.proposals)} proposals of the sampler {run.hits} ({run.hit_rate:.0%}) beat the best builder."
    if run.trials_to_98 is not None:
        yield f"98% of the best trial's speed was reached after {counted(run.trials_to_98, 'trial')}."
    if run.drift.seen:
        yield f"The machine's speed drifted by {run.drift.spread:.0%}. Times of trials are therefore relative to a"
        yield "reference plan, which was measured repeatedly."
    if run.result.interrupted:
        yield "The search was interrupted before its budget was spent."
    if run.result.failure is not None:
        yield f"The run failed: {run.result.failure}."


def _honesty(run: TuningRun) -> str:
    """A sentence that says what was emulated; empty if nothing was."""
    parts = []
    if run.emulated_links:
        parts.append("links were emulated on one machine")
    if run.paced:
        parts.append("computation was paced (it lasts as profiled, without using a core)")
    text = " and ".join(parts)
    return f"{text[0].upper()}{text[1:]}. Gradients and their synchronization were real." if text else ""

"""How far the fluid replay is from the replay in frames: ``python -m tests.benchmarks.fluid_error [CASES [SEED]]``.

Both price the same plans: those that `autosync validate` draws (192 cases, seed 0) for eight shipped clusters and six
models. Nothing is measured. An error is the fluid's step time divided by that in frames, less 1. The table has the
errors by kind of plan. Messages on trees are told apart by their pieces, the mean over the plan's elements: a rank
forwards a piece when it is complete. The last row is for plans of more than `FRAMES_LIMIT` frames, for which
``detail=auto`` takes the fluid. Needs neither root nor an idle machine, takes 15 seconds.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence

import numpy
from rich.console import Console
from rich.table import Table

from lightning_autosync.lab.validation.cases import Case, draw_cases
from lightning_autosync.lab.validation.settings import ValidationSettings
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.plan import Schedule, TreeTransfer, compile_plan
from lightning_autosync.replay import Replay
from lightning_autosync.replay.replay import FRAMES_LIMIT

MANY = f"more than {FRAMES_LIMIT} frames"
HEADINGS = ("plans", "count", "median", "90th percentile", "largest", "lowest", "highest")
WORST = 10


def kind(schedule: Schedule) -> str:
    """What carries the messages of a plan, and into how many pieces trees cut them."""
    if all(message.collective for message in schedule.messages):
        return "native"
    rounds = [round for message in schedule.messages for round in message.rounds]
    trees = [one for round in rounds for one in round.transfers if isinstance(one, TreeTransfer)]
    if not trees:
        return "gathered rows"
    sizes = numpy.array([one.stop - one.start for one in trees])
    pieces = numpy.average([-(-(one.stop - one.start) // one.segment) for one in trees], weights=sizes)
    return f"trees, {'up to 2' if pieces <= 2 else '2 to 8' if pieces <= 8 else 'more than 8'} pieces"


def error(case: Case) -> tuple[str, float, int]:
    """The kind of a case's plan, the fluid's error, and the number of frames."""
    schedule = compile_plan(case.plan, case.workload, case.cluster)
    replay = Replay(case.workload, case.cluster, emulated_hosts(cores=2))
    frames, fluid = replay.predict(schedule, "frames"), replay.predict(schedule, "fluid")
    return kind(schedule), fluid.step_time / frames.step_time - 1, frames.frames


def cells(errors: Sequence[float]) -> list[str]:
    found = numpy.array(errors)
    sizes = numpy.abs(found)
    shown = [f"{value:.1%}" for value in (numpy.median(sizes), numpy.quantile(sizes, 0.9), sizes.max())]
    return [str(len(found)), *shown, f"{found.min():+.1%}", f"{found.max():+.1%}"]


def main(count: str = "192", seed: str = "0") -> None:
    groups: dict[str, list[float]] = defaultdict(list)
    priced = []
    for case in draw_cases(ValidationSettings(cases=int(count), seed=int(seed))):
        name, found, frames = error(case)
        for group in ("all", name, *([MANY] if frames > FRAMES_LIMIT else [])):
            groups[group].append(found)
        priced.append((found, f"{case.pair}: {case.kind}, {name}, {frames} frames"))
    table = Table(*HEADINGS, title="errors of fluids")
    for group in sorted(groups, key=lambda each: (each != "all", each == MANY, each)):
        table.add_row(group, *cells(groups[group]))
    Console(width=120).print(table)
    for found, what in sorted(priced, key=lambda each: -abs(each[0]))[:WORST]:
        print(f"{found:+.1%}  {what}")


if __name__ == "__main__":
    main(*sys.argv[1:])

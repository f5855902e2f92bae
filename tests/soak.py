"""Injected faults, one after another, on short trainings of real processes, and what came of each.

    python -m tests.soak faults=1000 [seed=0] [log=soak.jsonl] [beside=3] [kinds=kill,stop] [modes=native]

Each fault has a job of its own: two to four processes on this machine that train a small network on handwritten digits
under a Trainer, exactly or relaxed, and save checkpoints; or that train and tune themselves; or several processes that
tell trials to one study. In jobs that tune themselves, faults come around switches of plans: while links are measured,
as a plan is opened, while it is tried, when tuning ends, when links are measured again, and while the former plan shows
whether links have recovered. Everything is drawn from the seed. The log has a line for each fault as it ends, and the
same command goes on with it. At the end there is a table: for each kind of fault

- *ok*, *ended*: jobs that went on to their end, and those that ended with an error on every rank that was left;
- *hangs*: jobs that neither ended nor made a step in `BOUND` seconds;
- *silent differences*: ranks that ended well with other weights than each other, or than the undisturbed job's;
- *lost studies*: studies that cannot be read any more, or lack trials that they had taken;
- *unnamed*: jobs that failed where some rank's error names no rank;
- *another*: likewise, but it names another rank than the one that met the fault.

The exit status is 1 if there is a hang, a silent difference, a lost study or an unnamed rank.
"""

from __future__ import annotations

import base64
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

TESTS = Path(__file__).parent
PATHS = [str(TESTS.parent), str(TESTS), str(TESTS / "fault"), str(TESTS / "distributed")]
sys.path[:0] = [path for path in PATHS if path not in sys.path]

import crew as crews  # noqa: E402
import forked  # noqa: E402
import numpy as np  # noqa: E402
from ports import free_port  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from soak_calls import (  # noqa: E402
    CUT,
    DELAY,
    DISK,
    EXACT,
    EXCEPTION,
    KILL,
    PAUSE,
    PLANS,
    STEPS,
    STOP,
    STUDY,
    TIMEOUT,
    TRIALS,
    TUNING,
    WRONG_MODEL,
    WRONG_PLAN,
    WRONG_RANK,
    told_trials,
)
from tuning_soak_calls import MOMENT_OF, MOMENTS, NO_CONNECTION, OTHER_PLAN  # noqa: E402

from lightning_autosync.run_files import RunFile, alone  # noqa: E402

FORMAT = "autosync-soak/1"
OF_TRAINING = (KILL, STOP, PAUSE, DELAY, CUT, DISK, EXCEPTION, WRONG_RANK, WRONG_PLAN, WRONG_MODEL)
OF_STUDIES = (KILL, PAUSE, DISK)
OF_TUNING = (KILL, STOP, PAUSE, DELAY, CUT, EXCEPTION, OTHER_PLAN, NO_CONNECTION)
KINDS = (*OF_TRAINING, OTHER_PLAN, NO_CONNECTION)
MODES = (*PLANS, STUDY, TUNING)
BOUND = 2 * TIMEOUT + 48
"""Seconds within which a job has to end or make a step: two time-outs, and what a busy machine needs."""
SAME = {*EXACT, TUNING}
"""Modes in which every job ends with the undisturbed one's weights, up to the order of sums."""
START = 300
"""Seconds that its processes may take to start, before that."""
CLOSE = 1e-5
"""By which weights of an exact job may differ from the undisturbed one's, for the order of sums."""
_NAMED = re.compile(r"\branks? ((?:\d+(?:, | and )?)+)")


@dataclass(frozen=True)
class Fault:
    """One fault and its job, as plain data.

    Attributes:
        number: of the fault.
        kind: one of `KINDS`.
        mode: one of `PLANS`, `STUDY`, or `TUNING`: a job that tunes itself.
        size: processes of the job.
        rank: that it happens to.
        step: in which; 0 is before the job begins. Where plans are tried, `moment` counts instead.
        after: seconds after the step's begin.
        seconds: that a pause lasts.
        seed: of what else is drawn.
        moment, count: moment of the tuning at which it happens, and the number of that moment; "" and 0 elsewhere.
    """

    number: int
    kind: str
    mode: str
    size: int
    rank: int
    step: int
    after: float
    seconds: float
    seed: int
    moment: str = ""
    count: int = 0

    @classmethod
    def draw(cls, seed: int, number: int, kinds: Iterable[str], modes: Iterable[str]) -> Fault:
        drawn = random.Random(f"{seed}/{number}")
        mode = drawn.choice([*modes])
        possible = {STUDY: OF_STUDIES, TUNING: OF_TUNING}.get(mode, OF_TRAINING)
        allowed = [kind for kind in kinds if kind in possible] or [*possible]
        kind, size = drawn.choice(allowed), drawn.randint(2, 3 if mode == TUNING else 4)
        rank = 0 if kind == DISK and mode != STUDY else drawn.randrange(size)  # the rank that writes checkpoints
        step = drawn.randint(0, STEPS - 2) if kind != DISK else drawn.randint(0, 4)
        if kind == DELAY:
            step = max(step, 1)
        after, seconds = drawn.uniform(0, 0.02), drawn.uniform(0.2, 1.5)
        moment, count, own = "", 0, drawn.randrange(2**31)
        if mode == TUNING:
            moment = MOMENT_OF.get(kind) or drawn.choice([*MOMENTS])
            count = drawn.randint(1, MOMENTS[moment])
        return cls(number, kind, mode, size, rank, step, after, seconds, own, moment, count)


@dataclass(frozen=True)
class Seen:
    """What came of a fault; a line of the log.

    Attributes:
        fault: as plain data.
        took: seconds.
        answers: by rank, the error of each rank that ended, "" for none; None for one that did not say.
        struck: whether the fault came to happen, where that can be told.
        hangs, differs, unnamed, another: ranks.
        lost: why a study is lost, or "".
    """

    fault: dict[str, Any]
    took: float
    answers: dict[str, str | None]
    struck: bool
    hangs: list[int] = field(default_factory=list)
    differs: list[int] = field(default_factory=list)
    unnamed: list[int] = field(default_factory=list)
    another: list[int] = field(default_factory=list)
    lost: str = ""

    @property
    def key(self) -> int:
        return int(self.fault["number"])

    @property
    def ok(self) -> bool:
        return all(error == "" for error in self.answers.values())

    @property
    def bad(self) -> bool:
        return bool(self.hangs or self.differs or self.unnamed or self.lost)


class Soak:
    """Runs jobs, and judges them by undisturbed ones, which it runs when they are first needed."""

    def __init__(self) -> None:
        self._undisturbed: dict[tuple[str, int], np.ndarray] = {}
        self._lock = Lock()

    def run(self, fault: Fault) -> Seen:
        """One fault on a job of its own."""
        if fault.mode in SAME:
            self._reference(fault.mode, fault.size)
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="autosync-soak-") as folder:
            if fault.mode == STUDY:
                path = f"{folder}/study.journal"
                job = crews.Crew("soak_calls:keep_study", fault.size, path=path, fault=asdict(fault))
            else:
                job = _training(fault.mode, fault.size, folder, asdict(fault), fault.seed)
            with job:
                found, hangs = self._follow(job, fault)
                struck = job.count("cut" if fault.kind == CUT else "struck") > 0
                told = {rank: job.count(f"told{rank}") for rank in range(fault.size)}
            lost = _lost(Path(folder, "study.journal"), told) if fault.mode == STUDY else ""
        answers = {str(rank): one["error"] if one else None for rank, one in found.items()}
        unnamed, another = ([], []) if fault.mode == STUDY else _names(fault, found)
        differs = [] if fault.mode == STUDY else self._differences(fault, found)
        took = time.monotonic() - begin
        return Seen(asdict(fault), round(took, 2), answers, struck, hangs, differs, unnamed, another, lost)

    def _follow(self, job: crews.Crew, fault: Fault) -> tuple[dict[int, Any], list[int]]:
        """What the ranks answer that are not dead or stopped for good, and which of them did not end."""
        resumed, begun = None, time.monotonic()
        while job.count("begun") < fault.size and time.monotonic() < begun + START:
            time.sleep(0.05)
        deadline, steps = time.monotonic() + BOUND, 0
        waiting = {rank for rank in range(fault.size) if rank != fault.rank or fault.kind not in (KILL, STOP)}
        found: dict[int, Any] = {}
        while waiting and time.monotonic() < deadline:
            if (made := job.count("steps")) > steps:
                deadline, steps = time.monotonic() + BOUND, made
            if fault.kind == PAUSE and resumed is None and job.count("struck"):
                resumed = time.monotonic() + fault.seconds
            if resumed is not None and time.monotonic() > resumed:
                job.go_on(fault.rank)
            for rank in [*waiting]:
                try:
                    found[rank] = job.result(rank, 0.02)
                    waiting.discard(rank)
                except TimeoutError:
                    continue
        return found, sorted(waiting)

    def _reference(self, mode: str, size: int) -> np.ndarray:
        with self._lock:
            if (mode, size) not in self._undisturbed:
                with tempfile.TemporaryDirectory() as folder, _training(mode, size, folder, None) as job:
                    found = [job.result(rank, 2 * BOUND) for rank in range(size)]
                if any(one is None or one["error"] for one in found):
                    raise SystemExit(f"soak: the undisturbed job of {size} ranks, {mode}, failed: {found}")
                if mode == TUNING and not all(one["trials"] for one in found):
                    raise SystemExit(f"soak: the undisturbed job of {size} ranks tried no plan: {found[0]['tuning']}")
                self._undisturbed[mode, size] = _weights(found[0])
            return self._undisturbed[mode, size]

    def _differences(self, fault: Fault, found: Mapping[int, Any]) -> list[int]:
        """Of the ranks that say that all is well, those whose weights are not what they should be."""
        well = {rank: _weights(one) for rank, one in found.items() if one and not one["error"]}
        if not well:
            return []
        if fault.mode in SAME and fault.kind not in (WRONG_PLAN, WRONG_RANK):
            right = self._reference(fault.mode, fault.size)
            return [rank for rank, one in well.items() if one.shape != right.shape or abs(one - right).max() > CLOSE]
        first = well[min(well)]
        return [rank for rank, one in well.items() if not np.array_equal(one, first)]


def _training(mode: str, size: int, folder: str, fault: dict[str, Any] | None, seed: int = 0) -> crews.Crew:
    ports = {"port": free_port(), "meeting_port": free_port()}
    return crews.Crew("soak_calls:train", size, **ports, folder=folder, mode=mode, fault=fault, seed=seed)


def _weights(answer: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(answer["weights"]), np.float32)


def _names(fault: Fault, found: Mapping[int, Any]) -> tuple[list[int], list[int]]:
    """Ranks whose error names no rank, and those whose error names none that met the fault."""
    unnamed, another = [], []
    for rank, one in found.items():
        if one is not None and (not one["error"] or rank == fault.rank):
            continue
        error = "" if one is None else one["error"]  # None: it died without a word
        named = {int(number) for group in _NAMED.findall(error) for number in re.findall(r"\d+", group)}
        if not named:
            unnamed.append(rank)
        elif fault.rank not in named and fault.kind not in (CUT, WRONG_RANK):
            another.append(rank)
    return unnamed, another


def _lost(path: Path, told: Mapping[int, int]) -> str:
    """Why a study is lost; "" if it has all that it took."""
    try:
        there = told_trials(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}" if sum(told.values()) else ""
    lacks = {rank: count - there.get(rank, 0) for rank, count in told.items() if there.get(rank, 0) < count}
    return f"trials lost by rank: {lacks}" if lacks else ""


def table(seen: Iterable[Seen]) -> Table:
    """Counts by kind of fault."""
    made = Table(title="what came of injected faults")
    columns = ("fault", "jobs", "happened", "ok", "ended", "hangs", "silent differences", "lost studies", "unnamed")
    for name in (*columns, "another", "slowest"):
        made.add_column(name, justify="left" if name == "fault" else "right")
    runs = [*seen]
    for kind in [*(kind for kind in KINDS if any(one.fault["kind"] == kind for one in runs)), "all"]:
        of_kind = [one for one in runs if kind in (one.fault["kind"], "all")]
        counts = Counter[str]()
        for one in of_kind:
            told = one.fault["mode"] == TUNING or one.fault["kind"] in (KILL, STOP, PAUSE, CUT)
            counts["struck"] += one.struck or not told
            counts["ok"] += one.ok
            for name in ("hangs", "differs", "lost", "unnamed", "another"):
                counts[name] += bool(getattr(one, name))
        shown = ("struck", "ok", "ended", "hangs", "differs", "lost", "unnamed", "another")
        counts["ended"] = len(of_kind) - counts["ok"] - sum(bool(one.hangs) and not one.ok for one in of_kind)
        slowest = max((one.took for one in of_kind), default=0.0)
        made.add_row(kind, str(len(of_kind)), *(str(counts[name]) for name in shown), f"{slowest:.1f} s")
    return made


def main(arguments: Iterable[str]) -> int:
    """Run what the log lacks; print the table; the exit status."""
    given = {"faults": "1000", "seed": "0", "log": "soak.jsonl", "beside": "3", "kinds": "", "modes": ""}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in given or not equals:
            raise SystemExit(f"soak: '{argument}': expected KEY=VALUE of {', '.join(given)}\n\n{__doc__}")
        given[key] = value
    kinds = given["kinds"].split(",") if given["kinds"] else [*KINDS]
    modes = given["modes"].split(",") if given["modes"] else [*MODES]
    if unknown := [*({*kinds} - {*KINDS}), *({*modes} - {*MODES})]:
        raise SystemExit(f"soak: {', '.join(unknown)}: allowed: {', '.join([*KINDS, *MODES])}")
    os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)  # for the server of forks, which imports what jobs do
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    forked.PRELOADED.append("soak_calls")
    seed, console = int(given["seed"]), Console(width=None if sys.stdout.isatty() else 150)
    with alone(Path(given["log"])):
        settings = {"seed": seed, "kinds": kinds, "modes": modes, "steps": STEPS, "trials": TRIALS, "timeout": TIMEOUT}
        log = RunFile(Path(given["log"]), FORMAT, "a soak", settings, Seen, key="log")
        faults = [Fault.draw(seed, number, kinds, modes) for number in range(int(given["faults"]))]
        soak, writing, begin = Soak(), Lock(), time.monotonic()

        def one(fault: Fault) -> None:
            found = soak.run(fault)
            with writing:
                log.append(found)
                log.runs[found.key] = found
                if found.bad:
                    console.print(f"{fault}: {found}", markup=False, highlight=False)

        left = [fault for fault in faults if fault.number not in log.runs]
        with ThreadPoolExecutor(int(given["beside"])) as pool:
            try:
                for done in [pool.submit(one, fault) for fault in left]:
                    done.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    runs = [run for key, run in log.runs.items() if int(str(key)) < len(faults)]
    console.print(table(runs))
    console.print(f"{len(left)} faults in {time.monotonic() - begin:.0f} s; the log is {given['log']}")
    return int(any(run.bad for run in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The study of a run: asks for trials, tells their results, and reads them back as records."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from lightning_autosync.interrupts import uninterrupted
from lightning_autosync.measure.interleaving import TrialMeasurement
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.search.storages import storage_errors
from lightning_autosync.search.studies import suggest
from lightning_autosync.search.trial_attributes import (
    BATCH,
    CTRL_C,
    ELAPSED,
    ERROR,
    INTERRUPTED,
    ORIGIN,
    OWNER,
    PLAN,
    REFERENCE,
    RUN,
    SECONDS,
    STEPS,
    plan_of,
)
from lightning_autosync.search.tuning.records import STATES, TrialRecord
from lightning_autosync.search.tuning.samplers import BucketSpace, Space


@dataclass
class StoredTrials:
    """The finished trials of a study. Methods raise `StorageError` if the study's storage does not answer."""

    study: optuna.Study
    _last: list[FrozenTrial] = field(default_factory=list, init=False, repr=False)
    _is_frozen: bool = field(default=False, init=False, repr=False)

    def freeze(self) -> None:
        """Use the trials that were read last from now on, because the storage does not answer."""
        self._is_frozen = True

    @uninterrupted()
    @storage_errors()
    def finished(self) -> list[FrozenTrial]:
        """Trials in any final state, in order."""
        if not self._is_frozen:
            self._last = self.study.get_trials(deepcopy=False, states=tuple(STATES))
        return self._last


@dataclass
class Trials(StoredTrials):
    """The trials of one run in its study.

    Attributes:
        sampler: name of the sampler, used as origin of trials without one.
        run: name of the run's directory (`lightning_autosync.documents.identity`).
        alone: whether nobody else works on the study, so that every running trial is a leftover of an interruption.
        proposals: for each proposal, seconds of the sampler from asking for the plan to telling its result.
    """

    space: Space
    sampler: str
    run: str
    alone: bool = False
    proposals: list[float] = field(default_factory=list)

    @property
    def own(self) -> str | None:
        """The run whose trials count as this run's; None if all do."""
        return None if self.alone else self.run

    @storage_errors()
    def end_interrupted(self) -> int:
        """End running trials left by an interruption of this run or by a dead process; returns their number."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        left = [trial for trial in running if self._was_left(trial)]
        for trial in left:
            self.interrupt(trial)
        return len(left)

    @storage_errors()
    def ask(self) -> optuna.Trial:
        """A new trial without parameters."""
        begin = time.perf_counter()
        trial = self.study.ask()
        trial.set_user_attr(RUN, self.run)
        trial.set_user_attr(OWNER, this_process())
        self.proposals.append(time.perf_counter() - begin)
        return trial

    def prepare(self, trial: optuna.Trial) -> None:
        """Do the slow part of `suggest`: training a simulator may take minutes.

        It writes nothing to the study, so a Ctrl-C may interrupt it.
        """
        if isinstance(self.study.sampler, AutoSyncSampler):
            with self._proposing():
                self.study.sampler.prepare(self._all(), trial.number)

    @storage_errors()
    def suggest(self, trial: optuna.Trial) -> None:
        """Give a new trial its parameters."""
        with self._proposing():
            if isinstance(self.space, BucketSpace):
                self.space.suggest(trial)
            else:
                suggest(trial, self.space)
        if ORIGIN not in trial.user_attrs:
            trial.set_user_attr(ORIGIN, self.sampler)

    def plan(self, trial: optuna.Trial | FrozenTrial) -> SyncPlan:
        """The plan of a trial."""
        return self.space.plan(trial.params) if isinstance(self.space, BucketSpace) else plan_of(trial, self.space)

    def plan_of(self, number: int) -> SyncPlan:
        """The plan of the finished trial with this number."""
        return next(self.plan(trial) for trial in self.finished() if trial.number == number)

    @storage_errors()
    def note(self, trial: optuna.Trial, name: str, value: Any) -> None:
        """Set a user attribute of a trial, unless it has one of that name."""
        if name not in trial.user_attrs:
            trial.set_user_attr(name, value)

    @storage_errors()
    def tell(self, trial: optuna.Trial, measurement: TrialMeasurement, batch: int, reference: float | None) -> None:
        """Store a measurement and end its trial.

        Args:
            batch: number of the first trial of the batch.
            reference: seconds of a step of the reference plan, measured with the batch; None if unknown.
        """
        trial.set_user_attr(BATCH, batch)
        trial.set_user_attr(ELAPSED, measurement.elapsed)
        trial.set_user_attr(STEPS, [list(steps) for steps in measurement.steps])
        trial.set_user_attr(PLAN, self.plan(trial).fingerprint)
        if reference is not None:
            trial.set_user_attr(REFERENCE, reference)
        if measurement.why is not None:
            trial.set_user_attr(ERROR, measurement.why)
        seconds = measurement.seconds
        if seconds is not None:
            trial.set_user_attr(SECONDS, seconds)
        if measurement.state == "complete":
            self._end(trial, TrialState.COMPLETE, seconds)
        elif measurement.state == "pruned" and seconds is not None:
            trial.report(seconds, measurement.count)
            self._end(trial, TrialState.PRUNED)
        else:
            self._end(trial, TrialState.FAIL)

    @storage_errors()
    def fail(self, trial: optuna.Trial, why: str) -> None:
        """End a trial whose plan cannot be measured."""
        trial.set_user_attr(ERROR, why)
        self._end(trial, TrialState.FAIL)

    @storage_errors()
    def interrupt(self, trial: optuna.Trial | FrozenTrial, why: str = CTRL_C) -> None:
        """Fail a trial for a reason outside its plan, so that the plan may be measured again."""
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another process has ended it
            for name, value in ((ERROR, why), (INTERRUPTED, True)):
                self.study._storage.set_trial_user_attr(trial._trial_id, name, value)
            self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def records(self) -> list[TrialRecord]:
        """The finished trials as records."""
        return [TrialRecord.of(trial) for trial in self.finished()]

    def _was_left(self, trial: FrozenTrial) -> bool:
        mine = self.alone or trial.user_attrs.get(RUN) == self.run
        return mine or has_ended(str(trial.user_attrs.get(OWNER, "")))

    def _end(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        """End a trial. The sampler's work in `tell` counts as part of the proposal."""
        with self._proposing():
            self.study.tell(trial, value, state=state)

    @uninterrupted()
    @storage_errors()
    def _all(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    @contextmanager
    def _proposing(self) -> Iterator[None]:
        """Add the time of the block to the last proposal."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self.proposals:
                self.proposals[-1] += time.perf_counter() - begin


def this_process() -> str:
    """An id of this process, by which other processes on this machine can tell whether it still runs."""
    return f"{os.getpid()}.{_start_time(os.getpid())}@{_pid_space()}"


def has_ended(process: str) -> bool:
    """Whether the process with this id has ended; False if it ran on another machine or before the last boot."""
    number, _, place = process.partition("@")
    pid, _, start = number.partition(".")
    if place != _pid_space() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it runs, as another user
        return False
    return start not in ("", _start_time(int(pid)))  # another start time means that the kernel reused the process id


def _start_time(pid: int) -> str:
    """Start time of a process by the kernel's clock; empty without ``/proc``."""
    with suppress(OSError):
        # The name is in parentheses and may contain anything. The start time is the twentieth field after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _pid_space() -> str:
    """An id of the space of process ids: the machine since its boot, and the container's namespace.

    Machines may have the same name and the same number of their first namespace. Linux's random boot id differs.
    """
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{boot}/{namespace}"

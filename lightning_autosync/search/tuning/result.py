"""``autosync-tuning/1``: what a run found, as plain data and as the lines that it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_autosync.measure.drift import Drift
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.passwords import without_password
from lightning_autosync.search.tuning.final import Final
from lightning_autosync.search.tuning.job import Job
from lightning_autosync.search.tuning.opponents import Opponent
from lightning_autosync.search.tuning.trials import Record, drift_of, footing_of

FORMAT = "autosync-tuning/1"
_OPPONENTS = {"ddp": "best DDP", "builder": "best builder"}


@dataclass(frozen=True)
class Best:
    """The answer.

    Attributes:
        number: of its trial; None for a builder's plan that was no trial.
        origin: how it came about.
        seconds: of a step, in the last comparison if there was one.
        plan: to run.
        builder: whose plan it is; None for a plan that was searched.
    """

    number: int | None
    origin: str
    seconds: float
    plan: SyncPlan
    builder: str | None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "number": self.number,
            "origin": self.origin,
            "seconds": self.seconds,
            "builder": self.builder,
            "plan": self.plan.to_dict(),
        }


@dataclass(frozen=True)
class Pace:
    """How fast a session went.

    Attributes:
        trials_per_minute: set-up, warm-up and the reference included; None without a trial.
        proposals: seconds of the sampler by proposal, from asking for a plan to its result being taken in.
        wall_seconds: of the session, the opponents, the last comparison and the start of workers included.
        restarts: how often the workers were started again.
    """

    trials_per_minute: float | None
    proposals: Sequence[float]
    wall_seconds: float
    restarts: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "trials_per_minute": self.trials_per_minute,
            "sampler_seconds": sum(self.proposals),
            "sampler_seconds_by_proposal": list(self.proposals),
            "wall_seconds": self.wall_seconds,
            "restarts": self.restarts,
        }


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        job: what was tuned.
        storage: of the study.
        records: its trials.
        ddp, builder: the best ones as measured before or during the search, on the footing of the trials; None where
            none ran.
        best: the answer; None if no plan came to a time.
        final: the last comparison; None if the run was interrupted or came to none because workers failed.
        pace: how fast it went.
        interrupted: whether somebody ended it.
        failure: why the search or the last comparison could not go on; None if they came to their end.
        run: the run among several of the study, whose drift counts; None where all trials are of this one.
        measured: what was measured before the trials, as plain data.
    """

    job: Job
    storage: str
    records: Sequence[Record]
    ddp: Opponent | None
    builder: Opponent | None
    best: Best | None
    final: Final | None
    pace: Pace
    interrupted: bool
    failure: str | None = None
    run: str | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __float__(self) -> float:
        """Seconds of a step of the best plan, which a sweep over tuning runs may compare.

        Raises:
            ValueError: no plan came to a time.
        """
        if self.best is None:
            raise ValueError("no plan came to a time")
        return self.best.seconds

    @property
    def drift(self) -> Drift:
        """Of the machine, during the trials of this run."""
        return drift_of(self.records, self.run)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        settings = self.job.settings
        return {
            "format": FORMAT,
            "settings": _without_passwords(settings.model_dump(mode="json")),
            "cluster": self.job.cluster.to_dict(),
            "workload": {"bytes": self.job.workload.bytes, **self.job.workload.to_dict()},
            "semantics": settings.semantics,
            "study": {"name": settings.study.name, "storage": without_password(self.storage)},
            "best": None if self.best is None else self.best.to_dict(),
            "opponents": {
                "ddp": None if self.ddp is None else asdict(self.ddp),
                "builder": None if self.builder is None else asdict(self.builder),
                **self.measured,
            },
            "trials": self._trials(),
            "final": None if self.final is None else self.final.to_dict(),
            "emulated": {"links": settings.emulated, "compute": settings.model.kind == "paced"},
            "drift": self.drift.to_dict(),
            "timing": self.pace.to_dict(),
            "interrupted": self.interrupted,
            "failure": self.failure,
            "environment": {} if self.final is None else self.final.result.conditions,
        }

    def _trials(self) -> list[dict[str, Any]]:
        """Every trial; ``corrected`` are its seconds on the footing of this run."""
        footing, made = footing_of(self.records, self.run), []
        for record in self.records:
            run = None if self.run is None else record.run
            seconds = record.seconds
            corrected = None if seconds is None else footing.convert(run, record.number, seconds)
            made.append({**record.to_dict(), "corrected": corrected})
        return made

    def lines(self) -> list[str]:
        """What a reader must know, a line each."""
        return [*self._winner(), *self._count(), *self._conditions()]

    def _winner(self) -> list[str]:
        if self.best is None:
            return ["no plan came to a time"]
        where = f"builder {self.best.builder}" if self.best.builder else f"trial {self.best.number}"
        lines = [f"best plan: {where} ({self.best.origin}), {1e3 * self.best.seconds:.2f} ms a step"]
        if self.final is None:
            return [*lines, "it was not compared with its opponents side by side: run the same command to go on"]
        lines += [_standing(self.final, *one) for one in self.final.opponents.items() if one[1] != self.final.winner]
        if self.final.winner == self.final.builder:
            lines.append("no plan that was searched beats this builder's in the rounds that choose")
        lines += [f"{name} failed at that and was left out: {why}" for name, why in self.final.left_out.items()]
        return lines

    def _count(self) -> list[str]:
        states = [record.state for record in self.records if not record.interrupted]
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("complete", "pruned", "failed"))
        pace, proposals = self.pace.trials_per_minute, self.pace.proposals
        if pace is None or not proposals:
            return [f"{len(states)} trials: {counts}"]
        overhead = 1e3 * sum(proposals) / len(proposals)
        return [f"{len(states)} trials: {counts}; {pace:.1f} a minute, sampler {overhead:.0f} ms a proposal"]

    def _conditions(self) -> list[str]:
        drift, lines = self.drift, []
        if drift.seen:
            lines.append(f"the machine drifted by {drift.spread:.0%}: trials are ranked relative to the reference plan")
        if self.pace.restarts:
            lines.append(f"workers were started again {self.pace.restarts} times")
        return lines


def _without_passwords(value: Any) -> Any:
    """Plain data; who reads a result need not know the passwords of databases."""
    if isinstance(value, dict):
        return {name: _without_passwords(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_passwords(one) for one in value]
    return without_password(value) if isinstance(value, str) and "://" in value else value


def _standing(final: Final, kind: str, name: str) -> str:
    """How the winner stands to an opponent; a gain is claimed only where the interval says so."""
    ratio, what = final.ratio(name), _OPPONENTS[kind]
    share = f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    claim = "" if final.gains(name) else ", which is no gain" if final.tells else ", in too few rounds to tell"
    return f"it takes {share} of the time of the {what}, {name}{claim}"

"""The trials of a run that may split operators, in its study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from lightning_autosync.documents import checked, parse_json
from lightning_autosync.interrupts import uninterrupted
from lightning_autosync.search.hybrid.result import HybridTrial
from lightning_autosync.search.storages import StudyError, storage_errors
from lightning_autosync.search.trial_attributes import RUN
from lightning_autosync.search.tuning.records import STATES
from lightning_autosync.search.tuning.trials import StoredTrials

TRIAL = "autosync:hybrid-trial"
"""User attribute of a trial: its `HybridTrial` without the number, as JSON text."""
PARAMETERS: Mapping[str, BaseDistribution] = {
    "origin": CategoricalDistribution(["search", "megatron", "builder", "ddp"]),
    "place": IntDistribution(0, 1023),
}
"""Parameters of a trial: origin of its plan, and its place among the plans of that origin, best prediction first."""
_Fields = dict[str, Any]
_OPTUNA = {name: state for state, name in STATES.items()}


@dataclass
class HybridTrials(StoredTrials):
    """The trials of one run in its study.

    Attributes:
        run: name of the run's directory (`lightning_autosync.documents.identity`).
        alone: whether nobody else works on the study. Otherwise only trials of this run count: other runs may be on
            slower machines, and no reference plan shows by how much.
    """

    run: str
    alone: bool

    def records(self) -> list[HybridTrial]:
        """The finished trials; for each contender only the last one.

        Raises:
            StudyError: an attribute of a trial is damaged.
        """
        found: dict[str, HybridTrial] = {}
        for trial in self.finished():
            if TRIAL in trial.user_attrs and (self.alone or trial.user_attrs.get(RUN) == self.run):
                where = f"study '{self.study.study_name}', trial {trial.number}: {TRIAL}"
                read: Any = checked(_Fields, parse_json(trial.user_attrs[TRIAL], where, StudyError), where, StudyError)
                record = checked(HybridTrial, {**read, "number": trial.number}, where, StudyError)
                found[record.name] = record
        return list(found.values())

    @uninterrupted()
    @storage_errors()
    def add(self, record: HybridTrial, place: int) -> None:
        """Store a finished trial in one piece, so that no interruption or other process can part it from its point.

        The storage chooses the number of the trial, whatever that of ``record`` is.
        """
        self.study.add_trial(
            optuna.create_trial(
                state=_OPTUNA[record.state],
                value=record.seconds,
                params={"origin": record.origin, "place": place},
                distributions=dict(PARAMETERS),
                user_attrs={TRIAL: record.model_dump_json(exclude={"number"}), RUN: self.run},
            )
        )
        self.finished()  # `freeze` keeps what was read last

"""The table at the end of a sweep: each trial with the values of its keys and the figures of its result."""

from __future__ import annotations

import logging
from pathlib import Path

import optuna
from hydra.core.utils import JobReturn
from optuna.trial import FrozenTrial, TrialState
from rich.markup import escape
from rich.table import Table

from hydra_plugins.autosync._space import Space
from hydra_plugins.autosync._study import of_sweep
from lightning_autosync.documents import counted, result_figures, seconds_text, shortened
from lightning_autosync.errors import DocumentError

FIGURES = "figures"
"""Attribute of a trial: the most important figures of its result, by name."""
_log = logging.getLogger(__name__)
_MOST = 60
"""Number of characters of a cell."""


def figures_of(found: JobReturn) -> dict[str, str]:
    """The figures of the ``result.json`` that a job left; empty if it left none, or one of another application."""
    hydra_configuration = getattr(found, "hydra_cfg", None)  # the launcher by torchrun sets the directory only
    directory = found.working_dir if hydra_configuration is None else hydra_configuration.hydra.runtime.output_dir
    if directory is None:
        return {}
    try:
        return result_figures(Path(directory))
    except DocumentError as error:  # another application may call any file result.json
        _log.warning("no figures in the table: %s", error)
        return {}


def sweep_table(study: optuna.Study, space: Space, compares: bool) -> Table:
    """A row for each trial that was begun, in their order.

    Columns are the keys that were swept, the figures of the results, what jobs returned (if it is compared; headings
    are the names of ``hydra.sweeper.metrics``), and errors (if there are any). Where there is nothing else, the time of
    each trial is shown.

    Args:
        study: the study of the sweep.
        space: its keys.
        compares: whether the study compares what jobs returned.
    """
    trials = [trial for trial in of_sweep(study) if trial.state is not TrialState.WAITING]
    keys = [parameter.name for parameter in space.parameters]
    named = list(dict.fromkeys(name for trial in trials for name in trial.user_attrs.get(FIGURES, {})))
    count = len(study.directions) if compares else 0
    values = ["value"] if count == 1 else [f"value {number}" for number in range(1, count + 1)]
    if compares and study.metric_names is not None:
        values = study.metric_names
    timed = [] if named or values else ["time"]
    faults = ["error"] if any(map(_fault, trials)) else []
    table = Table(title=f"sweep '{study.study_name}': {counted(len(trials), 'trial')}")
    for heading in ("trial", *keys, *named, *values, *timed, *faults):
        table.add_column(heading, overflow="fold")
    for trial in trials:
        figures, found = trial.user_attrs.get(FIGURES, {}), trial.values or [None] * count
        cells = [trial.number, *(trial.params.get(key, "") for key in keys), *(figures.get(name, "") for name in named)]
        cells += ["" if value is None else f"{value:.4g}" for value in found[:count]]
        cells += [_time(trial)] * len(timed) + [_fault(trial)] * len(faults)
        table.add_row(*(escape(shortened(str(cell), _MOST)) for cell in cells))
    return table


def _time(trial: FrozenTrial) -> str:
    seconds = trial.user_attrs.get("seconds")
    return "" if seconds is None else seconds_text(seconds)


def _fault(trial: FrozenTrial) -> str:
    """Why a trial has no result; empty if it has one."""
    if trial.state is TrialState.COMPLETE:
        return ""
    return str(trial.user_attrs.get("error", trial.state.name.lower())).partition("\n")[0]

"""What both plug-ins share: their settings as Hydra composes them, and errors that Hydra prints without a traceback.

Annotations are objects here, and not text: OmegaConf cannot read text.
"""

import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional  # noqa: UP035 - what OmegaConf reads

from hydra.core.config_store import ConfigStore
from hydra.errors import CompactHydraException

GRID = "grid"
"""In place of a sampler: every combination once."""

SAMPLERS: Dict[str, Dict[str, Any]] = {  # noqa: UP006
    "grid": {"_target_": GRID},
    "random": {"_target_": "optuna.samplers.RandomSampler", "seed": None},
    "qmc": {"_target_": "optuna.samplers.QMCSampler", "seed": None},
    "tpe": {"_target_": "optuna.samplers.TPESampler", "seed": None, "n_startup_trials": 10},
    "gp": {"_target_": "optuna.samplers.GPSampler", "seed": None, "n_startup_trials": 10},
    "autosync": {"_target_": "lightning_autosync.search.sampler.AutoSyncSampler", "seed": None},
    "nsgaii": {"_target_": "optuna.samplers.NSGAIISampler", "seed": None, "population_size": 50},
}
"""Options of ``hydra/sweeper/sampler``. ``hydra.sweeper.sampler._target_`` names any other sampler."""


@dataclass
class OptunaSweeperConf:
    """Settings of the sweeper.

    Attributes:
        params: keys that are swept, in Hydra's syntax: ``a,b``, ``choice(a,b)``, ``range(1,9,2)``,
            ``interval(0.1,1)``, ``tag(log,interval(1e-4,1))``. The command line adds to them and overrides them.
        sampler: ``{_target_: ...}`` of an Optuna sampler with its arguments, or of ``grid``.
        direction: ``minimize`` or ``maximize`` what the job returns, or a list of these; None compares nothing.
        metrics: name of what the job returns, or a list of them, as optuna-dashboard shows it; None leaves it unnamed.
        n_trials: of the study, with those of earlier runs; None takes as many as the grid has.
        n_jobs: trials that the launcher gets at a time.
        storage: URL of a database; None is ``study.journal`` in the sweep's directory.
        study_name: within the storage.
        max_failure_rate: the sweep ends with an error if a larger share of its trials failed.
    """

    defaults: List[Any] = field(default_factory=lambda: ["_self_", {"sampler": GRID}])  # noqa: UP006
    _target_: str = "hydra_plugins.autosync.sweeper.OptunaSweeper"
    _recursive_: bool = False
    params: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    sampler: Any = None
    direction: Any = None
    n_trials: Optional[int] = None  # noqa: UP045
    n_jobs: int = 1
    storage: Optional[str] = None  # noqa: UP045
    study_name: str = "sweep"
    max_failure_rate: float = 0.0
    metrics: Any = None


@dataclass
class TorchrunLauncherConf:
    """Settings of the launcher.

    Attributes:
        nproc_per_node: processes of each job on this machine.
        program: words that start the application; None starts it as this process was started.
        arguments: further arguments of torchrun, for example ``[--max-restarts=1]``.
    """

    _target_: str = "hydra_plugins.autosync.launcher.TorchrunLauncher"
    nproc_per_node: int = 2
    program: Optional[List[str]] = None  # noqa: UP006, UP045
    arguments: List[str] = field(default_factory=list)  # noqa: UP006


def register() -> None:
    """Make the settings known to Hydra, as ``hydra/sweeper=autosync`` and ``hydra/launcher=autosync_torchrun``."""
    store = ConfigStore.instance()
    store.store(group="hydra/sweeper", name="autosync", node=OptunaSweeperConf, provider="lightning-autosync")
    for name, node in SAMPLERS.items():
        store.store(group="hydra/sweeper/sampler", name=name, node=node, provider="lightning-autosync")
    store.store(
        group="hydra/launcher", name="autosync_torchrun", node=TorchrunLauncherConf, provider="lightning-autosync"
    )


class SweepError(CompactHydraException):
    """A sweep cannot begin or has failed; Hydra prints the message alone."""


class SweepInterrupted(SweepError):  # noqa: N818 - an event, named as one
    """A Ctrl-C ended a sweep.

    Attributes:
        status: exit status, as shells have it.
    """

    status = 130


def refuse_within_rank() -> None:
    """Refuse to sweep in a process that is one rank of a job: every rank would run a whole sweep of its own.

    Raises:
        SweepError: this is such a process.
    """
    if "LOCAL_RANK" in os.environ:
        raise SweepError(
            "cannot sweep within a rank: LOCAL_RANK is set, so every rank would run the whole sweep. Start the sweep "
            "outside torchrun. With hydra/launcher=autosync_torchrun each trial is its own torchrun job. If Lightning "
            "launches the ranks (strategies ddp, autosync), use that launcher, too"
        )

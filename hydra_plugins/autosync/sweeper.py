"""``hydra/sweeper=autosync``: a sweep is an Optuna study, which can be resumed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from hydra_plugins.autosync import _config
from hydra_plugins.autosync._config import SweepError, SweepInterrupted
from lightning_autosync.errors import MissingPackageError, needed_for

if TYPE_CHECKING:
    import optuna

    from hydra_plugins.autosync._space import Space
    from hydra_plugins.autosync._study import Direction

    Job = tuple[optuna.Trial, list[str]]

_log = logging.getLogger(__name__)
_config.register()


class OptunaSweeper(Sweeper):
    """Asks a study for trials, has them launched, and tells the study the results.

    Args: as `_config.OptunaSweeperConf` documents them.
    """

    def __init__(
        self,
        params: DictConfig,
        sampler: Any,
        direction: Any,
        n_trials: int | None,
        n_jobs: int,
        storage: str | None,
        study_name: str,
        max_failure_rate: float,
        metrics: Any = None,
    ) -> None:
        self._params: Any = OmegaConf.to_container(OmegaConf.create(params), resolve=True)
        self._sampler = sampler
        self._compares = direction is not None
        self._direction = direction
        self._metrics = [metrics] if isinstance(metrics, str) else list(metrics or [])
        self._n_trials = n_trials
        self._n_jobs = n_jobs
        self._storage = storage
        self._study_name = study_name
        self._max_failure_rate = max_failure_rate

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        _config.refuse_within_rank()
        self._check()  # not in the constructor, whose errors Hydra wraps
        _hide_passwords(config)
        self.config = config
        self.hydra_context = hydra_context
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def _check(self) -> None:
        """Check the settings of which Hydra does not know what is allowed, and set the directions."""
        self._directions = _directions(self._direction)
        if self._metrics and self._compares and len(self._metrics) != len(self._directions):
            raise SweepError(f"hydra.sweeper.metrics: {self._metrics}: expected {len(self._directions)} name(s)")
        for name, count in (("n_trials", self._n_trials), ("n_jobs", self._n_jobs)):
            if count is not None and count < 1:
                raise SweepError(f"hydra.sweeper.{name}: got {count}; allowed: 1 or more")

    def sweep(self, arguments: list[str]) -> None:
        try:
            with needed_for("hydra/sweeper=autosync"):
                from hydra_plugins.autosync._space import read_space
                from hydra_plugins.autosync._study import held, open_storage, write_record
        except MissingPackageError as error:
            raise SweepError(str(error)) from None

        assert self.config is not None
        assert self.hydra_context is not None
        space = read_space(self._params, arguments, self.hydra_context.config_loader)
        directory = Path(self.config.hydra.sweep.dir)
        with held(directory):
            OmegaConf.save(self.config, directory / "multirun.yaml")
            study, n_trials = self._open(space, open_storage(self._storage, directory), directory)
            try:
                for batch in self._batches(study, n_trials, directory, space if self._is_grid else None):
                    for run in _consecutive(self._composed(study, space, batch)):
                        self._run(study, run)
                        write_record(study, space, directory, self._compares)
            except KeyboardInterrupt:
                how = f"run the same command with hydra.sweep.dir={directory}"
                raise SweepInterrupted(f"interrupted; to resume, {how}") from None
            write_record(study, space, directory, self._compares)
            self._report(study, space, directory)

    @property
    def _is_grid(self) -> bool:
        return self._sampler is None or self._sampler.get("_target_") == _config.GRID

    def _open(self, space: Space, storage: Any, directory: Path) -> tuple[optuna.Study, int]:
        """The study, and its number of trials in the end."""
        import optuna

        from hydra_plugins.autosync._study import enqueue_grid, hold_to_metric, open_study

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        grid = self._is_grid
        if not grid and not self._compares:
            raise SweepError("hydra.sweeper.direction: missing; allowed: minimize, maximize, or a list of these")
        if not grid and self._n_trials is None:
            raise SweepError("hydra.sweeper.n_trials: missing; every sampler but the grid needs it")
        sampler = optuna.samplers.RandomSampler() if grid else _instantiate(self._sampler)
        study = open_study(self._study_name, storage, space, self._directions, sampler)
        hold_to_metric(study, self._compares, self._metrics)
        if study.trials:
            # With the same seed, a resumed sweep would repeat its first trials.
            sampler.reseed_rng()
        size = enqueue_grid(study, space) if grid else None
        n_trials = size if self._n_trials is None else min(self._n_trials, size or self._n_trials)
        assert n_trials is not None
        _log.info("Sweep of %d trials; to resume it after an interrupt, give hydra.sweep.dir=%s", n_trials, directory)
        return study, n_trials

    def _batches(
        self, study: optuna.Study, n_trials: int, directory: Path, grid: Space | None
    ) -> Iterator[list[optuna.Trial]]:
        """Trials to run, ``n_jobs`` at a time; interrupted ones first."""
        from hydra_plugins.autosync._study import ask, interrupted, started

        again = interrupted(study, directory, own=self._storage is None)
        while True:
            batch, again = again[: self._n_jobs], again[self._n_jobs :]
            room = min(self._n_jobs - len(batch), n_trials - started(study))
            for _ in range(room):
                if (trial := ask(study, directory, grid)) is None:
                    break
                batch.append(trial)
            if not batch:
                return
            yield batch

    def _composed(self, study: optuna.Study, space: Space, trials: list[optuna.Trial]) -> list[Job]:
        """The trials with their overrides; a trial whose configuration cannot be composed fails here.

        A launcher would raise at such a trial, and lose the results of those before it.
        """
        from hydra_plugins.autosync._study import suggest

        assert self.config is not None
        assert self.hydra_context is not None
        jobs = []
        for trial in trials:
            values = {parameter.name: suggest(trial, parameter) for parameter in space.parameters}
            overrides = space.overrides(values)
            trial.set_user_attr("overrides", overrides)
            try:
                self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
            except Exception as error:  # a file that is no YAML raises errors of its reader
                self._tell(study, trial, error, 0.0)
            else:
                jobs.append((trial, overrides))
        return jobs

    def _run(self, study: optuna.Study, jobs: list[Job]) -> None:
        begin = time.perf_counter()
        overrides = [overrides for _, overrides in jobs]
        returns: Sequence[Any]
        try:
            returns = self.launcher.launch(overrides, initial_job_idx=jobs[0][0].number)
        except Exception as error:  # a trial that is left running would be run again at every resumption
            returns = [error] * len(jobs)
        seconds = time.perf_counter() - begin
        for (trial, _), found in zip(jobs, returns, strict=True):
            trial.set_user_attr("seconds", seconds)
            self._tell(study, trial, found, seconds)

    def _tell(self, study: optuna.Study, trial: optuna.Trial, found: JobReturn | Exception, seconds: float) -> None:
        import optuna

        from hydra_plugins.autosync._table import FIGURES, figures_of

        try:
            result = _result(found)
            values = self._values(result) if self._compares else [seconds]
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except Exception as error:
            message = str(error).strip() or type(error).__name__
            trial.set_user_attr("error", f"{type(error).__name__}: {message}")
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            _log.error("Trial %d failed: %s", trial.number, message)
        else:
            try:
                trial.set_user_attr(FIGURES, figures_of(found))
            except Exception as error:  # the trial has its values
                _log.warning("Trial %d has no figures in the table: %s: %s", trial.number, type(error).__name__, error)
            study.tell(trial, values)

    def _values(self, result: Any) -> list[float]:
        """The numbers that the job returned, one a direction."""
        values, count = list(result) if isinstance(result, list | tuple) else [result], len(self._directions)
        if len(values) == count and all(hasattr(value, "__float__") for value in values):
            numbers = [float(value) for value in values]
            if not any(math.isnan(number) for number in numbers):
                return numbers
        raise SweepError(f"the job returned {result!r}; hydra.sweeper.direction needs {count} number(s)")

    def _report(self, study: optuna.Study, space: Space, directory: Path) -> None:
        """Print the table of all trials, log the best ones, and fail if too many failed."""
        from optuna.trial import TrialState

        from hydra_plugins.autosync._study import of_sweep
        from hydra_plugins.autosync._table import sweep_table
        from lightning_autosync.cli.tables import table_console

        table_console().print(sweep_table(study, space, self._compares))
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if self._compares and complete:
            for best in study.best_trials:
                _log.info("Best: trial %d, %s: %s", best.number, best.values, " ".join(best.user_attrs["overrides"]))
        failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        finished = sum(trial.state.is_finished() for trial in of_sweep(study))
        _log.info("%s", directory / "result.json")
        if failed and len(failed) > self._max_failure_rate * finished:
            lines = [f"  trial {trial.number}: {trial.user_attrs.get('error', 'unknown')}" for trial in failed]
            raise SweepError("\n".join([f"{len(failed)} of {finished} trials failed:", *lines]))


def _hide_passwords(config: DictConfig) -> None:
    """Move an address with a password to the environment: configs are written to files and command lines."""
    sweeper: Any = OmegaConf.to_container(config.hydra.sweeper)
    storage = sweeper.get("storage")
    given: Any = OmegaConf.to_container(config.hydra.overrides.hydra)  # with interpolations
    if not any("://" in text for text in (str(storage), *given)):
        return
    from lightning_autosync.search.passwords import has_password, hide_passwords, with_hidden_password

    with open_dict(config.hydra):
        config.hydra.overrides.hydra = hide_passwords(given)
        if has_password(storage):
            config.hydra.sweeper.storage = with_hidden_password(storage)


def _directions(direction: Any) -> list[Direction]:
    if direction is None:
        return ["minimize"]
    given: list[Any] = list(direction) if isinstance(direction, ListConfig | list) else [direction]
    allowed = ("minimize", "maximize")
    for name in given or [direction]:
        if name not in allowed:
            from lightning_autosync.documents import unknown_name  # late, since Hydra loads this in all its programs

            raise SweepError(f"hydra.sweeper.direction: '{name}' is {unknown_name(name, allowed)}, or a list of these")
    return given


def _instantiate(sampler: Any) -> Any:
    from hydra.utils import instantiate
    from optuna.samplers import BaseSampler

    made = instantiate(sampler)
    if not isinstance(made, BaseSampler):
        raise SweepError(f"hydra.sweeper.sampler: {sampler.get('_target_')} is not an Optuna sampler")
    return made


def _consecutive(jobs: list[Job]) -> Iterator[list[Job]]:
    """Jobs in runs of trials with consecutive numbers, because launchers count on from the first number."""
    run: list[Job] = []
    for trial, overrides in jobs:
        if run and trial.number != run[-1][0].number + 1:
            yield run
            run = []
        run.append((trial, overrides))
    if run:
        yield run


def _result(found: JobReturn | Exception) -> Any:
    """A job's return value.

    Raises:
        Exception: that the job raised.
    """
    if isinstance(found, Exception):
        raise found
    if found.status is not JobStatus.COMPLETED:
        raised = found._return_value
        raise raised if isinstance(raised, Exception) else RuntimeError("the job ended without a result")
    return found.return_value

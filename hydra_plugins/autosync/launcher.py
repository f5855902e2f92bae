"""``hydra/launcher=autosync_torchrun``: every trial is a torchrun job of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hydra_plugins.autosync import _config

_log = logging.getLogger(__name__)
_config.register()

LOG = "torchrun.log"
_OWN = ("hydra.mode", "hydra.run", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper")
"""Prefixes of overrides that concern the sweep, not a job."""


class TorchrunError(RuntimeError):
    """A torchrun job failed; the message says on which ranks and why."""


class TorchrunLauncher(Launcher):
    """Runs one job after another, each by a fresh torchrun that starts this application with the job's overrides.

    Args: as `_config.TorchrunLauncherConf` documents them.
    """

    def __init__(self, nproc_per_node: int, program: Sequence[str] | None, arguments: Sequence[str]) -> None:
        self._processes = nproc_per_node
        self._program = None if program is None else list(program)
        self._arguments = list(arguments)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        _config.refuse_within_rank()
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        assert self.config is not None
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        return [self._job(list(job), initial_job_idx + place) for place, job in enumerate(job_overrides)]

    def _job(self, overrides: list[str], number: int) -> JobReturn:
        _log.info("#%d by torchrun : %s", number, " ".join(filter_overrides(overrides)))
        config = self._compose(overrides, number)
        directory = _job_directory(config)
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("rank_*.json"):
            path.unlink()  # of a run of this trial that was interrupted
        done = JobReturn(overrides=overrides, cfg=config, working_dir=str(directory), task_name=config.hydra.job.name)
        try:
            self._execute(self._command(overrides, number, directory), directory)
            done.return_value = read_reports(directory, self._processes)
            done.status = JobStatus.COMPLETED
        except TorchrunError as error:
            done.return_value = error
            done.status = JobStatus.FAILED
        return done

    def _compose(self, overrides: list[str], number: int) -> DictConfig:
        assert self.hydra_context is not None
        assert self.config is not None
        config: DictConfig = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        return config

    def _command(self, overrides: list[str], number: int, directory: Path) -> list[str]:
        assert self.config is not None
        # With their interpolations, which the job resolves.
        given: Any = OmegaConf.to_container(self.config.hydra.overrides.hydra)
        kept = [str(line) for line in given if not str(line).startswith(_OWN)]
        report = "++hydra.callbacks.autosync_report"
        line = [
            *overrides,
            *kept,
            "hydra.mode=RUN",
            f"hydra.run.dir='{directory}'",
            f"++hydra.job.num={number}",
            f"++hydra.job.id={number}",
            f"{report}._target_=hydra_plugins.autosync._job.RankReport",
            f"{report}.directory='{directory}'",
        ]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._processes}"]
        program = self._program if self._program is not None else program_words()
        return [sys.executable, *launch, *self._arguments, *program, *_flags(self.config), *line]

    def _execute(self, command: list[str], directory: Path) -> None:
        """Run torchrun to its end. An exception here, by a signal too, ends it and its processes."""
        from hydra_plugins.autosync._job import run

        with (directory / LOG).open("wb") as log:
            status = run(command, {"OMP_NUM_THREADS": "1", **os.environ}, log)
        if status:
            raise TorchrunError(describe_failure(directory, self._processes, status))


def _job_directory(config: DictConfig) -> Path:
    """The directory of a job. Its name may depend on the job's own configuration."""
    known = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(config)
        return Path(config.hydra.sweep.dir, config.hydra.sweep.subdir).absolute()
    finally:
        HydraConfig.instance().cfg = known


def program_words() -> list[str]:
    """The words that start this application again, without overrides."""
    specification = sys.modules["__main__"].__spec__
    if specification is not None:
        return ["-m", specification.name.removesuffix(".__main__")]
    return [os.path.abspath(sys.argv[0])]


def _flags(config: DictConfig) -> list[str]:
    """The options of this process that say where Hydra finds configs."""
    from hydra._internal.utils import get_args_parser

    given, _ = get_args_parser().parse_known_args(sys.argv[1:])
    names = {"--config-path": given.config_path, "--config-name": given.config_name, "--config-dir": given.config_dir}
    return [word for name, value in names.items() if value is not None for word in (name, str(value))]


def read_reports(directory: Path, processes: int) -> Any:
    """What rank 0's job returned, if every rank ended well.

    Raises:
        TorchrunError: a rank failed, or ended without a report.
    """
    reports = _reports(directory)
    if len(reports) < processes or any(report["status"] != "COMPLETED" for report in reports.values()):
        raise TorchrunError(describe_failure(directory, processes, 0))
    return reports[0]["return_value"]


def describe_failure(directory: Path, processes: int, status: int) -> str:
    """Which ranks failed, and why."""
    reports = _reports(directory)
    said = [
        f"rank {rank}: {report['error']}" for rank, report in sorted(reports.items()) if report["status"] == "FAILED"
    ]
    silent = [rank for rank in range(processes) if rank not in reports]
    if silent:
        said.append(f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} ended without a report")
    return f"torchrun ended with {status}: {'; '.join(said)}; output in {directory / LOG}"


def _reports(directory: Path) -> dict[int, dict[str, Any]]:
    paths = {int(path.stem.removeprefix("rank_")): path for path in directory.glob("rank_*.json")}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items()}

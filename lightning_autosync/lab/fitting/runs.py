"""The file of a comparison's runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from lightning_autosync.documents import PLAIN, Index, Spent, digest
from lightning_autosync.lab.fitting.accuracy import Accuracy
from lightning_autosync.lab.fitting.settings import Settings
from lightning_autosync.learned.dataset.parts import load_manifest
from lightning_autosync.learned.simulator import read_header
from lightning_autosync.replay import Constants
from lightning_autosync.run_files import RunFile

FORMAT = "autosync-fit-runs/1"


@dataclass(frozen=True)
class Run:
    """One simulator on one division.

    Attributes:
        split: how samples were divided.
        division: its number, from 0 on; its networks are of the base seed and so many.
        simulator: its kind.
        unseen: clusters and families that only the test part has.
        accuracy: on the test part.
        seconds: of training.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    split: str
    division: Index
    simulator: str
    unseen: tuple[str, ...]
    accuracy: Accuracy
    seconds: Spent

    @property
    def key(self) -> tuple[str, int, str]:
        """Which of the runs it is."""
        return self.split, self.division, self.simulator


def run_file(path: Path, settings: Settings, constants: Constants) -> RunFile[Run]:
    """The file of a comparison's runs.

    Args:
        path: of the file.
        settings: of the fit.
        constants: of the hosts.

    Raises:
        DocumentError: its runs are of other samples or simulators, or it is something else.
    """
    parts = [part.sha256 for folder in settings.dataset for part in load_manifest(Path(folder)).parts]
    common = {
        "dataset": digest(parts),
        "start": settings.start and read_header(settings.start).weights,
        "seed": settings.seed,
        "constants": constants.to_dict(),
        **{f"simulator {kind}": settings.simulators[kind].model_dump(mode="json") for kind in settings.compare},
    }
    return RunFile(path, FORMAT, "a comparison of simulators", common, Run)

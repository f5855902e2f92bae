"""Defaults of settings stand in the classes; files in ``conf/`` repeat them for the help texts, and must agree."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel

from lightning_autosync.cli.application import VERBS
from lightning_autosync.cli.cache import CacheSettings
from lightning_autosync.cli.predict import PredictSettings
from lightning_autosync.cli.report import ReportSettings
from lightning_autosync.cli.serve import ServeSettings
from lightning_autosync.cluster import configuration_directory
from lightning_autosync.lab.collection.settings import CollectionSettings
from lightning_autosync.lab.convergence.settings import ConvergenceSettings
from lightning_autosync.lab.fitting.splits import FitSettings
from lightning_autosync.lab.rehearsal.settings import RehearsalSettings
from lightning_autosync.lab.validation.settings import ValidationSettings
from lightning_autosync.learned import SimulatorSettings
from lightning_autosync.learned.ensemble import KINDS
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.launches.settings import LaunchSettings, RaySettings, SlurmSettings, TorchrunSettings
from lightning_autosync.measure.probe.settings import ProbeSettings
from lightning_autosync.search.tuning.settings import ParallelSettings, SearchSettings, TuningSettings
from lightning_autosync.training.settings import Synchronization, TrainingSettings

SETTINGS: dict[str, type[BaseModel]] = {
    "bench": BenchSettings,
    "cache": CacheSettings,
    "collect": CollectionSettings,
    "converge": ConvergenceSettings,
    "fit": FitSettings,
    "predict": PredictSettings,
    "probe": ProbeSettings,
    "rehearse": RehearsalSettings,
    "report": ReportSettings,
    "serve": ServeSettings,
    "train": TrainingSettings,
    "tune": TuningSettings,
    "validate": ValidationSettings,
}
GROUPS: dict[str, type[BaseModel]] = {
    "launch": LaunchSettings,
    "launch/ray": RaySettings,
    "launch/slurm": SlurmSettings,
    "launch/torchrun": TorchrunSettings,
    "parallel": ParallelSettings,
    "search": SearchSettings,
    "simulator": SimulatorSettings,
    "sync": Synchronization,
}
"""Classes of the groups whose files repeat defaults, or of single files."""
CHOICES = {"kind", "sampler", "strategy", "plan", "semantics"}
"""Keys in which the files of a group differ."""
MEANT = {
    "search/autosync.options": "refined plans are no points of the space, so AutoSyncSampler alone makes none",
    "search/horovod.baselines": "builders are no points of its space",
    "converge.steps": "a class that has steps and limit cannot choose between them",
    "rehearse.options": "refining is what the contest is about",
    "train.trainer": "arguments of Lightning's Trainer, whose defaults are Lightning's",
}
"""Keys whose default is that of the command line alone, and why."""


def _files(group: str) -> list[str]:
    return sorted(f"{group}/{path.stem}" for path in (configuration_directory() / group).glob("*.yaml"))


def test_every_verb_is_checked() -> None:
    assert SETTINGS.keys() == set(VERBS)


@pytest.mark.parametrize("verb", SETTINGS)
def test_defaults_of_files_are_those_of_classes(verb: str) -> None:
    data: Any = OmegaConf.to_container(OmegaConf.load(configuration_directory() / f"{verb}.yaml"))
    given = {name: value for name, value in data.items() if name not in ("defaults", "hydra") and value != "???"}
    differing = dict(_differing(SETTINGS[verb], given, verb))
    assert differing.keys() == {key for key in MEANT if key.startswith(f"{verb}.")}, differing


@pytest.mark.parametrize("path", [path for group in GROUPS if "/" not in group for path in _files(group)])
def test_a_file_of_a_group_sets_nothing_but_its_choice(path: str) -> None:
    kind = GROUPS.get(path) or GROUPS[path.partition("/")[0]]
    data: Any = OmegaConf.to_container(OmegaConf.load(configuration_directory() / f"{path}.yaml"))
    chosen = {name: value for name, value in data.items() if name in CHOICES}
    network = data.pop("network", {})  # its defaults are those of the kind
    assert not network or KINDS[data["kind"]].sized(network) == KINDS[data["kind"]].sized({})
    full, short = (kind.model_validate(values).model_dump() for values in (data, chosen))
    differing = {f"{path}.{name}" for name, value in full.items() if value != short[name]}
    assert differing == {key for key in MEANT if key.startswith(f"{path}.")}


def _differing(kind: type[BaseModel], given: dict[str, Any], where: str) -> Any:
    """Keys of a mapping whose values are other than the defaults of the class, with both."""
    for name, value in given.items():
        field = kind.model_fields.get(name)
        if field is None or field.is_required():
            continue
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel) and isinstance(value, dict):
            yield from _differing(type(default), value, f"{where}.{name}")
        elif _plain(default) != _plain(value):
            yield f"{where}.{name}", (value, default)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

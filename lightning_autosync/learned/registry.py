"""All simulators by name, and the config group ``simulator``: kind, sizes and training settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import Field, PositiveInt, field_validator, model_validator
from typing_extensions import Self

from lightning_autosync.cluster import ClusterSpec, configuration_directory
from lightning_autosync.documents import Record, read_data, unknown_name
from lightning_autosync.learned.ensemble import KINDS, LearnedEstimator
from lightning_autosync.learned.networks import load_dgl
from lightning_autosync.learned.pretrained import PRETRAINED, choose_pretrained
from lightning_autosync.learned.simulator import HEADER, ReplayEstimator, Simulator, SimulatorError, read_header
from lightning_autosync.learned.training import MEMBERS, TUNING, Training, first_training
from lightning_autosync.replay import Constants
from lightning_autosync.workload import Workload

SIMULATORS: dict[str, Callable[..., Simulator]] = {
    ReplayEstimator.KIND: ReplayEstimator,
    **{name: partial(LearnedEstimator, name) for name in KINDS},
}
"""Simulators by name. All take ``constants``; the learned ones also take the arguments of `LearnedEstimator`."""


def load_simulator(directory: str | os.PathLike[str]) -> Simulator:
    """Read a simulator of any kind.

    Raises:
        SimulatorError: there is none, it has another format version, is damaged, or is of an unknown kind.
    """
    kind = read_header(directory).kind
    if kind not in SIMULATORS:
        raise SimulatorError(f"{os.path.join(directory, HEADER)}: kind: '{kind}' is {unknown_name(kind, SIMULATORS)}")
    return ReplayEstimator.load(directory) if kind == ReplayEstimator.KIND else LearnedEstimator.load(directory)


class SimulatorSettings(Record):
    """Settings of a simulator; see :class:`~lightning_autosync.learned.LearnedEstimator`.

    Attributes:
        kind: name of the simulator; or ``pretrained``, which has no further settings.
        members: number of networks in its ensemble; missing fields have the defaults of `LearnedEstimator`.
        network: sizes of the networks, by the kind's own names (`lightning_autosync.learned.networks`); missing ones
            have their defaults.
        training, tuning: settings of the first fit and of later fits; ``sharpness`` only with ``hetero``.
    """

    kind: str
    members: PositiveInt = MEMBERS
    network: dict[str, Any] = Field(default_factory=dict)
    training: Training = Training()
    tuning: Training = TUNING

    @model_validator(mode="before")
    @classmethod
    def _complete_training(cls, data: Any) -> Any:
        """Missing settings of the first fit are those of the kind."""
        if not isinstance(data, dict) or data.get("kind") not in KINDS:
            return data
        given = data.get("training", {})
        if not isinstance(given, dict):
            return data
        return data | {"training": first_training(data["kind"]).model_dump() | given}

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        return kind if kind == PRETRAINED else check_kind(kind)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == PRETRAINED and (further := sorted(self.model_fields_set - {"kind"})):
            raise ValueError(f"{further[0]}: not allowed with '{PRETRAINED}', which is fitted; leave it out")
        if self.kind not in KINDS:
            if self.network:
                raise ValueError(f"network: '{self.kind}' is not a neural network; leave it out")
            return self
        KINDS[self.kind].sized(self.network)
        for name, settings in (("training", self.training), ("tuning", self.tuning)):
            if settings.sharpness != Training().sharpness and not KINDS[self.kind].CORRECTS:
                raise ValueError(f"{name}.sharpness: not allowed with '{self.kind}'; leave it out")
        return self

    @classmethod
    def shipped(cls, kind: str) -> SimulatorSettings:
        """The settings of this name in ``conf/simulator``."""
        return cls.model_validate(read_data(configuration_directory() / "simulator" / f"{kind}.yaml"))

    def build(self, constants: Constants, seed: int) -> Simulator:
        """An untrained simulator with these settings.

        Raises:
            SimulatorError: it is the pretrained simulator.
        """
        if self.kind == PRETRAINED:
            raise SimulatorError(f"simulator.kind: '{PRETRAINED}' is fitted; allowed: {', '.join(SIMULATORS)}")
        if self.kind == "replay":
            return SIMULATORS["replay"](constants)
        return SIMULATORS[self.kind](constants, self.members, dict(self.network), self.training, self.tuning, seed)

    def for_job(self, workload: Workload, cluster: ClusterSpec, constants: Constants, seed: int) -> Simulator:
        """The simulator for a job on a cluster whose rates are known: `choose_pretrained`, or else `build`.

        Raises:
            SimulatorError: its training needs DGL, which cannot be loaded. The job would train it only after trials.
        """
        if self.kind == PRETRAINED:
            return choose_pretrained(workload, cluster, constants)
        if self.kind in KINDS and KINDS[self.kind].TRAINED_BY_DGL:
            load_dgl()
        return self.build(constants, seed)


def check_kind(kind: str) -> str:
    """Return ``kind`` if it is the name of a simulator.

    Raises:
        ValueError: there is no such simulator.
    """
    if kind not in SIMULATORS:
        raise ValueError(f"'{kind}' is {unknown_name(kind, SIMULATORS)}")
    return kind

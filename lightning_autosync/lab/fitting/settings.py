"""What ``autosync fit`` is told: samples, a simulator, and on which splits to judge it beside the others."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from lightning_autosync.documents import Configuration, Index
from lightning_autosync.learned import SIMULATORS
from lightning_autosync.learned.registry import SimulatorSettings, check_kind

SplitName = Literal["trial", "cluster", "model", "both"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


class Settings(Configuration):
    """One run of ``autosync fit``.

    Attributes:
        dataset: parts of a dataset, or folders of them.
        simulator: what is fitted to the whole dataset and saved; each of its networks is kept from some samples, by
            which its epoch is chosen.
        start: folder of a fitted simulator to train further, by ``simulator.tuning``, in place of an untrained one; its
            members and sizes are its own. None for none.
        constants: file of the hosts' constants, from a probe; None takes the defaults on ``cores``.
        cores: cores that all ranks of a sample shared; None takes those that the dataset names. Only without
            ``constants``.
        compare: simulators that are judged side by side; none skips it.
        splits: how samples are divided: ``trial`` keeps plans for the test, ``cluster`` whole clusters, ``model`` whole
            families of models, ``both`` what is on such a cluster and of such a family.
        seeds: divisions of each kind, each with networks of its own. Their tests are the blocks of a cross-validation:
            a plan, cluster or family is tested once before any is tested again (see `divide`).
        seed: by which plans, clusters and families are shuffled, and of the networks of the first division.
        processes: that encode samples and train; None takes one a core.
        runs: file of the comparison's runs, to read and to go on with; None takes ``runs.jsonl`` in the run directory.
    """

    dataset: Annotated[tuple[str, ...], Field(min_length=1)]
    simulator: SimulatorSettings
    start: str | None = None
    constants: str | None = None
    cores: PositiveFloat | None = None
    compare: tuple[str, ...] = ("replay", "linear", "recurrent", "attention", "hetero")
    splits: tuple[SplitName, ...] = SPLITS
    seeds: PositiveInt = 5
    seed: Index = 0
    processes: PositiveInt | None = None
    runs: str | None = None

    @property
    def simulators(self) -> dict[str, SimulatorSettings]:
        """Those that can be compared, by kind: as shipped, but for the one that is fitted."""
        return {kind: SimulatorSettings.shipped(kind) for kind in SIMULATORS} | {self.simulator.kind: self.simulator}

    @field_validator("dataset", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("compare")
    @classmethod
    def _check_compare(cls, compare: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_kind(kind) for kind in compare)

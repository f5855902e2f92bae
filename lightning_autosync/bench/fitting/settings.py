"""What ``autosync fit`` is told: samples, a simulator, and on which splits to judge it beside the others."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator
from typing_extensions import Self

from lightning_autosync.cluster import configuration_directory
from lightning_autosync.documents import Configuration, Index, Record, read_data
from lightning_autosync.simulator import Constants
from lightning_autosync.simulator.learned import SIMULATORS, Simulator, Training
from lightning_autosync.simulator.learned.kinds import KINDS
from lightning_autosync.simulator.learned.training import TUNING

SplitName = Literal["trial", "cluster", "model", "both"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


class SimulatorSettings(Record):
    """A simulator; see :class:`~lightning_autosync.simulator.learned.LearnedEstimator`.

    Attributes:
        kind: its name.
        members: networks of its ensemble.
        network: their sizes, by the kind's own names (`lightning_autosync.simulator.learned.sizes`); what is left out
            is at its default.
        training, tuning: how it is trained at first, and further; ``sharpness`` only with ``hetero``.
    """

    kind: str
    members: PositiveInt = 1
    network: dict[str, Any] = Field(default_factory=dict)
    training: Training = Training()
    tuning: Training = TUNING

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        return _known(kind)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind not in KINDS:
            if self.network:
                raise ValueError(f"network: '{self.kind}' is no network; leave it out")
            return self
        KINDS[self.kind].sized(self.network)
        for name, settings in (("training", self.training), ("tuning", self.tuning)):
            if settings.sharpness != Training().sharpness and not KINDS[self.kind].corrects:
                raise ValueError(f"{name}.sharpness: the ranking loss of '{self.kind}' takes none; leave it out")
        return self

    @classmethod
    def shipped(cls, kind: str) -> SimulatorSettings:
        """The option of ``conf/simulator`` of that name."""
        return cls.model_validate(read_data(configuration_directory() / "simulator" / f"{kind}.yaml"))

    def build(self, constants: Constants, seed: int) -> Simulator:
        """The simulator, which knows nothing yet."""
        if self.kind == "replay":
            return SIMULATORS["replay"](constants)
        return SIMULATORS[self.kind](constants, self.members, dict(self.network), self.training, self.tuning, seed)


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
        return tuple(_known(kind) for kind in compare)


def _known(kind: str) -> str:
    if kind not in SIMULATORS:
        raise ValueError(f"'{kind}' is not known; allowed: {', '.join(SIMULATORS)}")
    return kind

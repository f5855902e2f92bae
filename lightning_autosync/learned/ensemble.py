"""`LearnedEstimator`: an ensemble of networks of one kind, as an `Estimator`."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Count, Index, Record, describe_validation_error, unknown_name
from lightning_autosync.errors import needed_for
from lightning_autosync.learned.context import Context, Contexts
from lightning_autosync.learned.dataset.sample import Sample
from lightning_autosync.learned.examples import Examples, Keys
from lightning_autosync.learned.hetero import HeteroNetwork
from lightning_autosync.learned.networks import AttentionNetwork, LinearNetwork, RecurrentNetwork, SimulatorNetwork
from lightning_autosync.learned.plan_arrays import plan_arrays
from lightning_autosync.learned.simulator import (
    HEADER,
    Estimate,
    Header,
    SimulatorError,
    read_header,
    read_weights,
    write_simulator,
)
from lightning_autosync.learned.training import MEMBERS, TUNING, Training, first_training, scores, train
from lightning_autosync.plan import SyncPlan
from lightning_autosync.replay.constants import Constants
from lightning_autosync.workload import Workload

with needed_for("A learned simulator"):
    from safetensors import SafetensorError
    from safetensors.torch import load, save

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]

KINDS: dict[str, type[SimulatorNetwork]] = {
    network.KIND: network for network in (LinearNetwork, RecurrentNetwork, AttentionNetwork, HeteroNetwork)
}
"""Network classes by name."""
MOST_MEMBERS, MOST_FEATURES = 64, 4096
"""Largest numbers of networks and of features per input in a saved ensemble."""
_MOST = 16384
"""Number of cached encoded plans, of about 20 kilobytes each: enough for a whole dataset, which training revisits."""
_OBSERVED = 2048
"""Number of samples from which the scale of features is computed."""
_LINES = "lines"
"""Name of the saved tensor [members, 2] of slopes and offsets."""


class EnsembleDescription(Record):
    """The saved description of an ensemble: the arguments of `LearnedEstimator`, and what its networks take.

    Attributes:
        features: number of features of each input.
        encoding: digest of the encoding of plans, see `SimulatorNetwork.encoding`; None in files of earlier releases.
    """

    members: Annotated[Count, Field(le=MOST_MEMBERS)]
    network: dict[str, Any]
    features: dict[str, Annotated[Count, Field(le=MOST_FEATURES)]]
    training: Training
    tuning: Training
    seed: Index
    encoding: str | None = None


class LearnedEstimator:
    """A deep ensemble (Lakshminarayanan et al., 2017): networks with different initial weights and sample orders.

    Before the first fit, an ensemble that corrects the replay predicts the replay's times.

    Args:
        kind: ``linear``, ``recurrent``, ``attention`` or ``hetero``.
        constants: costs of the hosts, for the replay; None takes the defaults.
        members: number of networks.
        network: sizes of a network, by the kind's own names.
        training: settings of the first `fit`.
        tuning: settings of `fit` after an earlier fit or a load. By default only the heads are trained, which takes
            about a second for some hundred samples.

    Raises:
        SimulatorError: there is no such kind, or the sizes are wrong.
    """

    def __init__(
        self,
        kind: str = "hetero",
        constants: Constants | None = None,
        members: int = MEMBERS,
        network: Mapping[str, Any] | None = None,
        training: Training | None = None,
        tuning: Training | None = None,
        seed: int = 0,
    ) -> None:
        if kind not in KINDS:
            raise SimulatorError(f"simulator: '{kind}' is {unknown_name(kind, ('replay', *KINDS))}")
        self.kind = KINDS[kind]
        self.constants = constants or Constants()
        self.members = members
        try:
            self.sizes = self.kind.sized(network or {})
        except SimulatorError as error:
            raise SimulatorError(f"simulator '{kind}': {error}") from None
        self.training = training or first_training(kind)
        self.tuning = tuning or TUNING
        self.seed = seed
        self.networks: list[SimulatorNetwork] = []
        self._features: dict[str, int] = {}
        self._lines = numpy.tile([1.0, 0.0], (members, 1))
        self._contexts = Contexts(self.constants)
        self._encoded: OrderedDict[tuple[str, str, SyncPlan], tuple[Any, float]] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> LearnedEstimator:
        """A copy with its own networks that shares the caches of contexts and encoded plans."""
        made = object.__new__(type(self))
        memo |= {id(self): made, id(self._encoded): self._encoded, id(self._contexts): self._contexts}
        made.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return made

    @property
    def is_fitted(self) -> bool:
        """Whether it was fitted or loaded. A search does not train such a simulator further."""
        return bool(self.networks)

    def estimate(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Estimate:
        """Estimate step times: the mean and the standard deviation of the networks' logarithms."""
        key = workload.fingerprint, cluster.fingerprint
        context = self._contexts.of(workload, cluster, key)
        found = [self._encode(context, key, plan) for plan in plans]
        return self.estimate_encoded([item for item, _ in found], numpy.array([base for _, base in found]))

    def estimate_encoded(self, items: Sequence[Any], base: Floats) -> Estimate:
        """The same for encoded plans; ``base`` [plans] has the logarithms of seconds to which the networks add."""
        if not self.networks or not len(items):
            return Estimate(numpy.exp(base), numpy.zeros(len(base)))
        answers = numpy.stack([scores(network, items) for network in self.networks])
        values = base + self._lines[:, :1] * answers + self._lines[:, 1:]
        return Estimate(numpy.exp(values.mean(axis=0)), values.std(axis=0))

    def fit(self, samples: Sequence[Sample]) -> None:
        """Train on measured plans; networks that were fitted or loaded before are tuned."""
        if samples:
            self.fit_encoded(self.encode(samples))

    def fit_encoded(self, examples: Examples, held_out: Sequence[Integers] = ()) -> None:
        """The same for encoded samples.

        Args:
            examples: the samples.
            held_out: parts of the samples, each an array of indices. Networks use the parts in turn: each holds one
                part out and chooses its epoch by it. So the ensemble as a whole learns from all samples, and its
                members disagree where the parts do. Without parts every network learns from all samples and keeps its
                last epoch.
        """
        settings = self.tuning if self.networks else self.training
        if not self.networks:
            self._features = self.kind.features(examples.items[0])
            self._build()
            self._observe(examples)
        for number, network in enumerate(self.networks):
            seed = self.seed * self.members + number
            learned, validation = _hold_out(examples, held_out[number % len(held_out)] if held_out else None)
            with _seeded(seed):
                train(network, learned, settings, seed, validation)
            if not self.kind.REGRESSION:
                found = scores(network, learned.items)
                self._lines[number] = _line(found, learned.target - learned.base)

    def _observe(self, examples: Examples) -> None:
        """Set the scale of the networks' inputs from a random subset of the samples."""
        random = numpy.random.default_rng(self.seed)
        drawn = random.permutation(len(examples))[:_OBSERVED]
        batch = self.kind.collate([examples.items[place] for place in drawn])
        for network in self.networks:
            network.observe(batch)

    def encode(self, samples: Sequence[Sample]) -> Examples:
        """Encode samples for this kind of network; encoded plans are cached."""
        keys = Keys()
        found = [
            self._encode(
                self._contexts.of(sample.workload, sample.cluster, keys.of(sample)), keys.of(sample), sample.plan
            )
            for sample in samples
        ]
        return Examples.of(samples, [item for item, _ in found], [base for _, base in found])

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``simulator.json`` and its file of weights into a directory.

        Raises:
            SimulatorError: it was not fitted yet.
        """
        if not self.networks:
            raise SimulatorError(f"simulator '{self.kind.KIND}': not fitted yet, so there is nothing to save")
        weights = save({name: tensor.contiguous() for name, tensor in self._tensors().items()})
        write_simulator(directory, self.kind.KIND, self.constants, self._description.model_dump(mode="json"), weights)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> LearnedEstimator:
        """Read what `save` wrote.

        Raises:
            SimulatorError: it is not a simulator, has another format version, is damaged, or its weights do not fit.
        """
        header = read_header(directory)
        made = cls._described(header, Path(directory) / HEADER)
        path, content = read_weights(directory, header)
        what = ""
        try:
            made._build(len(content))
            what = "these are not the weights of this simulator: "
            _fill(made._tensors(), content)
        except SimulatorError as error:
            raise SimulatorError(f"{path}: {what}{error}") from None
        return made

    @classmethod
    def _described(cls, header: Header, path: Path) -> LearnedEstimator:
        """An estimator, without networks, from a header that was read from ``path``."""
        if header.kind not in KINDS:
            raise SimulatorError(f"{path}: kind: expected one of {', '.join(KINDS)}; got '{header.kind}'")
        inputs = KINDS[header.kind].INPUTS
        try:
            description = EnsembleDescription.model_validate(header.settings)
            KINDS[header.kind].sized(description.network)
        except ValidationError as error:
            raise SimulatorError(f"{path}: settings.{describe_validation_error(error)}") from None
        except SimulatorError as error:
            raise SimulatorError(f"{path}: settings.{error}") from None
        if set(description.features) != set(inputs):
            found = ", ".join(description.features) or "none"
            raise SimulatorError(f"{path}: settings.features: '{header.kind}' needs {', '.join(inputs)}; got {found}")
        own = KINDS[header.kind].encoding()
        if description.encoding is not None and description.encoding != own:
            raise SimulatorError(
                f"{path}: settings.encoding: expected '{own}', got '{description.encoding}': the simulator was fitted "
                "by a release that encodes plans in another way; fit it again"
            )
        made = cls(
            header.kind,
            header.constants,
            description.members,
            description.network,
            description.training,
            description.tuning,
            description.seed,
        )
        made._features = description.features
        return made

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All learned tensors by name, without copies."""
        tensors = {
            f"{number}.{name}": tensor
            for number, network in enumerate(self.networks)
            for name, tensor in network.state_dict().items()
        }
        return {**tensors, _LINES: torch.from_numpy(self._lines)}

    @property
    def _description(self) -> EnsembleDescription:
        return EnsembleDescription(
            members=self.members,
            network=self.sizes.model_dump(mode="json"),
            features=self._features,
            training=self.training,
            tuning=self.tuning,
            seed=self.seed,
            encoding=self.kind.encoding(),
        )

    def _build(self, available: int | None = None) -> None:
        """Make the networks with random weights.

        Raises:
            SimulatorError: the networks need more than ``available`` bytes. It is raised after the first network, so
                that a wrong description cannot exhaust the memory.
        """
        self.networks = []
        for number in range(self.members):
            with _seeded(self.seed * self.members + number):
                self.networks.append(self.kind.build(self._features, self.sizes))
            if available is not None and (needed := self.members * _bytes(self.networks[0])) > available:
                raise SimulatorError(f"has {available} bytes, but {self.members} networks of these sizes need {needed}")

    def _encode(self, context: Context, key: tuple[str, str], plan: SyncPlan) -> tuple[Any, float]:
        """An encoded plan, and the logarithm of the seconds to which the networks add."""
        whole = (*key, plan)
        if whole not in self._encoded:
            found = plan_arrays(context, plan)
            self._encoded[whole] = self.kind.encode(found), self.kind.base(found)
            if len(self._encoded) > _MOST:
                self._encoded.popitem(last=False)
        self._encoded.move_to_end(whole)
        return self._encoded[whole]


def _bytes(network: SimulatorNetwork) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())


def _fill(own: Mapping[str, torch.Tensor], content: bytes) -> None:
    """Fill tensors from the bytes of a safetensors file.

    Raises:
        SimulatorError: names, shapes or types of the tensors differ, or some numbers are not finite.
    """
    try:
        found = load(content)
    except (SafetensorError, KeyError) as error:  # KeyError: the file has a dtype that torch lacks
        raise SimulatorError(str(error).strip().partition("\n")[0]) from None
    if wrong := sorted(own.keys() ^ found.keys()):
        raise SimulatorError(f"{wrong[0]}: {'missing' if wrong[0] in own else 'unknown'}")
    for name, tensor in own.items():
        given = found[name]
        if (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
            raise SimulatorError(f"{name}: expected {_form(tensor)}, got {_form(given)}")
        if not given.isfinite().all():
            raise SimulatorError(f"{name}: not all numbers are finite")
        tensor.copy_(given)


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _hold_out(examples: Examples, part: Integers | None) -> tuple[Examples, Examples | None]:
    """The examples that a network learns from, and those that choose its epoch."""
    if part is None:
        return examples, None
    return examples.part(numpy.setdiff1d(numpy.arange(len(examples)), part)), examples.part(part)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch within the block and restore the caller's random state afterwards.

    Networks are made and trained on the CPU, so the generators of other devices stay untouched.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _line(scores: Floats, wanted: Floats) -> Floats:
    """[2] slope (at least 0) and offset of the least-squares line from scores to ``wanted``."""
    variance = float(scores.var())
    slope = max(0.0, float(numpy.cov(scores, wanted, ddof=0)[0, 1]) / variance) if variance > 0 else 0.0
    return numpy.array([slope, float(wanted.mean() - slope * scores.mean())])

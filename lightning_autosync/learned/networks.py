"""The networks of AutoSync's three simulators (NeurIPS 2020): linear, recurrent over variables, graph attention."""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from torch import nn

from lightning_autosync.documents import Count, Record, describe_validation_error, digest
from lightning_autosync.learned.plan_arrays import COMPRESSORS, PlanArrays
from lightning_autosync.learned.predefined import ShardSet, predefined, shard_set
from lightning_autosync.learned.simulator import SimulatorError
from lightning_autosync.plan.topologies import MODES

_LEAST, _BELOW = (1, 1, 3), (2,)
"""First supported version of DGL, and first version that is no longer supported."""


def load_dgl() -> ModuleType:
    """Import the module ``dgl`` with its torch backend.

    Raises:
        SimulatorError: it is not installed, cannot be loaded, or has an unsupported version.
    """
    # Without this variable DGL writes a configuration file into the home directory and prints a message.
    os.environ.setdefault("DGLBACKEND", "pytorch")
    try:
        import dgl
    # DGL searches for its library itself (RuntimeError if it finds none) and opens it by ctypes (OSError).
    except (ImportError, RuntimeError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise _refusal(f"cannot be imported ({why})") from None
    module: ModuleType = dgl
    version = str(getattr(module, "__version__", "unknown"))
    if not _LEAST <= tuple(map(int, re.findall(r"\d+", version)[:3])) < _BELOW:
        raise _refusal(f"version {version} is not supported")
    return module


def _refusal(why: str) -> SimulatorError:
    return SimulatorError(
        f"dgl: {why}; 'attention' needs it, and so does the training of 'hetero': "
        'pip install ".[learn]" in a checkout of lightning-autosync (dgl>=1.1.3,<2; Python 3.11 or older), or use '
        "simulator=pretrained, linear, recurrent or replay"
    )


Width = Annotated[Count, Field(le=256)]
Layers = Annotated[Count, Field(le=8)]


class LinearSizes(Record):
    """No sizes: the network has one weight per feature."""


class RecurrentSizes(Record):
    """Sizes of `RecurrentNetwork`; brackets have the paper's values.

    Attributes:
        hidden: width of a variable's vector [32].
        state: width of the LSTM's state in each direction [128].
        layers: number of LSTM layers [3].
    """

    hidden: Width = 32
    state: Width = 48
    layers: Layers = 2


class AttentionSizes(Record):
    """Sizes of `AttentionNetwork`.

    Attributes:
        hidden: width of a variable's vector and of each head's output.
        heads: number of attention heads.
        layers: number of attention layers.
    """

    hidden: Width = 32
    heads: Layers = 4
    layers: Layers = 2


class Standard(nn.Module):
    """Scales features to mean 0 and standard deviation 1, measured on the samples given to `observe`.

    Values are clamped at six deviations, because other clusters and models have outliers.
    """

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))

    def observe(self, values: torch.Tensor) -> None:
        """Set mean and deviation from ``values`` [count, features]."""
        self.mean.copy_(values.mean(dim=0))
        deviation = values.std(dim=0, correction=0)
        self.deviation.copy_(torch.where(deviation > 1e-4, deviation, 1.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return ((values - self.mean) / self.deviation).clamp(-6, 6)


class SimulatorNetwork(nn.Module, ABC):
    """A kind of learned simulator: the encoding of a plan, and the network that scores it.

    ``embed`` maps encoded plans to vectors of ``width`` numbers, and a small ``head`` maps these to scores.

    Attributes:
        KIND: name, as in ``SIMULATORS``.
        SIZES: record of the sizes of its layers.
        INPUTS: names of its inputs.
        VOCABULARY: names and sizes on which the encoding depends, besides `MODES` and `COMPRESSORS`, and a number that
            grows when the meaning of a feature changes.
        CORRECTS: whether scores add to the logarithm of the replay's step. Otherwise they add to the logarithm of the
            lower bound on the step, which is the same for all plans of a workload on a cluster.
        REGRESSION: weight of the error of the logarithm relative to the ranking loss. AutoSync's simulators are trained
            to rank only (0); a straight line then maps their scores to seconds.
        TRAINED_BY_DGL: whether training needs DGL (`load_dgl`).
        head: module that maps embedded plans to scores.
    """

    KIND: ClassVar[str]
    SIZES: ClassVar[type[Record]]
    INPUTS: ClassVar[tuple[str, ...]]
    VOCABULARY: ClassVar[tuple[Any, ...]] = (1,)
    CORRECTS: ClassVar[bool] = False
    REGRESSION: ClassVar[float] = 0.0
    TRAINED_BY_DGL: ClassVar[bool] = False

    head: nn.Module

    @staticmethod
    @abstractmethod
    def encode(arrays: PlanArrays) -> Any:
        """The encoding of a plan."""

    @classmethod
    def encoding(cls) -> str:
        """Digest of the encoding of plans. Networks fit only the encoding with which they were fitted."""
        return digest([cls.KIND, MODES, COMPRESSORS, cls.VOCABULARY])

    @staticmethod
    @abstractmethod
    def features(item: Any) -> dict[str, int]:
        """The number of features of each input by name, from one encoded plan."""

    @staticmethod
    @abstractmethod
    def collate(items: Sequence[Any]) -> Any:
        """A batch of encoded plans as input of the network."""

    @abstractmethod
    def observe(self, batch: Any) -> None:
        """Set the scale of the features from a batch of plans."""

    @abstractmethod
    def embed(self, batch: Any) -> torch.Tensor:
        """[plans, width] vectors of a batch of plans."""

    def forward(self, batch: Any) -> torch.Tensor:
        """[plans] scores."""
        return self.score(self.embed(batch))

    def score(self, embedded: torch.Tensor) -> torch.Tensor:
        """[plans] scores of embedded plans."""
        scores: torch.Tensor = self.head(embedded).squeeze(-1)
        return scores

    @classmethod
    def base(cls, arrays: PlanArrays) -> float:
        """Logarithm of the seconds to which scores add."""
        return math.log(arrays.prediction.step_time if cls.CORRECTS else arrays.context.scale)

    @classmethod
    def sized(cls, sizes: Mapping[str, Any]) -> Record:
        """Sizes from plain data; missing ones have their defaults.

        Raises:
            SimulatorError: a size is wrong; the message names the first one as ``network.SIZE``.
        """
        try:
            return cls.SIZES.model_validate(dict(sizes))
        except ValidationError as error:
            allowed = ", ".join(cls.SIZES.model_fields) or "no sizes"
            raise SimulatorError(f"network.{describe_validation_error(error)}; '{cls.KIND}' takes {allowed}") from None

    @classmethod
    def build(cls, features: dict[str, int], sizes: Record) -> SimulatorNetwork:
        """An untrained network.

        Raises:
            SimulatorError: there is not enough memory, or DGL is missing.
        """
        try:
            return cls(features, sizes)
        except RuntimeError as error:
            why = str(error).strip().partition("\n")[0]
            raise SimulatorError(f"simulator '{cls.KIND}': network: {why}") from None


class LinearNetwork(SimulatorNetwork):
    """A weighted sum of the predefined features."""

    KIND = "linear"
    SIZES = LinearSizes
    INPUTS = ("plan",)
    encode = staticmethod(predefined)

    def __init__(self, features: dict[str, int], sizes: LinearSizes) -> None:
        super().__init__()
        self.standard = Standard(features["plan"])
        self.head = nn.Linear(features["plan"], 1)

    @staticmethod
    def features(item: NDArray[numpy.float32]) -> dict[str, int]:
        return {"plan": len(item)}

    @staticmethod
    def collate(items: Sequence[NDArray[numpy.float32]]) -> torch.Tensor:
        """[plans, features]."""
        return torch.from_numpy(numpy.stack(items))

    def observe(self, batch: torch.Tensor) -> None:
        self.standard.observe(batch)

    def embed(self, batch: torch.Tensor) -> torch.Tensor:
        """[plans, features]."""
        standard: torch.Tensor = self.standard(batch)
        return standard


class ShardBatch(NamedTuple):
    """Shards of a batch of plans.

    Attributes:
        features: [shards, features] of all plans.
        variable: [shards] variable of each shard, numbered over all plans.
        lengths: [plans] number of variables.
        graph: a ``dgl.DGLGraph`` over all variables, or None.
    """

    features: torch.Tensor
    variable: torch.Tensor
    lengths: torch.Tensor
    graph: Any = None


def collate_shards(items: Sequence[ShardSet]) -> ShardBatch:
    """The shards of all plans, one plan after the other."""
    lengths = numpy.array([len(item.group) for item in items])
    before = numpy.cumsum(lengths) - lengths
    variable = [item.variable + first for item, first in zip(items, before, strict=True)]
    return ShardBatch(
        torch.from_numpy(numpy.concatenate([item.features for item in items])),
        torch.from_numpy(numpy.concatenate(variable)),
        torch.from_numpy(lengths),
    )


def collate_shard_graphs(items: Sequence[ShardSet]) -> ShardBatch:
    """The same with a graph that connects variables that are neighbours or share a message."""
    batch = collate_shards(items)
    sources: list[NDArray[numpy.int64]] = []
    targets: list[NDArray[numpy.int64]] = []
    first = 0
    for item in items:
        count = len(item.group)
        order = numpy.argsort(item.group, kind="stable")
        alike = item.group[order[1:]] == item.group[order[:-1]]
        one = numpy.concatenate([numpy.arange(count - 1), order[:-1][alike]]) + first
        other = numpy.concatenate([numpy.arange(1, count), order[1:][alike]]) + first
        own = numpy.arange(first, first + count)
        sources += [one, other, own]
        targets += [other, one, own]
        first += count
    ends = torch.from_numpy(numpy.concatenate(sources)), torch.from_numpy(numpy.concatenate(targets))
    return batch._replace(graph=load_dgl().graph(ends, num_nodes=first))


class ShardEncoder(nn.Module):
    """One vector per variable: the sum over its shards of the outputs of a two-layer network."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.standard = Standard(features)
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU())
        self.hidden = hidden

    def forward(self, batch: ShardBatch) -> torch.Tensor:
        """[variables, hidden]."""
        made = self.layers(self.standard(batch.features))
        return made.new_zeros(int(batch.lengths.sum()), self.hidden).index_add(0, batch.variable, made)


class ShardNetwork(SimulatorNetwork):
    """Base class of networks whose input is the shards of each variable."""

    INPUTS = ("shard",)
    encode = staticmethod(shard_set)
    collate = staticmethod(collate_shards)
    shards: ShardEncoder

    @staticmethod
    def features(item: ShardSet) -> dict[str, int]:
        return {"shard": item.features.shape[1]}

    def observe(self, batch: ShardBatch) -> None:
        self.shards.standard.observe(batch.features)


class RecurrentNetwork(ShardNetwork):
    """A bidirectional LSTM over variables in backward order."""

    KIND = "recurrent"
    SIZES = RecurrentSizes

    def __init__(self, features: dict[str, int], sizes: RecurrentSizes) -> None:
        super().__init__()
        self.shards = ShardEncoder(features["shard"], sizes.hidden)
        self.recurrent = nn.LSTM(sizes.hidden, sizes.state, sizes.layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * sizes.state, 1)

    def embed(self, batch: ShardBatch) -> torch.Tensor:
        """[plans, 2 x state]."""
        variables = torch.split(self.shards(batch), batch.lengths.tolist())
        padded = nn.utils.rnn.pad_sequence(list(variables), batch_first=True)
        packed = nn.utils.rnn.pack_padded_sequence(padded, batch.lengths, batch_first=True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return states.sum(dim=1) / batch.lengths[:, None]


class AttentionNetwork(ShardNetwork):
    """Graph attention (GAT; Velickovic et al., 2018) among variables."""

    KIND = "attention"
    SIZES = AttentionSizes
    TRAINED_BY_DGL = True
    collate = staticmethod(collate_shard_graphs)

    def __init__(self, features: dict[str, int], sizes: AttentionSizes) -> None:
        super().__init__()
        convolution = load_dgl().nn.GATConv
        hidden, heads = sizes.hidden, sizes.heads
        self.shards = ShardEncoder(features["shard"], hidden)
        widths = [hidden, *(hidden * heads for _ in range(sizes.layers))]
        self.attention = nn.ModuleList(
            convolution(before, hidden, heads, residual=True, activation=nn.functional.elu) for before in widths[:-1]
        )
        self.head = nn.Linear(widths[-1], 1)

    def embed(self, batch: ShardBatch) -> torch.Tensor:
        """[plans, hidden x heads]."""
        states = self.shards(batch)
        for layer in self.attention:
            states = layer(batch.graph, states).flatten(1)
        mean: torch.Tensor = load_dgl().ops.segment_reduce(batch.lengths, states, "mean")
        return mean

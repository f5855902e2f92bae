"""Recipes of what replicas train: real modules and paced modules, with different batches on each rank; their union."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    field_validator,
    model_validator,
)
from torch import nn

from lightning_autosync.cluster import Seconds
from lightning_autosync.measure.models.digits import load_digits
from lightning_autosync.measure.models.imported import Imported
from lightning_autosync.measure.models.model import BATCHES, MIB, Batch, Embeddings, Model, with_kind
from lightning_autosync.measure.models.modules import (
    DigitsNetwork,
    EmbeddingRecommender,
    FlatVector,
    ImageClassifier,
    LanguageModel,
    Perceptron,
    ResidualLayers,
)
from lightning_autosync.measure.models.paced import PacedModule
from lightning_autosync.workload import Workload
from lightning_autosync.workload.catalogue import FLOPS_PER_SECOND, build
from lightning_autosync.workload.scaling import scaled, with_compute
from lightning_autosync.workload.spec import Kind


class Layers(Model):
    """Residual blocks of one linear layer each: half of the tensors are matrices, half are vectors.

    Attributes:
        tensors: number of parameter tensors, two per layer.
        width: number of features of every layer.
        batch: samples in a batch of one rank.
    """

    kind: Literal["layers"]
    tensors: PositiveInt
    width: PositiveInt
    batch: PositiveInt

    @field_validator("tensors")
    @classmethod
    def _check_even(cls, tensors: int) -> int:
        if tensors % 2:
            raise ValueError("every layer has two tensors, so the number of tensors must be even")
        return tensors

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        return ResidualLayers(self.tensors // 2, self.width)

    def batches(self, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(rank)
        draw = torch.randn(BATCHES, 2, self.batch, self.width, generator=generator)
        return [(inputs, targets) for inputs, targets in draw]


class Recommender(Model):
    """Embeddings of two items per sample, and a small multilayer perceptron on them (as in NCF).

    Attributes:
        rows: number of rows of the table.
        width: number of features of a row.
        batch: samples in a batch of one rank.
    """

    kind: Literal["recommender"]
    rows: PositiveInt
    width: PositiveInt
    batch: PositiveInt

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        return EmbeddingRecommender(self.rows, self.width, sparse)

    def batches(self, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(rank)
        pairs = torch.randint(self.rows, (BATCHES, self.batch, 2), generator=generator)
        ratings = torch.rand(BATCHES, self.batch, generator=generator)
        return list(zip(pairs, ratings, strict=True))


class Flat(Model):
    """One vector whose backward costs almost nothing: a step is one synchronization, without optimizer.

    Attributes:
        mib: size of the vector in MiB of float32.
    """

    kind: Literal["flat"]
    mib: PositiveFloat
    learning_rate: None = None

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        return FlatVector(max(1, round(self.mib * MIB / 4)))

    def batches(self, rank: int) -> list[Batch]:
        return [(torch.tensor(float(rank + 1)),)]


class Digits(Model):
    """A small convolutional network on scikit-learn's digits.

    Attributes:
        channels: output channels of the first convolution.
        batch: samples in a batch of one rank.
    """

    kind: Literal["digits"]
    channels: PositiveInt
    batch: PositiveInt

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        return DigitsNetwork(self.channels)

    def batches(self, rank: int) -> list[Batch]:
        images, labels = load_digits()
        generator = torch.Generator().manual_seed(rank)
        draw = torch.randint(len(images), (BATCHES, self.batch), generator=generator)
        return [(images[chosen], labels[chosen]) for chosen in draw]


class PerceptronModel(Model):
    """A multilayer perceptron: each sample is a vector, and so is its target.

    Attributes:
        widths: widths of the input, of each hidden layer, and of the output.
        batch: samples in a batch of one rank.
    """

    kind: Literal["perceptron"]
    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=3)]
    batch: PositiveInt

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        return Perceptron(self.widths)

    def batches(self, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(rank)
        inputs = torch.randn(BATCHES, self.batch, self.widths[0], generator=generator)
        targets = torch.randn(BATCHES, self.batch, self.widths[-1], generator=generator)
        return list(zip(inputs, targets, strict=True))


class VggModel(Model):
    """A convolutional network with most of its weights in the classifier.

    Attributes:
        size: width and height of an image.
        channels: output channels of each convolution, after which width and height are halved.
        hidden: width of the classifier's hidden layers.
        classes: number of classes.
        batch: samples in a batch of one rank.
    """

    kind: Literal["vgg"]
    size: PositiveInt = 32
    channels: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (16, 32, 64)
    hidden: PositiveInt = 2048
    classes: PositiveInt = 16
    batch: PositiveInt = 16

    @model_validator(mode="after")
    def _check(self) -> VggModel:
        least = 2 ** len(self.channels)
        if self.size < least:
            raise ValueError(
                f"size: got {self.size}; allowed: at least {least}, because each of the {len(self.channels)} "
                "convolutions (channels) halves it"
            )
        return self

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        return ImageClassifier(self.size, self.channels, self.hidden, self.classes)

    def batches(self, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(rank)
        images = torch.randn(BATCHES, self.batch, 3, self.size, self.size, generator=generator)
        labels = torch.randint(self.classes, (BATCHES, self.batch), generator=generator)
        return list(zip(images, labels, strict=True))


class TransformerModel(Model):
    """A decoder-only Transformer on random tokens.

    Attributes:
        vocabulary: number of distinct tokens.
        width: number of features of a token.
        heads: number of attention heads.
        layers: number of blocks.
        length: number of tokens of a sample.
        batch: samples in a batch of one rank.
    """

    kind: Literal["transformer"]
    vocabulary: PositiveInt = 1024
    width: PositiveInt = 512
    heads: PositiveInt = 8
    layers: PositiveInt = 4
    length: PositiveInt = 64
    batch: PositiveInt = 1

    @model_validator(mode="after")
    def _check(self) -> TransformerModel:
        if self.width % self.heads:
            raise ValueError(f"heads: got {self.heads}; allowed: a number that divides the width, {self.width}")
        return self

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        return LanguageModel(self.vocabulary, self.width, self.heads, self.layers, self.length)

    def batches(self, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(self.vocabulary, (BATCHES, self.batch, self.length), generator=generator)
        return [(batch,) for batch in tokens]


class Paced(Model):
    """A workload's variables under paced compute: passes take the times of its profile and use no core.

    Exactly one of ``catalogue`` and ``workload_file`` is given.

    Attributes:
        name: short name for people; None uses the workload's own name.
        catalogue: name of a model in the catalogue.
        workload_file: path of a workload document, as ``capture`` writes it.
        arguments: arguments of the catalogue's model (batch_size, layers, ...).
        scale: factor on bytes and work: widths and table rows are multiplied by its square root.
        flops_per_second: sustained rate of the imagined device, which determines the catalogue's times.
        compute: seconds of forward and backward together; None keeps those of the rate or the file.
    """

    kind: Literal["paced"]
    name: str | None = None
    catalogue: str | None = None
    workload_file: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    scale: PositiveFloat = 1.0
    flops_per_second: PositiveFloat = FLOPS_PER_SECOND
    compute: Seconds | None = None
    learning_rate: None = None

    @model_validator(mode="after")
    def _check(self) -> Paced:
        if (self.catalogue is None) == (self.workload_file is None):
            raise ValueError("expected exactly one of catalogue and workload_file")
        if self.compute is not None and self.compute <= 0:
            raise ValueError("compute: must be above zero; remove it to use the profile's value")
        self.described()
        return self

    def described(self) -> Workload:
        """The workload, scaled; row-wise variables are ``row_sparse``."""
        if self.catalogue is not None:
            workload = build(self.catalogue, flops_per_second=self.flops_per_second, **self.arguments)
        else:
            assert self.workload_file is not None
            workload = Workload.load(self.workload_file)
        workload = scaled(workload, self.scale)
        return workload if self.compute is None else with_compute(workload, self.compute)

    @property
    def title(self) -> str:
        return self.name or self.described().name

    def workload(self, embeddings: Embeddings) -> Workload:
        workload = self.described().model_copy(update={"name": self.title})
        tables = {variable.name for variable in workload.variables if variable.kind != "dense"}
        kinds: dict[Embeddings, Kind] = {"dense": "dense", "sparse": "sparse", "rows": "row_sparse"}
        return with_kind(workload, tables, kinds[embeddings])

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        return PacedModule(self.workload("sparse" if sparse else "rows"), speed)

    def optimizer(self, module: nn.Module) -> None:
        """None, because the module paces the optimizer's step itself (`PacedModule.step_optimizer`)."""

    def batches(self, rank: int) -> list[Batch]:
        return [(torch.tensor(rank * BATCHES + number),) for number in range(BATCHES)]


def _kind_of_target(value: Any) -> Any:
    """Let ``_target_`` imply the kind, so that configs for Hydra's ``instantiate`` work here."""
    return {"kind": "imported", **value} if isinstance(value, dict) and "_target_" in value else value


AnyModel = Annotated[
    Layers | Recommender | Flat | Digits | PerceptronModel | VggModel | TransformerModel | Paced | Imported,
    Field(discriminator="kind"),
    BeforeValidator(_kind_of_target),
]
_MODEL: TypeAdapter[Model] = TypeAdapter(AnyModel)


def model_of(data: dict[str, Any]) -> Model:
    """The model from plain data, as from ``model_dump``."""
    return _MODEL.validate_python(data)

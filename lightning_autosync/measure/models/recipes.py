"""Recipes of what replicas train: real modules, paced modules and a user's own, with different batches on each rank."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import cycle, islice
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    field_validator,
    model_validator,
)
from torch import Tensor, nn

from lightning_autosync.cluster import Seconds
from lightning_autosync.documents import Record
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.models.digits import load_digits
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
from lightning_autosync.targets import find, make
from lightning_autosync.workload import Workload, describe
from lightning_autosync.workload.catalogue import FLOPS_PER_SECOND, build
from lightning_autosync.workload.scaling import scaled, with_compute
from lightning_autosync.workload.spec import Kind

Batch = tuple[Tensor, ...]
Embeddings = Literal["dense", "sparse", "rows"]
MIB = 1024 * 1024
BATCHES = 8


class Model(Record):
    """A recipe of a module and its batches.

    Attributes:
        learning_rate: learning rate of plain SGD for all parameters; None for no optimizer.
    """

    learning_rate: PositiveFloat | None = 0.01

    @abstractmethod
    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        """A new module that returns the loss of a batch.

        Args:
            sparse: whether embeddings have sparse gradients.
            speed: relative speed of the rank's node; only paced computation uses it.
        """

    def optimizer(self, module: nn.Module) -> Callable[[], object] | None:
        """A function that makes the optimizer's step for such a module; None if there is no optimizer."""
        if self.learning_rate is None:
            return None
        return torch.optim.SGD(module.parameters(), self.learning_rate).step

    @abstractmethod
    def batches(self, rank: int) -> list[Batch]:
        """The batches that ``rank`` uses in turn."""

    @property
    def title(self) -> str:
        """A short name for people."""
        return type(self).__name__.lower()

    def workload(self, embeddings: Embeddings) -> Workload:
        """The workload with this kind of embedding gradients."""
        module = self._described_module(embeddings == "sparse")
        tables = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
        workload = describe(module, name=self.title)
        return with_kind(workload, tables, "row_sparse") if embeddings == "rows" else workload

    def _described_module(self, sparse: bool) -> nn.Module:
        """A module whose parameters need no memory."""
        with torch.device("meta"):
            return self.module(sparse)


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
        workload = self.described()
        tables = {variable.name for variable in workload.variables if variable.kind != "dense"}
        kinds: dict[Embeddings, Kind] = {"dense": "dense", "sparse": "sparse", "rows": "row_sparse"}
        return with_kind(workload, tables, kinds[embeddings])

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        return PacedModule(self.workload("sparse" if sparse else "rows"), speed)

    def optimizer(self, module: nn.Module) -> Callable[[], object] | None:
        assert isinstance(module, PacedModule)
        return module.step_optimizer

    def batches(self, rank: int) -> list[Batch]:
        return [(torch.tensor(rank * BATCHES + number),) for number in range(BATCHES)]


def with_kind(workload: Workload, tables: set[str], kind: Kind) -> Workload:
    """The workload with gradients of ``tables`` of the given kind; dense gradients touch all rows."""
    update: dict[str, Any] = {"kind": kind, **({"rows": None} if kind == "dense" else {})}
    variables = (v.model_copy(update=update) if v.name in tables else v for v in workload.variables)
    return workload.model_copy(update={"variables": tuple(variables)})


class Imported(Model):
    """A user's module, made by a class or function that is imported by name, and its batches; computation is real.

    The loss comes from ``loss`` if given, else from the module's ``training_step`` if it has one, else from the module
    itself. All contenders use plain SGD, whatever ``configure_optimizers`` returns.

    Attributes:
        target: ``package.module.Class``. In a document the field is ``_target_``, as for Hydra.
        arguments: arguments of the target, which may contain a ``_target_`` of their own. Unknown fields beside the
            target are added to them.
        data: the same for the batches: a LightningDataModule, a DataLoader, or any iterable. None uses the module's own
            ``train_dataloader``.
        loss: ``package.module.function``, called with the module's output and the last part of a batch.
    """

    model_config = ConfigDict(populate_by_name=True)

    kind: Literal["imported"]
    target: str = Field(alias="_target_", min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] | None = None
    loss: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _collect_arguments(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return with_arguments(value, {*cls.model_fields, "_target_"})

    @property
    def title(self) -> str:
        return self.target.rpartition(".")[2].lower()

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        made = make("model", {"_target_": self.target, **self.arguments}, nn.Module)
        if not getattr(made, "automatic_optimization", True):
            raise DocumentError(
                f"model: '{self.target}' uses manual optimization, so its steps cannot be measured alone"
            )
        _Loss(made, None if self.loss is None else find("model.loss", self.loss)).install()
        return made

    def batches(self, rank: int) -> list[Batch]:
        found = list(islice(cycle(islice(self._source(), rank + BATCHES)), rank, rank + BATCHES))
        if not found:
            raise DocumentError(f"model: '{self.target}': its data loader returns no batch")
        return [(batch,) for batch in found]

    def _described_module(self, sparse: bool) -> nn.Module:
        return self.module()  # a user's constructor may need values

    def _source(self) -> Iterable[Any]:
        if self.data is not None:
            given = make("model.data", self.data)
            if hasattr(given, "train_dataloader"):
                given.prepare_data()
                given.setup("fit")
                given = given.train_dataloader()
        else:
            given = self._own_batches()
        if not isinstance(given, Iterable):
            raise DocumentError(f"model.data: expected an iterable of batches, got {type(given).__name__}")
        return given

    def _own_batches(self) -> Any:
        loader = getattr(self.module(), "train_dataloader", None)
        why = ""
        try:
            found = loader() if loader is not None else None
        except Exception as error:  # if not overridden, Lightning's hook raises Lightning's own exception class
            found, why = None, f": {error}"
        if found is None:
            raise DocumentError(
                f"model.data: missing; '{self.target}' has no train_dataloader, so add "
                f"+model.data._target_=package.module.DataModule{why}"
            )
        return found


def with_arguments(value: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Plain data in which keys that are no fields are items of the field ``arguments``."""
    own = {name: value[name] for name in value if name in fields}
    beside = {name: value[name] for name in value if name not in fields}
    return {**own, "arguments": {**own.get("arguments", {}), **beside}}


class _Loss:
    """Replaces a module's forward: called with a batch, it returns the loss.

    The module's own forward is restored while the step runs, since the step calls it. Lightning does the same.
    """

    def __init__(self, module: nn.Module, loss: Any) -> None:
        self._module = module
        self._loss = loss
        self._step = getattr(module, "training_step", None)

    def install(self) -> None:
        """Replace the module's forward, and disable its logging, which would need a trainer."""
        if self._step is not None:
            vars(self._module).update(log=_nothing, log_dict=_nothing)
        vars(self._module)["forward"] = self

    def __call__(self, batch: Any) -> Tensor:
        del vars(self._module)["forward"]
        try:
            output = self._run(batch)
        finally:
            vars(self._module)["forward"] = self
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise DocumentError(
                f"model: a step returned {type(output).__name__}; it must return the loss, or set model.loss"
            )
        return loss

    def _run(self, batch: Any) -> Any:
        if self._loss is not None:
            *inputs, target = batch
            return self._loss(self._module(*inputs), target)
        if self._step is not None:
            return self._step(batch, 0) if len(inspect.signature(self._step).parameters) > 1 else self._step(batch)
        return self._module(*batch) if isinstance(batch, list | tuple) else self._module(batch)


def _nothing(*_: Any, **__: Any) -> None:
    return None


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

"""`SplitModel`: an unmodified module whose operators work on parts, according to a plan."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.hybrid.execution import collectives
from lightning_autosync.hybrid.execution.activation import Surroundings
from lightning_autosync.hybrid.execution.functions.operands import OWN
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.operators import split_operator
from lightning_autosync.hybrid.execution.random_streams import RandomStreams
from lightning_autosync.hybrid.execution.shards import AxisCut, ParameterShard
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan
from lightning_autosync.hybrid.signatures import kind_of, rules_of
from lightning_autosync.hybrid.validation import check_plan
from lightning_autosync.workload import IGNORED


@dataclass(frozen=True)
class Part:
    """This rank's part of a parameter.

    Attributes:
        name: name in ``named_parameters()``.
        parameter: the user's parameter object, with the part as its data.
        shard: position of the part.
        replicas: dimensions of the mesh along which ranks have the same part but gradients of their own samples.
    """

    name: str
    parameter: nn.Parameter
    shard: ParameterShard
    replicas: tuple[int, ...]


class SplitModel:
    """A module that is split in place by `split`; the constructor and all methods are collective.

    Parameters stay the same objects with the same names, but their data become this rank's parts. Code between
    operators sees this rank's own samples, as in data parallelism (see `Activation`).

    Args:
        module: the module on its device, with the same weights on every rank; it does not change before `split`.
        seed: seed of random numbers in forward passes; the same on all ranks.
        source: name of the plan in errors.

    Attributes:
        parts: the parameters, by name.

    Raises:
        PlanError: the plan does not fit the module, or the module excludes parameters from synchronization.
    """

    def __init__(
        self, module: nn.Module, plan: HybridPlan, mesh: LiveMesh, seed: int = 0, source: str = "plan"
    ) -> None:
        check_plan(plan, module, plan.world_size, source)
        if ignored := getattr(module, IGNORED, ()):
            raise PlanError(
                f"model: {IGNORED} names '{next(iter(ignored))}', but split models synchronize all parameters; remove "
                f"{IGNORED}, or train data-parallel"
            )
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self.module = module
        self.plan = plan
        self.mesh = mesh
        self._device = device
        self.around = Surroundings(mesh, RandomStreams(seed, mesh.coordinates, device))
        self._operators: list[tuple[nn.Module, LayerPlan]] = []
        self._layers = {layer.module: layer for layer in plan.layers}
        for path, layer in self._layers.items():
            _check_options(module.get_submodule(path), layer, source)
        self.parts = self._plan_parts()

    @property
    def is_split(self) -> bool:
        """Whether any operator is currently split; otherwise the module runs unchanged."""
        return bool(self._operators)

    @property
    def operators(self) -> set[nn.Module]:
        """The modules that are currently split."""
        return {module for module, _ in self._operators}

    def split(self) -> None:
        """Cut the parameters and let operators work on parts; gradients of cut parameters are dropped."""
        self._cut()
        self._install()

    @contextmanager
    def forward(self, *inputs: Any, number: int | None = None) -> Iterator[None]:
        """Context of a forward pass and the loss. Values that leave it must be converted by `bring_home`.

        Args:
            inputs: the batch, in sequences, mappings and dataclasses; tensors must have the same shapes on all ranks.
            number: number of the pass, on which its random numbers depend; None takes the next one.

        Raises:
            ExchangeError: shapes, trained parameters or the last pass differ between ranks, or the batch has no
                tensors; raised on every rank.
        """
        if self.is_split:
            self._agree(inputs)
        with self.around.streams.forward(number), _without_fast_paths() if self.is_split else nullcontext():
            self.around.in_pass = True
            try:
                yield
            finally:
                self.around.in_pass = False
                self.around.forget()

    def restore(self) -> None:
        """Undo `split`: every rank gets the whole module with its current weights."""
        with torch.no_grad():
            for part in self.parts.values():
                part.parameter.grad = None
                part.parameter.data = self.whole(part.parameter.data, part.shard)
        for module, _ in self._operators:
            module.__dict__.pop("forward", None)
            handle = module.__dict__.pop(_HANDLE, None)
            if handle is not None:
                handle.remove()
        self._operators.clear()

    def whole(self, local: Tensor, shard: ParameterShard) -> Tensor:
        """[shape] the whole tensor from the ranks' parts [local shape]; collective among ranks with different parts."""
        gathered = local
        found = local.new_empty(shard.shape) if shard.cuts else local
        sizes, coordinates = self.mesh.sizes, [self.mesh.coordinates]
        for k in shard.dimensions:
            gathered = collectives.gather(gathered, self.mesh.line(k))
            coordinates = [(*place[:k], index, *place[k + 1 :]) for index in range(sizes[k]) for place in coordinates]
        if shard.cuts:
            blocks = gathered.reshape(-1, *local.shape)
            for block, place in zip(blocks, coordinates, strict=True):
                shard.at(place, sizes).put(block, found)
        return found

    def _plan_parts(self) -> dict[str, Part]:
        layers = self._layers
        uses: dict[nn.Parameter, list[tuple[LayerPlan | None, str, nn.Module]]] = defaultdict(list)
        inside = {f"{path}." for path, layer in layers.items() if _is_attention(self.module.get_submodule(path))}
        for path, module in self.module.named_modules():
            if path.startswith(tuple(inside)):
                continue
            layer = layers.get(path)
            recurse = _is_attention(module) and layer is not None
            for name, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
                uses[parameter].append((layer, name, module))
        sizes, coordinates = self.mesh.sizes, self.mesh.coordinates
        found = {}
        for name, parameter in self.module.named_parameters():
            shard, replicas = ParameterShard(tuple(parameter.shape)), set[int]()
            for layer, own, module in uses[parameter]:
                replicas |= {k for k in range(len(sizes)) if layer is None or layer.signature[k] == "dp"}
                if layer is not None:
                    shard = _shard(module, layer, own, parameter, sizes).at(coordinates, sizes)
            self._check_other_uses(name, shard, uses[parameter])
            found[name] = Part(name, parameter, shard, tuple(sorted(replicas - set(shard.dimensions))))
        return found

    def _check_other_uses(
        self, name: str, shard: ParameterShard, uses: list[tuple[LayerPlan | None, str, nn.Module]]
    ) -> None:
        if shard.cuts and any(layer is None for layer, _, _ in uses):
            other = next(type(module).__name__ for layer, _, module in uses if layer is None)
            raise PlanError(
                f"plan: layers: parameter '{name}' is cut, but {other} shares it and has no layer in the plan"
            )

    def _cut(self) -> None:
        for part in self.parts.values():
            parameter = part.parameter
            if part.shard.cuts:
                parameter.grad = None
                parameter.data = part.shard.take(parameter.data)
        self.around.buffers.watch(self.module.buffers())
        for buffer in self.module.buffers():
            setattr(buffer, OWN, True)

    def _install(self) -> None:
        for path, layer in self._layers.items():
            if all(name == "dp" for name in layer.signature):
                continue
            module = self.module.get_submodule(path)
            module.forward = split_operator(module, layer, self.around)
            # A hook prevents fast paths of containing modules, such as that of nn.TransformerEncoderLayer, which would
            # compute with this module's weights instead of calling it.
            module.__dict__[_HANDLE] = module.register_forward_pre_hook(_nothing)
            self._operators.append((module, layer))

    def _agree(self, inputs: Any) -> None:
        # Backends misread messages of unexpected sizes or end the process, so differences must be found before. What
        # a pass did is known only after it, and is compared before the next one, which costs no message of its own.
        shapes = [list(tensor.shape) for tensor in _tensors_in(inputs)]
        trained = [part.parameter.requires_grad for part in self.parts.values()]
        own = [shapes, trained, *self.around.record.take()]
        number = zlib.crc32(repr(own).encode())
        if not self.around.buffers.exchange(number, self._device, self.module.training):
            _refuse_differences(gather_json(own, self.mesh.group(self.mesh.dimensions)), list(self.parts))
        if inputs and not shapes:
            raise ExchangeError(
                "batch: it contains no tensor whose shape ranks could compare; allowed: tensors in sequences, "
                "mappings and dataclasses"
            )


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors in the containers that Lightning moves to devices."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _tensors_in(item)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for item in batch:
            yield from _tensors_in(item)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for own in fields(batch):
            yield from _tensors_in(getattr(batch, own.name, None))


def _refuse_differences(found: list[Any], names: list[str]) -> None:
    """Raise an error about the first rank that differs from rank 0.

    Args:
        found: what `SplitModel._agree` compares, of every rank.
    """
    rank = next(rank for rank, theirs in enumerate(found) if theirs != found[0])
    shapes, trained, calls, _, buffers, inputs = found[rank]
    first_shapes, first_trained, first_calls, _, first_buffers, first_inputs = found[0]
    if shapes != first_shapes:
        raise ExchangeError(
            f"batch: its tensors have shapes {shapes} on rank {rank}, but {first_shapes} on rank 0. Split operators "
            "need equal shapes on all ranks: pad samples to one length, and drop the last batch if it is smaller"
        )
    if trained != first_trained:
        place = next(place for place, own in enumerate(trained) if own != first_trained[place])
        has, lacks = (rank, 0) if trained[place] else (0, rank)
        raise ExchangeError(
            f"parameter '{names[place]}' is trained on rank {has}, but frozen on rank {lacks}; freeze the same "
            "parameters on all ranks"
        )
    if calls != first_calls:
        raise ExchangeError(
            f"the last pass called different split layers, or used different shapes, on rank {rank} than on rank 0. "
            "Split operators need the same calls and shapes on all ranks: no layer may be skipped on some ranks "
            "only, and no shape may depend on a rank's own samples"
        )
    if buffers != first_buffers:
        raise ExchangeError(
            f"the last pass changed a buffer on rank {rank} in another way than on rank 0, and combined it with split "
            "values; allowed: changes that are the same on all ranks, or that the first pass of training makes, too"
        )
    if inputs != first_inputs:
        layer = next(one[0] for one, first in zip(inputs, first_inputs, strict=True) if one != first)
        raise ExchangeError(
            f"in the last pass split layer '{layer}' got another input on rank {rank} than on rank 0. By the plan this "
            "input has no axis of samples (batch_axis: null), so it must be the same on all ranks; allowed otherwise: "
            "signature 'dp' along all dimensions"
        )
    raise ExchangeError(
        f"the last pass combined split values with a Python number that differs between rank {rank} and rank 0; a "
        "number that depends on a rank's own samples must be a tensor"
    )


def _shard(module: nn.Module, layer: LayerPlan, name: str, parameter: Tensor, sizes: tuple[int, ...]) -> ParameterShard:
    """The first rank's part of a parameter."""
    rules = rules_of(module)
    by_axis: dict[int, list[int]] = defaultdict(list)
    for k, signature in enumerate(layer.signature):
        axis = rules[signature].axes.get(name)
        if axis is not None:
            by_axis[axis].append(k)
    cuts = []
    for axis, dimensions in by_axis.items():
        blocks = prod(sizes[k] for k in dimensions)
        cuts.append(AxisCut(axis, _parts(module, layer, name, axis), tuple(dimensions), 0, blocks))
    return ParameterShard(tuple(parameter.shape), tuple(cuts))


def _parts(module: nn.Module, layer: LayerPlan, name: str, axis: int) -> int:
    """The number of results that follow each other along an axis of a parameter."""
    if _is_attention(module):
        return 3 if name.startswith("in_proj") else 1
    column = rules_of(module).get("col")
    return layer.parts if column is not None and column.axes.get(name) == axis else 1


def _is_attention(module: nn.Module) -> bool:
    return kind_of(module) == "attention"


def _check_options(module: nn.Module, layer: LayerPlan, source: str) -> None:
    counts = isinstance(module, nn.Embedding) and module.scale_grad_by_freq
    if counts and any(name != "dp" for name in layer.signature):
        raise PlanError(
            f"{source}: layers ('{layer.module}'): an embedding with scale_grad_by_freq counts the samples of one "
            "rank only; allowed: signature 'dp' along all dimensions"
        )


@contextmanager
def _without_fast_paths() -> Iterator[None]:
    """Keep ``nn.TransformerEncoder`` from making nested tensors of padded batches, which split operators cannot take.

    It makes them before it calls a layer, so that no hook of a layer prevents it.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _nothing(module: nn.Module, inputs: Any) -> None:
    return None


_HANDLE = "_autosync_handle"

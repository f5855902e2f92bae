"""Records a forward pass with fake tensors, which compute nothing: the calls of operators and their work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from lightning_autosync.errors import WorkloadError
from lightning_autosync.hybrid.graph import Work
from lightning_autosync.hybrid.signatures import kind_of
from lightning_autosync.workload.description import title

_CPU = torch.device("cpu")


@dataclass
class Call:
    """One call of an operator.

    Attributes:
        inputs: its tensor arguments.
        output: the tensor that it returned, or the first of several.
        work: work inside of the call.
        after: work from its end until the start of the next call.
    """

    path: str
    inputs: tuple[Tensor, ...] = ()
    output: Tensor | None = None
    work: Work = field(default_factory=Work)
    after: Work = field(default_factory=Work)


def operator_paths(module: nn.Module) -> dict[str, nn.Module]:
    """The modules for which a plan has layers: known kinds, and other modules with parameters and without children.

    Modules inside of such a module are parts of it.
    """
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{outer}.") for outer in found if outer) or "" in found:
            continue
        leaf = next(part.children(), None) is None and next(part.parameters(recurse=False), None) is not None
        if leaf or kind_of(part) != "unknown":
            found[path] = part
    return found


def record(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Call], Any]:
    """The calls of operators in their order, and the output of the model.

    Args:
        module: any module; it is not changed.
        args, kwargs: arguments of its ``forward``; only shapes and dtypes of tensors matter.

    Raises:
        WorkloadError: the forward pass needs values of tensors, which fake tensors do not have.
    """
    device = next((parameter.device for parameter in module.parameters() if parameter.device.type != "meta"), _CPU)
    recorder = _Recorder()
    with ExitStack() as stack:
        stack.enter_context(training(module))
        for path, part in operator_paths(module).items():
            stack.callback(part.register_forward_pre_hook(recorder.begin(path), with_kwargs=True, prepend=True).remove)
            stack.callback(part.register_forward_hook(recorder.end).remove)
        # A model may have tensors that are neither parameters nor buffers, for example plain attributes: allow them.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        state = {
            name: _fake(tensor, device).requires_grad_(tensor.requires_grad)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        recorder.given = {tensor.untyped_storage()._cdata for tensor in state.values()}
        given = tree_map(lambda leaf: _fake(leaf, device) if isinstance(leaf, Tensor) else leaf, (args, dict(kwargs)))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor))
        stack.enter_context(recorder)
        try:
            output = torch.func.functional_call(module, state, *given)
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            cause = "needs the values of tensors, which fake tensors do not have"
            depends = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
            fails = cause if depends else "fails on fake tensors"
            raise WorkloadError(f"{title(module)}: its forward pass {fails}: {reason}") from error
    return recorder.calls, output


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Put all parts of a module into training mode within the block."""
    modes = {part: part.training for part in module.modules()}
    module.train()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class _Recorder(TorchDispatchMode):
    """Adds the work of operations to the operator that is running or ran last."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = [Call(path="")]  # collects the work before the first operator
        self.given: set[int] = set()
        self._depth = 0
        self._held: dict[int, Any] = {}

    def begin(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._depth == 0:
                inputs = tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
                self.calls.append(Call(path, inputs))
            self._depth += 1

        return hook

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.calls[-1].output = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held and key not in self.given:
            self._held[key] = storage  # keeps the storage alive, so that no other one gets the same address
            self._add(Work(kept=float(storage.nbytes())))
        return tensor

    def _add(self, work: Work) -> None:
        call = self.calls[-1]
        if self._depth:
            call.work += work
        else:
            call.after += work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        held = {tensor.untyped_storage()._cdata for tensor in before}
        if not made or all(tensor.untyped_storage()._cdata in held for tensor in made):
            return output  # a view
        packet = func._overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=output) if packet in flop_registry else 0
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*before, *made))
        self._add(Work(float(flops), float(moved), 1))
        return output

"""Describes a workload by a module's parameters alone, without running the module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from itertools import chain

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload.spec import DTYPE_BYTES, DType, Variable, Workload

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
LARGE_TABLE = 4096
"""Number of rows from which only touched rows of a dense embedding are exchanged: a batch rarely touches so many."""
COMPILED = "_orig_mod"
"""Attribute under which ``torch.compile`` keeps the wrapped module."""


IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute in which a module names the parameters and buffers that DDP, and this package, must not synchronize."""


def shared_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``named_parameters()`` without those that the module tells DDP to ignore; a tied one by all of its names."""
    ignored = frozenset(getattr(module, IGNORED, ()))
    if not ignored:
        return module.named_parameters()
    # As DDP does, which knows a module that occurs twice by its first name only.
    shared = {
        parameter
        for path, part in module.named_modules()
        for name, parameter in part.named_parameters(path, recurse=False)
        if name not in ignored
    }
    return (found for found in module.named_parameters() if found[1] in shared)


def shared_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``named_buffers()`` without those that the module tells DDP to ignore."""
    ignored = frozenset(getattr(module, IGNORED, ()))
    return (found for found in module.named_buffers() if found[0] not in ignored)


def variable_names(module: nn.Module, also: Container[nn.Parameter] = ()) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters with their names in plans, in ``named_parameters()`` order.

    Frozen parameters are left out except those in ``also``, and so are parameters that the module tells DDP to ignore.
    Tied parameters appear once. Compiling the module or a part of it does not change the names.
    """
    return [
        (".".join(part for part in name.split(".") if part != COMPILED), parameter)
        for name, parameter in shared_parameters(module)
        if parameter.requires_grad or parameter in also
    ]


def describe(module: nn.Module, name: str | None = None, also: Container[nn.Parameter] = ()) -> Workload:
    """The workload of ``module`` without times.

    A parameter that belongs only to embeddings with ``sparse=True`` is ``sparse``. All others are ``dense``, because
    only a run shows which rows they touch (see ``capture``). A complex parameter is described as reals with an
    additional last axis of two: the real and the imaginary part.

    Args:
        module: any module, for example a ``LightningModule``.
        name: name of the workload; the class name by default.
        also: frozen parameters to describe as well, because they are trained at other times.

    Raises:
        WorkloadError: no parameter is trainable, a dtype cannot be synchronized, or a lazy module has not yet seen its
            first batch.
    """
    tensors = chain(module.parameters(), module.buffers())
    if any(is_lazy(tensor) for tensor in tensors):
        raise WorkloadError(f"{title(module)}: has lazy parameters; run a batch through it first")
    owners = parameter_owners(module)
    variables = tuple(
        Variable(
            name=variable_name,
            shape=(*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape),
            dtype=dtype_name(variable_name, parameter),
            kind="sparse" if all(_is_sparse_embedding(owner) for owner in owners[parameter]) else "dense",
        )
        for variable_name, parameter in variable_names(module, also)
    )
    if not variables:
        raise WorkloadError(f"{title(module)}: has no trainable parameter, so nothing to synchronize")
    return Workload(name=name or title(module), variables=variables)


def large_tables(module: nn.Module, also: Container[nn.Parameter] = ()) -> set[str]:
    """Names of the weights of large dense embeddings that no other module shares: a step touches few of their rows.

    Args:
        also: frozen parameters that count as trainable.
    """
    owners = parameter_owners(module)
    return {
        name
        for name, parameter in variable_names(module, also)
        if len(owners[parameter]) == 1
        and isinstance(owners[parameter][0], EMBEDDINGS)
        and not owners[parameter][0].sparse
        and parameter.shape[0] >= LARGE_TABLE
    }


def parameter_owners(module: nn.Module) -> dict[Tensor, list[nn.Module]]:
    """The modules that own each parameter directly; a tied parameter has several."""
    owners: dict[Tensor, list[nn.Module]] = defaultdict(list)
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[parameter].append(part)
    return owners


def shortened_rows(module: nn.Module) -> set[Tensor]:
    """Weights of embeddings with ``max_norm``: a forward pass rescales the rows that it reads, which differ by rank."""
    tables = [part for part in module.modules() if isinstance(part, EMBEDDINGS)]
    return {table.weight for table in tables if table.max_norm is not None}


def dtype_name(variable: str, tensor: Tensor) -> DType:
    """The name of a tensor's dtype in documents; for a complex tensor the dtype of its parts.

    Raises:
        WorkloadError: gradients of this dtype cannot be synchronized.
    """
    name = str(tensor.dtype.to_real()).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise WorkloadError(f"variable '{variable}': dtype {name} is not one of {', '.join(DTYPE_BYTES)}")
    return name  # type: ignore[return-value]  # membership in DTYPE_BYTES is what DType lists


def title(module: nn.Module) -> str:
    """The class name of a module, without the wrapper of ``torch.compile``."""
    return type(getattr(module, COMPILED, module)).__name__


def _is_sparse_embedding(module: nn.Module) -> bool:
    return isinstance(module, EMBEDDINGS) and module.sparse

"""A workload from a module's parameters alone, without running it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from itertools import chain

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload.spec import DTYPE_BYTES, DType, Variable, Workload

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
COMPILED = "_orig_mod"
"""The attribute under which ``torch.compile`` keeps the module that it wraps."""


IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute in which a module names the parameters and buffers that ranks do not share, as for DDP."""


def shared_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``named_parameters()`` but for those that the module tells DDP to ignore."""
    ignored = frozenset(getattr(module, IGNORED, ()))
    return (found for found in module.named_parameters() if found[0] not in ignored)


def shared_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``named_buffers()`` but for those that the module tells DDP to ignore."""
    ignored = frozenset(getattr(module, IGNORED, ()))
    return (found for found in module.named_buffers() if found[0] not in ignored)


def variable_names(module: nn.Module, also: Container[nn.Parameter] = ()) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters and the names that plans know them by.

    They come in ``named_parameters()`` order: frozen ones are left out but for those in ``also``, and so are those
    that the module tells DDP to ignore; tied ones appear once, and compiling the module or a part of it changes no
    name.
    """
    return [
        (".".join(part for part in name.split(".") if part != COMPILED), parameter)
        for name, parameter in shared_parameters(module)
        if parameter.requires_grad or parameter in also
    ]


def describe(module: nn.Module, name: str | None = None, also: Container[nn.Parameter] = ()) -> Workload:
    """The workload of ``module`` as far as its parameters tell: all times are unknown.

    A parameter that only embeddings with ``sparse=True`` hold is ``sparse``; all others are
    ``dense``, as only a run shows which rows it touches (see ``capture``). A complex parameter is
    described as reals with a last axis of two, the real and the imaginary part.

    Args:
        module: any module, a ``LightningModule`` included.
        name: name of the workload; the class name by default.
        also: frozen parameters that it describes too, for they train at times.

    Raises:
        WorkloadError: if nothing is trainable, a dtype cannot be synchronized, or a lazy part has
            not met its first batch.
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


def parameter_owners(module: nn.Module) -> dict[Tensor, list[nn.Module]]:
    """The modules that hold each parameter directly; a tied one has several."""
    owners: dict[Tensor, list[nn.Module]] = defaultdict(list)
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[parameter].append(part)
    return owners


def shortened_rows(module: nn.Module) -> set[Tensor]:
    """Weights of tables with ``max_norm``: a forward pass shortens the rows that it reads, on each rank other ones."""
    tables = [part for part in module.modules() if isinstance(part, EMBEDDINGS)]
    return {table.weight for table in tables if table.max_norm is not None}


def dtype_name(variable: str, tensor: Tensor) -> DType:
    """The document's name of a tensor's dtype; of a complex one, that of its parts.

    Raises:
        WorkloadError: if gradients of this dtype are not synchronized.
    """
    name = str(tensor.dtype.to_real()).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise WorkloadError(f"variable '{variable}': dtype {name} is not one of {', '.join(DTYPE_BYTES)}")
    return name  # type: ignore[return-value]  # membership in DTYPE_BYTES is what DType lists


def title(module: nn.Module) -> str:
    """The class of a module, seen through ``torch.compile``."""
    return type(getattr(module, COMPILED, module)).__name__


def _is_sparse_embedding(module: nn.Module) -> bool:
    return isinstance(module, EMBEDDINGS) and module.sparse

"""Handles parts of a module under ``torch.compile``, which cannot trace values that are split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.workload.description import COMPILED


class Uncompiled:
    """Removes the compiled wrappers from the parts of a module, so that paths are those of the original module.

    Args:
        module: the module, which is changed in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._undo: dict[str, Callable[[], Any]] = {}
        self._parts: dict[str, nn.Module] = {}
        self._again: list[nn.Module] = []
        self._take_off(module, "")

    @property
    def compiled(self) -> tuple[nn.Module, ...]:
        """The parts that are compiled again."""
        return tuple(self._again)

    def compile_again(self, keep: Callable[[nn.Module], bool] = lambda part: True) -> list[str]:
        """Restore the compiled wrappers where possible.

        Args:
            keep: whether a part can be compiled.

        Returns:
            Paths of the parts that stay uncompiled.
        """
        left = []
        for path, undo in reversed(self._undo.items()):
            if keep(self._parts[path]):
                undo()
                self._again.append(self._parts[path])
            else:
                left.append(path)
        return left[::-1]

    def _take_off(self, module: nn.Module, path: str) -> None:
        own = vars(module)
        compiled = own.get("_compiled_call_impl")
        if compiled is not None:
            own["_compiled_call_impl"] = None
            self._parts[path] = module
            self._undo[path] = lambda: own.update(_compiled_call_impl=compiled)
        for name, child in list(module.named_children()):
            place = f"{path}.{name}" if path else name
            inner = child._modules.get(COMPILED)
            if inner is not None:
                module._modules[name] = inner
                self._parts[place] = inner
                self._undo[place] = _putting_back(module, name, child)
                child = inner
            self._take_off(child, place)


def _putting_back(module: nn.Module, name: str, child: nn.Module) -> Callable[[], None]:
    def put_back() -> None:
        module._modules[name] = child

    return put_back


def takes_home_values(module: nn.Module) -> None:
    """Convert the inputs of a compiled part to plain tensors of this rank's own samples."""

    def bring(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return bring_home((args, kwargs))

    module.register_forward_pre_hook(bring, with_kwargs=True)

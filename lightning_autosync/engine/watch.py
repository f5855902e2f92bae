"""Whether a module still trains the parameters that the ranks agreed on."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

from lightning_autosync.workload import shared_parameters

Facts = dict[str, dict[str, Any]]
"""What ranks must have in common, by parameter."""


_FORM = operator.attrgetter("shape", "dtype")
_DTYPE = operator.attrgetter("dtype")
_DETAIL_EVERY = 32
"""Looks between two at what hardly ever changes."""


class ParameterWatch:
    """Remembers the parameters of a module, and tells when they are others.

    `changed` is asked in every step. It looks only at what it remembers: some ten microseconds for a
    hundred parameters. Shapes, which autograd does not let change, it looks at now and then.

    Args:
        module: whose parameters, in whatever submodule; not those that it tells DDP to ignore.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._accepted: dict[str, nn.Parameter] = {}
        self._replacements: dict[str, int] = {}
        self._looks = 0
        self._digests: dict[Hashable, int] = {}
        self.accept()

    def changed(self) -> bool:
        """Whether parameters came, went, were replaced, frozen or unfrozen, or got another shape or dtype."""
        if self._same():
            return False
        found = dict(shared_parameters(self._module))
        alike = (
            self._identical(found)
            and _trainable(self._parameters) == self._trainable
            and list(map(_FORM, self._parameters)) == self._forms
        )
        if alike:
            self._remember_places()  # submodules came or went, which have no parameters
            return False
        return True

    def replaced(self) -> list[str]:
        """Names of the parameters that came, went or were replaced."""
        found = dict(shared_parameters(self._module))
        names = [*self._accepted, *(name for name in found if name not in self._accepted)]
        return [name for name in names if found.get(name) is not self._accepted.get(name)]

    def reformed(self) -> list[str]:
        """Names of the parameters that got another shape or dtype."""
        forms = dict(zip(map(id, self._parameters), self._forms, strict=True))
        return [name for name, parameter in self._accepted.items() if _FORM(parameter) != forms[id(parameter)]]

    def accept(self) -> None:
        """From now on, the parameters as they are now are the ones to keep."""
        found = dict(shared_parameters(self._module))
        if not self._identical(found):
            for name in self.replaced():
                self._replacements[name] = self._replacements.get(name, -1) + 1
            self._digests.clear()
        self._accepted = found
        self._remember_places()

    def facts(self) -> Facts:
        """What the parameters are now, in plain data."""
        replaced = set(self.replaced())
        return {
            name: {
                "shape": list(parameter.shape),
                "dtype": str(parameter.dtype),
                "strides": list(parameter.stride()),
                "requires_grad": parameter.requires_grad,
                "replacements": self._replacements.get(name, -1) + (name in replaced),
            }
            for name, parameter in shared_parameters(self._module)
        }

    def digest(self) -> int:
        """A number of 63 bits that is equal on two ranks if their `facts` are."""
        found = dict(shared_parameters(self._module))
        if not self._identical(found):
            return _digest(self.facts())
        # Who freezes parameters in turn comes back to few combinations.
        state = tuple((parameter.requires_grad, *_FORM(parameter)) for parameter in found.values())
        if state not in self._digests:
            self._digests[state] = _digest(self.facts())
        return self._digests[state]

    def _same(self) -> bool:
        """Whether all is as `accept` found it; `map` keeps these loops out of the interpreter."""
        self._looks += 1
        return (
            list(map(len, self._containers)) == self._sizes
            and all(map(operator.is_, map(dict.get, self._holders, self._keys), self._held))
            and _trainable(self._parameters) == self._trainable
            and list(map(_DTYPE, self._parameters)) == self._dtypes
            and (self._looks % _DETAIL_EVERY != 0 or list(map(_FORM, self._parameters)) == self._forms)
        )

    def _identical(self, found: dict[str, nn.Parameter]) -> bool:
        return found.keys() == self._accepted.keys() and all(
            found[name] is parameter for name, parameter in self._accepted.items()
        )

    def _remember_places(self) -> None:
        modules = list(self._module.modules())
        # Those of compiled TorchScript, which nobody changes, are no dictionaries.
        self._containers: list[dict[str, Any]] = [
            own for module in modules for own in (module._parameters, module._modules) if isinstance(own, dict)
        ]
        self._sizes = list(map(len, self._containers))
        places = [(own, key, held) for own in self._containers for key, held in own.items() if held is not None]
        self._holders = [own for own, _, _ in places]
        self._keys = [key for _, key, _ in places]
        self._held = [held for _, _, held in places]
        self._parameters = [parameter for _, parameter in shared_parameters(self._module)]
        self._trainable = _trainable(self._parameters)
        self._dtypes = list(map(_DTYPE, self._parameters))
        self._forms = list(map(_FORM, self._parameters))


def difference(facts: Sequence[Facts]) -> str:
    """The first parameter in which ranks differ, and how; empty if they are alike.

    Args:
        facts: of every rank, in rank order.
    """
    for rank, theirs in enumerate(facts):
        for name in [*facts[0], *(name for name in theirs if name not in facts[0])]:
            if name not in theirs or name not in facts[0]:
                has, lacks = (0, rank) if name in facts[0] else (rank, 0)
                return f"parameter '{name}' is there on rank {has}, but not on rank {lacks}"
            for what, value in theirs[name].items():
                if value != facts[0][name][what]:
                    return _told(name, what, rank, value, facts[0][name][what])
    return ""


def _told(name: str, what: str, rank: int, value: Any, first: Any) -> str:
    if what == "replacements":
        who, other = (rank, 0) if value > first else (0, rank)
        return f"parameter '{name}' was replaced by another tensor on rank {who}, but not on rank {other}"
    return f"parameter '{name}': {what} is {value} on rank {rank}, and {first} on rank 0"


def _trainable(parameters: list[nn.Parameter]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def _digest(facts: Facts) -> int:
    text = json.dumps(facts, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

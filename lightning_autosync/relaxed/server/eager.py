"""Pushing while backward still runs: a shard leaves when the last of its gradients is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.servers import Shard


class EagerPushes:
    """Watches gradients become complete.

    Args:
        parameters: by name.
        shards: those that may leave early.
        push: sends a shard's gradient.

    Attributes:
        enabled: whether the backward pass that runs is the last of the step; off while gradients are accumulated.
        pushed: indices of the shards that have left in this step.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shards: Iterable[Shard], push: Callable[[Shard], None]
    ) -> None:
        self.enabled = True
        self.pushed: set[int] = set()
        self._push = push
        self._shards = tuple(shards)
        self._of: dict[str, list[Shard]] = {}
        for shard in self._shards:
            for variable in {piece.variable for piece in shard.pieces}:
                self._of.setdefault(variable, []).append(shard)
        self._missing: dict[int, int] = {}
        self.clear()
        self._handles = [
            parameters[name].register_post_accumulate_grad_hook(self._hook(name)) for name in sorted(self._of)
        ]

    def clear(self) -> None:
        """Begin a step."""
        self.pushed.clear()
        self._missing = {shard.index: len({piece.variable for piece in shard.pieces}) for shard in self._shards}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        shards = self._of[name]

        def on_gradient(_: Tensor) -> None:
            if not self.enabled:
                return
            for shard in shards:
                if shard.index in self.pushed:
                    raise ExchangeError(
                        f"the gradient of parameter '{name}' changed after it was pushed; while gradients are "
                        "accumulated, eager pushes must be off"
                    )
                self._missing[shard.index] -= 1
                if self._missing[shard.index] == 0:
                    self.pushed.add(shard.index)
                    self._push(shard)

        return on_gradient

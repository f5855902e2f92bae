"""Steps on batches for which memory does not suffice: computed in parts, with the same gradient."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.strategy.first_batch import silent
from lightning_autosync.strategy.shares.losses import loss_weight_of

_PLAIN = (str, bytes, int, float, type(None))
_ON_CPU = "can't allocate memory"
"""In the message of torch's error on CPUs, which has no class of its own."""


def is_memory_error(error: BaseException) -> bool:
    """Whether memory did not suffice, on the host or on an accelerator."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _ON_CPU in str(error)
    )


@dataclass
class _Step:
    """The present step: how to compute a part of its batch of ``samples``, and the loss of the whole batch."""

    compute: Callable[[Any], Any]
    batch: Any
    samples: int
    loss: Tensor | None = None
    divided: bool = False


class PartialSteps:
    """Computes steps of automatic optimization in parts, once memory did not suffice for a whole batch.

    The forward pass of a step is then made twice: without gradients for the value of the loss, and part by part in the
    backward pass.

    Args:
        module: the user's module.
        accumulate: a context in which backward passes only accumulate gradients.
        track: begins to track whose gradients arrive.
        arrived: whether the gradient of a parameter has been accumulated since then.

    Attributes:
        limit: most samples for which memory suffices; infinite as long as it always did.
    """

    def __init__(
        self,
        module: nn.Module,
        accumulate: Callable[[], AbstractContextManager[None]],
        track: Callable[[], None],
        arrived: Callable[[nn.Parameter], bool],
    ) -> None:
        self._module, self._accumulate, self._track, self._arrived = module, accumulate, track, arrived
        self.limit = math.inf
        self._step: _Step | None = None

    def forward(
        self,
        whole: Callable[[], Any],
        compute: Callable[[Any], Any],
        prepare: Callable[[], None],
        batch: Any,
        samples: int,
    ) -> Any:
        """The output of a training step.

        Args:
            whole: computes the output of the batch.
            compute: computes the output of a part of it.
            prepare: does what ``whole`` does on all ranks together, before a batch that is computed in parts.
            batch: the batch.
            samples: its number of samples.
        """
        self._step = step = _Step(compute, batch, samples)
        if samples > self.limit:
            prepare()
        else:
            try:
                output = whole()
            except Exception as error:
                if not _can_divide(batch, samples, error):
                    raise
                self._shrink(samples, error)
            else:
                step.loss = _loss(output)
                return output
        return self._forward_in_parts(step)

    def backward(self, run: Callable[..., None], loss: Tensor, factor: float) -> None:
        """The backward pass of the step.

        Args:
            run: makes the backward pass of a loss; keyword arguments go to ``Tensor.backward``.
            loss: the loss, as the loop scaled it.
            factor: ``loss`` divided by the loss of the step.
        """
        step, self._step = self._step, None
        if step is None:
            run(loss)
            return
        left = [each for each in self._module.parameters() if each.requires_grad]
        if not step.divided:
            try:
                self._track()
                run(loss)
            except Exception as error:
                left = self._after(error, step.batch, step.samples, left)
            else:
                return
            _free(loss, step.loss)
        self._in_parts(partial(self._run, step.compute, run), step.batch, step.samples, factor, left, True)

    def _run(
        self,
        compute: Callable[[Any], Any],
        run: Callable[..., None],
        part: Any,
        samples: int,
        factor: float,
        left: list[nn.Parameter],
        final: bool,
    ) -> None:
        """Make the passes of a part of a batch; in smaller parts, if memory does not suffice.

        Args:
            compute: computes the output of a part.
            run: makes the backward pass of a loss.
            part: the part.
            samples: its number of samples.
            factor: the factor of its loss.
            left: parameters whose gradients are missing.
            final: whether it is the last part of the batch, after which gradients are synchronized.
        """
        loss = None
        try:
            with nullcontext() if final else self._accumulate():
                with silent(self._module):
                    loss = _loss(compute(part))
                assert loss is not None
                self._track()
                run(loss * factor, inputs=left)
        except Exception as error:
            left = self._after(error, part, samples, left)
        else:
            return
        _free(loss)
        self._in_parts(partial(self._run, compute, run), part, samples, factor, left, final)

    def _in_parts(
        self,
        run: Callable[..., None],
        batch: Any,
        samples: int,
        factor: float,
        left: list[nn.Parameter],
        final: bool,
    ) -> None:
        parts = self._parts(batch, samples)
        for number, (part, length, share) in enumerate(parts):
            run(part, length, share * factor, left, final and number + 1 == len(parts))

    def _after(self, error: BaseException, batch: Any, samples: int, left: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that got no gradient in a backward pass that failed; raises errors that smaller parts keep.

        Gradients that the pass accumulated are those of the whole ``batch``.
        """
        if not _can_divide(batch, samples, error):
            raise error
        self._shrink(samples, error)
        return [each for each in left if not self._arrived(each)]

    def _forward_in_parts(self, step: _Step) -> Any:
        """The output of a step, without its graph; metrics are logged once, for the last part."""
        while True:
            parts = self._parts(step.batch, step.samples)
            total, output = torch.zeros(()), None
            try:
                for number, (part, _, share) in enumerate(parts):
                    with ExitStack() as stack:
                        stack.enter_context(torch.no_grad())
                        if number + 1 < len(parts):
                            stack.enter_context(silent(self._module))
                        output = step.compute(part)
                    loss = _loss(output)
                    if loss is None:  # the user skips this batch
                        self._step = None
                        return output
                    total = total.to(loss.device) + share * loss.detach()
            except Exception as error:
                size = int(min(self.limit, step.samples))
                if size < 2 or not _can_divide(step.batch, step.samples, error):
                    raise
                self._shrink(size, error)
                continue
            step.divided = True
            total = total.requires_grad_()
            return {**output, "loss": total} if isinstance(output, Mapping) else total

    def _shrink(self, samples: int, error: BaseException) -> None:
        """Let batches have at most half as many samples."""
        self.limit = samples // 2
        warnings.warn(
            f"AutoSync: rank {dist.get_rank()} has no memory for {samples} samples ({type(error).__name__}: {error}). "
            f"It computes at most {self.limit} at once, and gets a smaller share of the next batches",
            stacklevel=2,
        )
        error.__traceback__ = None  # its frames keep what the failed pass allocated
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def _parts(self, batch: Any, samples: int) -> list[tuple[Any, int, float]]:
        """The parts of a batch, their numbers of samples, and their shares in its loss."""
        size = int(min(self.limit, samples))
        begins = range(0, samples, size)
        parts = [cut(batch, samples, slice(begin, begin + size)) for begin in begins]
        lengths = [min(size, samples - begin) for begin in begins]
        weigh = loss_weight_of(self._module)
        weights = lengths if weigh is None else [float(weigh(part)) for part in parts]
        whole = sum(weights) or 1.0
        return [(part, own, weight / whole) for part, own, weight in zip(parts, lengths, weights, strict=True)]


def _can_divide(batch: Any, samples: int, error: BaseException) -> bool:
    """Whether smaller parts of a batch may help against ``error``."""
    if samples < 2 or not is_memory_error(error):
        return False
    with suppress(_IndivisibleError):
        cut(batch, samples, slice(0, 1))
        return True
    return False


def _free(*losses: Tensor | None) -> None:
    """Free what the graphs of losses keep for the backward pass."""
    for loss in losses:
        if loss is not None:
            with suppress(RuntimeError):  # a view keeps it
                loss.detach_()


class _IndivisibleError(Exception):
    """A batch has something of which it is not known which part belongs to which sample."""


def cut(value: Any, samples: int, part: slice) -> Any:
    """A part of a batch: of each tensor, whose first axis has the size ``samples``, and of each list of other values.

    Args:
        value: a batch of tensors, mappings, lists and tuples.
        samples: number of samples in it.
        part: which samples to keep.

    Raises:
        _IndivisibleError: it has other values, or tensors of another size.
    """
    if isinstance(value, Tensor):
        if value.dim() and len(value) != samples:
            raise _IndivisibleError
        return value[part] if value.dim() else value
    if isinstance(value, MutableMapping):
        kept = copy.copy(value)
        kept.update({name: cut(each, samples, part) for name, each in value.items()})
        return kept
    if isinstance(value, list | tuple):
        if len(value) == samples and all(isinstance(each, _PLAIN) for each in value):
            return value[part]
        parts = [cut(each, samples, part) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, _PLAIN):
        return value
    raise _IndivisibleError


def _loss(output: Any) -> Tensor | None:
    """The loss in the output of a training step."""
    found = output.get("loss") if isinstance(output, Mapping) else output
    return found if isinstance(found, Tensor) else None

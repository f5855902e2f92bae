"""Steps on batches for which memory does not suffice: computed in parts, with the same gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.engine import engine
from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.first_batch import silent
from lightning_autosync.strategy.shares.direct_calls import DIRECT, DirectCalls
from lightning_autosync.strategy.shares.losses import loss_weight_of
from lightning_autosync.strategy.shares.parts import IndivisibleError, Part, cut, loss_of, parts_of
from lightning_autosync.workload.preservation import preserved

_NO_CLASS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In messages of torch's errors that have no class of their own: on CPUs, of the CUDA driver, and of cuBLAS."""


def is_memory_error(error: BaseException) -> bool:
    """Whether memory did not suffice, on the host or on an accelerator."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_CLASS)
    )


@dataclass
class _Step:
    """The present step: how to compute a part of its batch of ``samples``, and the loss of the whole batch."""

    compute: Callable[[Any], Any]
    batch: Any
    samples: int
    loss: Tensor | None = None
    divided: bool = False


@dataclass(frozen=True)
class _Backward:
    """How to make the passes of a part: ``compute`` makes its output, and ``run`` the backward pass of a loss."""

    compute: Callable[[Any], Any]
    run: Callable[..., None]


class PartialSteps:
    """Computes steps of automatic optimization in parts, once memory did not suffice for a whole batch.

    The forward pass of a step is then made twice: without gradients for the value of the loss, and part by part in the
    backward pass. Buffers count only the second one, and both draw the same random numbers.

    An attempt is not repeated if it has called a collective operation, because ranks would then make different numbers
    of them, and not if memory ran out within the engine, which may have counted the gradient already.

    Args:
        accumulate: a context in which backward passes only accumulate gradients.
        track: begins to track whose gradients arrive.
        arrived: whether the gradient of a parameter has been accumulated since then.

    Attributes:
        limit: most samples for which memory suffices; infinite as long as it always did.
        calls: collective operations that an attempt calls directly.
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
        self.calls = DirectCalls()
        self._collective = ""
        self._direct = False

    def note_collective(self, what: str) -> None:
        """Note that the present attempt calls a collective operation.

        Raises:
            PlanError: a part of a batch calls it, and other ranks do not call it as often.
        """
        self.calls.note(what)
        self._collective = what

    def _refuse(self, what: str) -> NoReturn:
        raise PlanError(
            f"batch_shares: training_step calls {what}, but memory suffices for a part of this rank's batch only, "
            "and ranks would call it different numbers of times; use a smaller batch_size, or log with "
            "self.log(..., sync_dist=True)"
        )

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
            samples: number of samples in the batch.
        """
        self._step = step = _Step(compute, batch, samples)
        self._collective, self._direct = "", False
        if samples > self.limit:
            prepare()
        else:
            try:
                output = self._counted(whole)
            except Exception as error:
                if not self._can_repeat(batch, samples, error):
                    raise
                self._shrink(samples, error)
            else:
                step.loss = loss_of(output)
                return output
        with preserved(), _restored(list(self._module.buffers())):
            return self._forward_in_parts(step)

    def _counted(self, attempt: Callable[[], Any]) -> Any:
        """The output of an attempt, with a note if it calls operations of torch.distributed directly."""
        self.calls.begin()
        try:
            return attempt()
        finally:
            self._direct = self.calls.number > 0

    # Steps whose batches are cut in any case (see `MicroBatches`), which may have to be cut into smaller parts

    def begin(self) -> None:
        """Begin a step whose parts the caller computes."""
        self._collective, self._direct = "", False

    def smaller(self, error: Exception, batch: Any, samples: int) -> list[Part]:
        """The parts in which to compute a part of a batch whose forward pass has failed with ``error``.

        Raises:
            Exception: ``error``, if it is no lack of memory, or the part cannot be cut.
        """
        if not self._can_repeat(batch, samples, error):
            raise error
        self._shrink(samples, error)
        return self._parts(batch, samples)

    def accumulate(
        self, compute: Callable[[Any], Any], run: Callable[..., None], loss: Tensor, batch: Any, samples: int
    ) -> None:
        """The backward pass of the loss of a part, by ``run``, which only accumulates gradients."""
        left = self._attempt(run, loss, batch, samples)
        if left is not None:
            _free(loss)
            self._in_parts(_Backward(compute, run), (batch, samples, 1.0), left, False)

    def keep_last(self, compute: Callable[[Any], Any], loss: Tensor, batch: Any, samples: int) -> None:
        """Let `backward` make the backward pass of the last part of the step, whose loss is ``loss``."""
        self._step = _Step(compute, batch, samples, loss)

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
        self._collective = ""  # parts log nothing, so they repeat no reduction of a logged value
        left: list[nn.Parameter] | None = self._trained()
        if not step.divided:
            left = self._attempt(run, loss, step.batch, step.samples)
            if left is None:
                return
            _free(loss, step.loss)
        assert left is not None
        self._in_parts(_Backward(step.compute, run), (step.batch, step.samples, factor), left, True)

    def _attempt(self, run: Callable[..., None], loss: Tensor, batch: Any, samples: int) -> list[nn.Parameter] | None:
        """Make a backward pass; the parameters whose gradients are missing if memory did not suffice, else None."""
        try:
            self._track()
            run(loss)
        except Exception as error:
            return self._after(error, batch, samples, self._trained())
        return None

    def _run(self, passes: _Backward, part: Part, left: list[nn.Parameter], final: bool) -> None:
        """Make the passes of a part of a batch; in smaller parts, if memory does not suffice.

        Args:
            passes: how to make them.
            part: the part.
            left: parameters whose gradients are missing.
            final: whether it is the last part of the batch, after which gradients are synchronized.
        """
        batch, samples, factor = part
        loss = None
        # Reentrant checkpoints refuse `inputs`, so it is given only where it makes a difference.
        chosen = {} if len(left) == len(self._trained()) else {"inputs": left}
        try:
            with nullcontext() if final else self._accumulate():
                with self._apart():
                    loss = loss_of(passes.compute(batch))
                assert loss is not None
                self._track()
                passes.run(loss * factor, **chosen)
        except Exception as error:
            left = self._after(error, batch, samples, left)
        else:
            return
        _free(loss)
        self._in_parts(passes, part, left, final)

    def _in_parts(self, passes: _Backward, whole: Part, left: list[nn.Parameter], final: bool) -> None:
        batch, samples, factor = whole
        parts = self._parts(batch, samples)
        for number, (part, length, share) in enumerate(parts):
            self._run(passes, (part, length, share * factor), left, final and number + 1 == len(parts))

    def _after(self, error: BaseException, batch: Any, samples: int, left: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that got no gradient in a backward pass that failed; raises errors that smaller parts keep.

        Gradients that the pass accumulated are those of the whole ``batch``.
        """
        # Hooks run after the gradient is accumulated, and before it is noted that it arrived.
        hooked = any(getattr(each, "_post_accumulate_grad_hooks", None) for each in left)
        if hooked or _within_engine(error) or not self._can_repeat(batch, samples, error):
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
                    with torch.no_grad(), self._apart() if number + 1 < len(parts) else nullcontext():
                        output = step.compute(part)
                    loss = loss_of(output)
                    if loss is None:  # the user skips this batch
                        self._step = None
                        return output
                    total = total.to(loss.device) + share * loss.detach()
            except Exception as error:
                size = int(min(self.limit, step.samples))
                if size < 2 or not self._can_repeat(step.batch, step.samples, error):
                    raise
                self._shrink(size, error)
                continue
            step.divided = True
            total = total.requires_grad_()
            return {**output, "loss": total} if isinstance(output, Mapping) else total

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """The context of a part that logs nothing, and calls no collective operation."""
        with self.calls.within_part(self._refuse), silent(self._module):
            yield

    def _can_repeat(self, batch: Any, samples: int, error: BaseException) -> bool:
        """Whether this rank may make another attempt, in smaller parts, after ``error``."""
        if not _can_divide(batch, samples, error):
            return False
        called = self._collective or (DIRECT if self._direct else "")
        if called:
            warnings.warn(
                f"AutoSync: rank {dist.get_rank()} has no memory for {samples} samples, and cannot compute them in "
                f"parts, because training_step has called {called} before memory ran out: ranks would call "
                "it different numbers of times. Use a smaller batch_size",
                stacklevel=2,
            )
        return not called

    def _trained(self) -> list[nn.Parameter]:
        return [each for each in self._module.parameters() if each.requires_grad]

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

    def _parts(self, batch: Any, samples: int) -> list[Part]:
        """The parts of a batch for which memory suffices."""
        return parts_of(batch, samples, int(min(self.limit, samples)), loss_weight_of(self._module))


@contextmanager
def _restored(buffers: list[Tensor]) -> Iterator[None]:
    """Restore the values of buffers at the end of the block."""
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _within_engine(error: BaseException) -> bool:
    """Whether an error was raised while the engine took a gradient that autograd had accumulated."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__") == engine.__name__:
            return True
        frame = frame.tb_next
    return False


def _can_divide(batch: Any, samples: int, error: BaseException) -> bool:
    """Whether smaller parts of a batch may help against ``error``."""
    if samples < 2 or not is_memory_error(error):
        return False
    with suppress(IndivisibleError):
        cut(batch, samples, slice(0, 1))
        return True
    return False


def _free(*losses: Tensor | None) -> None:
    """Free what the graphs of losses keep for the backward pass."""
    for loss in losses:
        if loss is not None:
            with suppress(RuntimeError):  # a view keeps it
                loss.detach_()

"""What a checkpoint keeps of replicas that do not march in step, gathered from all ranks and dealt out again."""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pydantic import Field, field_validator
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import NotRequired, TypedDict

from lightning_autosync.documents import Record, checked, shortened
from lightning_autosync.errors import PeerLost, PlanError
from lightning_autosync.relaxed.base import Synchronizer
from lightning_autosync.relaxed.mesh import Mesh
from lightning_autosync.strategy.checkpoint import KEY, RELAXED_FORMAT, format_of
from lightning_autosync.strategy.served_state import state_by_name, with_state


class _Rank(TypedDict):
    """What a rank keeps: of its synchronizer, and of its optimizer where servers do not."""

    synchronizer: dict[str, Any]
    optimizer: NotRequired[dict[str, Any]]


class _Entry(Record):
    """What `RelaxedCheckpoint.gather` returns."""

    format: str
    plan: Annotated[str, Field(max_length=64)]
    ranks: dict[int, _Rank]

    @field_validator("ranks")
    @classmethod
    def _check_ranks(cls, ranks: dict[int, _Rank]) -> dict[int, _Rank]:
        if 0 not in ranks:
            raise ValueError("rank 0 is missing, as which ranks go on that are not in it")
        return ranks


class RelaxedCheckpoint:
    """One rank's part of the checkpoints of a job.

    Args:
        mesh: of all ranks.
        mode: of the plan's consistency.
        served: whether servers keep the optimizer's state.
        timeout: seconds to wait for another rank's part.
    """

    def __init__(self, mesh: Mesh, mode: str, served: bool, timeout: float) -> None:
        self._mesh, self._mode, self._served, self._timeout = mesh, mode, served, timeout
        self._synchronizer: Synchronizer | None = None
        self._optimizer: Optimizer | None = None
        self._names: dict[Tensor, str] = {}
        self._loaded: dict[str, Any] | None = None
        self._position: dict[str, Any] | None = None

    def begin(self, synchronizer: Synchronizer, optimizer: Optimizer, variables: Iterable[tuple[str, Tensor]]) -> None:
        """Give a new synchronizer what `restore` got, and servers what the optimizer remembers."""
        self._synchronizer, self._optimizer = synchronizer, optimizer
        self._names = {parameter: name for name, parameter in variables}
        loaded, self._loaded = self._loaded, None
        if self._served:
            position = {"step": 0, "progress": 0.0} if loaded is None else loaded["synchronizer"]
            # Rank 0 tells the servers what to begin with; the others look at theirs, so that all refuse what is wrong.
            synchronizer.load_state_dict({**position, "optimizer": state_by_name(optimizer, self._names)})
            optimizer.state.clear()
        elif loaded is not None:
            try:
                synchronizer.load_state_dict(loaded["synchronizer"])
                optimizer.load_state_dict(loaded["optimizer"])
            except (
                LookupError,
                TypeError,
                ValueError,
                AttributeError,
                RuntimeError,
            ) as cause:
                raise PlanError(
                    f"checkpoint: {KEY}: ranks: the state of '{self._mode}' or of the optimizer does "
                    f"not fit: {shortened(f'{type(cause).__name__}: {cause}', 300)}"
                ) from None

    def end(self) -> None:
        """The synchronizer is closed."""
        self._synchronizer = None

    def optimizer_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's own state (``saved``) with what servers keep of it, on rank 0; all ranks must have met."""
        if self._synchronizer is None or self._optimizer is None or not self._served or self._mesh.rank != 0:
            return saved
        state = self._synchronizer.state_dict()
        self._position = {"step": state["step"], "progress": state["progress"]}
        return with_state(saved, self._optimizer, self._names, state["optimizer"])

    def gather(self) -> dict[str, Any] | None:
        """The checkpoint's entry on rank 0, None elsewhere; all ranks must have met."""
        if self._synchronizer is None or self._optimizer is None:
            left = ", nor any of the optimizer, which servers kept" if self._served else ""
            rank_zero_warn(f"this checkpoint is made outside of fit(): it has no state of the synchronization{left}")
            return None
        if self._served:
            if self._mesh.rank != 0:
                return None
            state, self._position = self._position or self._synchronizer.state_dict(), None
            return self._entry({0: {"synchronizer": {name: state[name] for name in ("step", "progress")}}})
        own = {"synchronizer": self._synchronizer.state_dict(), "optimizer": self._optimizer.state_dict()}
        if self._mesh.rank != 0:
            content = _encode(own)
            self._mesh.send(0, "checkpoint", {}, [memoryview(content)]).wait(self._timeout)
            return None
        ranks: dict[int, Any] = {0: own}
        for rank in sorted(self._synchronizer.met - {0}):
            with suppress(PeerLost):  # it will go on as rank 0 did
                mail = self._mesh.receive("checkpoint", sender=rank, timeout=self._timeout)
                ranks[rank] = torch.load(io.BytesIO(mail.payload), map_location="cpu", weights_only=True)
        return self._entry(ranks)

    def restore(self, entry: dict[str, Any] | None, steps: int) -> None:
        """Go on from what `gather` returned, a rank that was lost then as rank 0; before the first step.

        The optimizer has its state already. From a checkpoint of another kind of plan, what only this kind keeps begins
        anew, as after ``steps`` steps.

        Raises:
            PlanError: the entry is of another version, or none; the message names the field.
        """
        kind = "" if entry is None else format_of(entry)
        if entry is not None and kind != RELAXED_FORMAT and kind.startswith(RELAXED_FORMAT.split("/")[0] + "/"):
            raise PlanError(
                f"checkpoint: its state is '{shortened(kind)}', and this version reads '{RELAXED_FORMAT}'; go on with "
                "the version that made it, or load its weights alone"
            )
        found, ranks = "a plan in step, exact or compressed", dict[int, Any]()
        if kind == RELAXED_FORMAT:
            state = checked(_Entry, entry, f"checkpoint: {KEY}", PlanError)
            found, ranks = state.plan, state.ranks
        if ranks and found == self._mode:
            own = ranks.get(self._mesh.rank, ranks[0])
            if not self._served and "optimizer" not in own:
                raise PlanError(f"checkpoint: {KEY}: ranks: no optimizer's state, which every rank of '{found}' has")
            self._loaded = own
        elif self._served:
            self._loaded = {"synchronizer": {"step": steps, "progress": float(steps)}}
        else:
            rank_zero_warn(
                f"the checkpoint was made under '{found}': every rank goes on from its model and its optimizer's "
                f"state, and the rest of what '{self._mode}' keeps begins anew"
            )

    def _entry(self, ranks: dict[int, Any]) -> dict[str, Any]:
        return {"format": RELAXED_FORMAT, "plan": self._mode, "ranks": ranks}


def _encode(state: dict[str, Any]) -> bytearray:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return bytearray(buffer.getbuffer())

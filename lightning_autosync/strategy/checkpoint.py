"""The strategy's entry in checkpoints: gathered from all ranks for saving, distributed to all ranks after loading."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from pydantic import ConfigDict, Field, NonNegativeFloat, field_validator
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import NotRequired, TypedDict

from lightning_autosync.documents import Count, Index, Record, checked, shortened, shown
from lightning_autosync.engine.collectives import group_device
from lightning_autosync.engine.compressor_state import ParameterState, ParameterStates
from lightning_autosync.errors import PeerLost, PlanError
from lightning_autosync.relaxed.base import Synchronizer
from lightning_autosync.relaxed.transport.mesh import Mesh

KEY = "autosync"
"""Key of the strategy's entry in a checkpoint."""
FORMAT = "autosync-state/2"
RELAXED_FORMAT = "autosync-relaxed/2"
"""Format of the entry of relaxed replicas, which has no state of compressors."""


def gather_state(state: ParameterStates, group: dist.ProcessGroup | None = None) -> dict[str, Any] | None:
    """The checkpoint's entry on rank 0; None elsewhere, and if compressors keep no state; collective.

    Args:
        state: this rank's state by variable; names and shapes are the same on all ranks.
        group: the ranks; None is the default group.

    Returns:
        Plain values and tensors, readable with ``torch.load(weights_only=True)``; tensors have a new first axis of
        ranks.
    """
    gathered = {
        name: {
            "compressor": memory.compressor,
            "tensors": {key: _gather(tensor, group) for key, tensor in sorted(memory.tensors.items())},
        }
        for name, memory in sorted(state.items())
    }
    if not gathered or dist.get_rank(group) != 0:
        return None
    return {"format": FORMAT, "world_size": dist.get_world_size(group), "variables": gathered}


class _Variable(Record):
    """The compressor state of a variable; tensors have shape [ranks, ...]."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    compressor: dict[str, Any]
    tensors: dict[str, Tensor]


class _ExactEntry(Record):
    """The entry that `gather_state` returns."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    format: str
    world_size: Count
    variables: dict[str, _Variable]


def format_of(entry: Any) -> str:
    """The format of a checkpoint's entry.

    Raises:
        PlanError: the entry has no format.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("format"), str):
        raise PlanError(f"checkpoint: {KEY}: format: missing; expected '{FORMAT}' or '{RELAXED_FORMAT}'")
    return str(entry["format"])


def own_state(entry: Any, group: dist.ProcessGroup | None = None) -> ParameterStates:
    """This rank's part of a checkpoint's entry.

    It is empty if the entry is of relaxed replicas, or, with a warning, of another version or number of ranks.

    Raises:
        PlanError: the entry is malformed; the message names the field.
    """
    found, world_size = format_of(entry), dist.get_world_size(group)
    if found == RELAXED_FORMAT:
        return {}
    if (found, entry.get("world_size")) != (FORMAT, world_size):
        rank_zero_warn(
            f"the checkpoint contains compressor state of {shown(entry.get('world_size'))} ranks "
            f"({shortened(found)}), but this job has {world_size} ({FORMAT}): compressors start without state"
        )
        return {}
    variables, rank = checked(_ExactEntry, entry, f"checkpoint: {KEY}", PlanError).variables, dist.get_rank(group)
    for name, memory in variables.items():
        for key, tensor in memory.tensors.items():
            if tensor.shape[:1] != (world_size,):
                raise PlanError(
                    f"checkpoint: {KEY}: variables.{name}.tensors.{key}: its shape is {list(tensor.shape)}; the first "
                    f"dimension must be {world_size}, the number of ranks"
                )
    return {
        name: ParameterState(memory.compressor, {key: tensor[rank] for key, tensor in memory.tensors.items()})
        for name, memory in variables.items()
    }


def warn_left_out(names: list[str], occasion: str) -> None:
    """Warn about variables whose compressor state is dropped, if there are any."""
    if names:
        rank_zero_warn(
            f"{occasion}: the compressor state of {', '.join(names)} is dropped, because they are in no message "
            "of the plan or have another compressor there"
        )


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    """All ranks' tensors [ranks, ...] on the CPU of rank 0, None elsewhere.

    They travel as bytes, because backends do not support every dtype.
    """
    flat = tensor.detach().to(group_device(group)).reshape(-1).view(torch.uint8)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    if dist.get_rank(group) != 0:
        dist.gather(flat, dst=first, group=group)
        return None
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.gather(flat, parts, dst=first, group=group)
    return torch.stack(parts).cpu().view(tensor.dtype).view(len(parts), *tensor.shape)


def state_by_name(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by name of the parameter, in the form that servers take."""
    return {
        names[parameter]: {
            key: value if isinstance(value, Tensor) else torch.tensor(value)
            for key, value in state.items()
            if value is not None
        }
        for parameter, state in optimizer.state.items()
    }


def with_state(
    saved: dict[str, Any],
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    state: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Any]:
    """``optimizer.state_dict()``, given as ``saved``, with the servers' ``state``, given by name of the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = {place: dict(state[names[each]]) for place, each in enumerate(parameters) if names[each] in state}
    return {**saved, "state": held}


class _Rank(TypedDict):
    """The state of a rank's synchronizer, and of its optimizer if servers do not keep that."""

    synchronizer: dict[str, Any]
    optimizer: NotRequired[dict[str, Any]]


class _Position(Record):
    """Where a job with servers stands: the step of its clock, and its progress in steps."""

    step: Index
    progress: NonNegativeFloat


class _RelaxedEntry(Record):
    """The entry that `RelaxedCheckpoint.gather` returns."""

    format: str
    plan: Annotated[str, Field(max_length=64)]
    ranks: dict[int, _Rank]

    @field_validator("ranks")
    @classmethod
    def _check_ranks(cls, ranks: dict[int, _Rank]) -> dict[int, _Rank]:
        if 0 not in ranks:
            raise ValueError("rank 0 is missing; ranks without an entry resume from its state")
        return ranks


class RelaxedCheckpoint:
    """One rank's part in checkpoints of a relaxed job.

    Args:
        mesh: the mesh of all ranks.
        mode: mode of the plan's consistency.
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
        """Load the state given to `restore` into a new synchronizer, and the optimizer's state into servers."""
        self._synchronizer, self._optimizer = synchronizer, optimizer
        self._names = {parameter: name for name, parameter in variables}
        loaded, self._loaded = self._loaded, None
        if self._served:
            position = {"step": 0, "progress": 0.0} if loaded is None else loaded["synchronizer"]
            position = checked(_Position, position, f"checkpoint: {KEY}: ranks: synchronizer", PlanError).model_dump()
            # Servers get rank 0's state. The other ranks load theirs too, so that all ranks report the same faults.
            synchronizer.load_state_dict({**position, "optimizer": state_by_name(optimizer, self._names)})
            # The servers keep the state now, so a local copy would waste memory.
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
                    f"checkpoint: {KEY}: ranks: the state does not fit mode '{self._mode}' or the optimizer: "
                    f"{shortened(f'{type(cause).__name__}: {cause}', 300)}"
                ) from None

    def end(self) -> None:
        """Forget the synchronizer, which is closed."""
        self._synchronizer = None

    def optimizer_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """On rank 0, the local state (``saved``) of the optimizer with the servers' part. Call it after a drain."""
        if self._synchronizer is None or self._optimizer is None or not self._served or self._mesh.rank != 0:
            return saved
        state = self._synchronizer.state_dict()
        self._position = {"step": state["step"], "progress": state["progress"]}
        return with_state(saved, self._optimizer, self._names, state["optimizer"])

    def gather(self) -> dict[str, Any] | None:
        """The checkpoint's entry on rank 0, None elsewhere. Call it after a drain."""
        if self._synchronizer is None or self._optimizer is None:
            left = ", nor the optimizer state, which the servers had" if self._served else ""
            rank_zero_warn(f"this checkpoint was saved outside of fit(): it has no synchronization state{left}")
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
        drain = self._synchronizer.last_drain
        for rank in sorted(drain.starts.keys() - {0}) if drain is not None else ():
            with suppress(PeerLost):  # without an entry, the rank resumes with rank 0's state
                mail = self._mesh.receive("checkpoint", sender=rank, timeout=self._timeout)
                ranks[rank] = torch.load(io.BytesIO(mail.payload), map_location="cpu", weights_only=True)
        return self._entry(ranks)

    def restore(self, entry: dict[str, Any] | None, steps: int) -> None:
        """Resume from the entry that `gather` returned, before the first step.

        A rank without an entry of its own, because it was lost at that time, takes rank 0's. The optimizer already has
        its state. After a checkpoint of another kind of plan, the state of this kind starts from scratch, as after
        ``steps`` steps.

        Raises:
            PlanError: the entry is of another version, or malformed; the message names the field.
        """
        kind = "" if entry is None else format_of(entry)
        if entry is not None and kind != RELAXED_FORMAT and kind.startswith(RELAXED_FORMAT.split("/")[0] + "/"):
            raise PlanError(
                f"checkpoint: its state is '{shortened(kind)}', but this version reads '{RELAXED_FORMAT}'; resume "
                "with the version that saved it, or load its weights only"
            )
        found, ranks = "", dict[int, Any]()
        if kind == RELAXED_FORMAT:
            state = checked(_RelaxedEntry, entry, f"checkpoint: {KEY}", PlanError)
            found, ranks = state.plan, state.ranks
        if ranks and found == self._mode:
            own = ranks.get(self._mesh.rank, ranks[0])
            if not self._served and "optimizer" not in own:
                raise PlanError(
                    f"checkpoint: {KEY}: ranks: the optimizer state is missing; mode '{found}' needs it on every rank"
                )
            self._loaded = own
        elif self._served:
            self._loaded = {"synchronizer": {"step": steps, "progress": float(steps)}}
        else:
            saved = f"a plan of mode '{found}'" if found else "a synchronous plan"
            rank_zero_warn(
                f"the checkpoint was saved with {saved}: ranks keep its model and optimizer state, and the other state "
                f"of mode '{self._mode}' is reset"
            )

    def _entry(self, ranks: dict[int, Any]) -> dict[str, Any]:
        return {"format": RELAXED_FORMAT, "plan": self._mode, "ranks": ranks}


def _encode(state: dict[str, Any]) -> bytearray:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return bytearray(buffer.getbuffer())

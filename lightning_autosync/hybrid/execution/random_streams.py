"""Random numbers of a split model: ranks draw the same numbers for the same values, and different ones for others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lightning_autosync.hybrid.execution.layouts import State


class Draw(NamedTuple):
    """Random numbers drawn for a value.

    Attributes:
        place: the rank's part of the value, as in `RandomStreams.place`.
        chance: whether another draw might be equal by chance.
    """

    place: list[int | None]
    digest: str
    chance: bool = False


def digest(data: bytes) -> str:
    """A digest of data with sixteen hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class RandomStreams:
    """One stream of random numbers for each set of ranks with the same part of a value.

    In a forward pass the default generator is the stream for values that are cut by samples along all dimensions. So
    code outside of layers draws different numbers on each rank. Each draw for another layout has its own stream.

    Args:
        seed: seed, the same on all ranks.
        coordinates: coordinates of this rank in the mesh.

    Attributes:
        heard: if set to a list, each draw for values in another layout than the home layout is appended to it.
    """

    def __init__(self, seed: int, coordinates: Sequence[int], device: torch.device) -> None:
        self._seed = seed
        self._coordinates = tuple(coordinates)
        self._device = device
        self._pass = 0
        self._draws = 0
        self._drawn: dict[int, int] = {}
        self.heard: list[Draw] | None = None

    @contextmanager
    def forward(self, number: int | None = None) -> Iterator[None]:
        """Context of a forward pass: the default generator has its own stream, and is restored afterwards.

        Args:
            number: number of the pass; None takes the next one.
        """
        before = self._state()
        self._pass = self._pass + 1 if number is None else number
        self._draws = 0
        self._drawn.clear()
        torch.manual_seed(self._key(tuple("batch" for _ in self._coordinates), 0))
        try:
            yield
        finally:
            self._restore(before)

    @contextmanager
    def shared(self, states: Sequence[State], dropout: float) -> Iterator[None]:
        """Context of one draw for a value in a layout with these states.

        Args:
            dropout: probability of the dropout for which numbers are drawn; if it is 0, there is no draw.
        """
        if not dropout:
            yield
            return
        # Activation checkpointing runs a part of the pass again, with the restored state of the default generator. So
        # this state identifies a draw, and a repeated draw gets its old number. Each draw advances the generator, so
        # different draws have different states.
        found = hash(bytes(torch.get_rng_state().numpy()))
        torch.rand((), device="cpu")
        if found not in self._drawn:
            self._draws += 1
            self._drawn[found] = self._draws
        before = self._state()
        torch.manual_seed(self._key(states, self._drawn[found]))
        self._hear(states)
        try:
            yield
        finally:
            self._restore(before)

    def _hear(self, states: Sequence[State]) -> None:
        if self.heard is not None:
            state = torch.get_rng_state()
            self.heard.append(Draw(self.place(states), digest(bytes(torch.rand(8, device="cpu").numpy()))))
            torch.set_rng_state(state)

    def place(self, states: Sequence[State]) -> list[int | None]:
        """The rank's part of a value in these states: its coordinates, or None along dimensions where it is whole."""
        return [None if state == "full" else at for state, at in zip(states, self._coordinates, strict=True)]

    def _key(self, states: Sequence[State], draw: int) -> int:
        """A seed that is equal on ranks that differ only along dimensions where each of them has the whole value."""
        text = repr((self._seed, self._pass, draw, self.place(states)))
        return int(digest(text.encode()), 16) >> 1

    def _state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _restore(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)

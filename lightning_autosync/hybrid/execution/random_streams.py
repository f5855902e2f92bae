"""Random numbers of a split model: ranks that hold the same values draw the same ones, all others draw others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_autosync.hybrid.execution.layouts import State


class RandomStreams:
    """One stream of random numbers for each set of ranks that hold the same part of a value.

    In a forward pass the default generator is the stream of values that are cut by samples along all dimensions, so
    code outside of layers draws other numbers on each rank. Each draw for another layout has a stream of its own.

    Args:
        seed: the same on all ranks.
        coordinates: of this rank in the mesh.
        device: where values lie.
    """

    def __init__(self, seed: int, coordinates: Sequence[int], device: torch.device) -> None:
        self._seed = seed
        self._coordinates = tuple(coordinates)
        self._device = device
        self._pass = 0
        self._draws = 0
        self._drawn: dict[int, int] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass: the default generator is a stream of its own, and is given back as it was."""
        before = self._state()
        self._pass += 1
        self._draws = 0
        self._drawn.clear()
        torch.manual_seed(self._key(tuple("batch" for _ in self._coordinates), 0))
        try:
            yield
        finally:
            self._restore(before)

    @contextmanager
    def shared(self, states: Sequence[State]) -> Iterator[None]:
        """Around one draw for a value in a layout with these states."""
        # Activation checkpointing runs a part of the pass again, with the default generator as it was: the number of
        # the draw is found by that. Each draw moves the generator on, so no two draws find it alike.
        found = hash(bytes(torch.get_rng_state().numpy()))
        torch.rand(())
        if found not in self._drawn:
            self._draws += 1
            self._drawn[found] = self._draws
        before = self._state()
        torch.manual_seed(self._key(states, self._drawn[found]))
        try:
            yield
        finally:
            self._restore(before)

    def _key(self, states: Sequence[State], draw: int) -> int:
        """A seed: equal on ranks that differ only along dimensions where the value is whole on each."""
        cut = [None if state == "full" else place for state, place in zip(states, self._coordinates, strict=True)]
        text = repr((self._seed, self._pass, draw, cut))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _restore(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)

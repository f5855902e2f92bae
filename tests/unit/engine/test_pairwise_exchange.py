"""Exchanges between pairs, seen by all their ranks, with frames that leave and arrive when the test says so."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from queued_transport import QueuedTransport
from sweeps import examples

from lightning_autosync.engine.exchanges.pairwise import PairwiseExchange
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan import Compressor, Message, PairwiseReduce, Round

LENGTH, SEGMENT = 7, 4


class Network:
    """Ranks, each with a buffer and its exchange."""

    def __init__(self, ranks: int, halves: bool, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> None:
        whole = Round(length, (PairwiseReduce(0, length, SEGMENT, tuple(range(ranks)), halves),))
        name = str(dtype).removeprefix("torch.")
        message = Message(0, "one", ("weight",), length - 1, name, 0, 0, Compressor(), 0, (whole,))
        self.queues: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.transports = [QueuedTransport(rank, self.queues) for rank in range(ranks)]
        self.buffers = [torch.zeros(length, dtype=dtype) for _ in range(ranks)]
        self.exchanges = [
            PairwiseExchange(transport, 0, rank, message, whole, self.buffers[rank], 0.2)  # type: ignore[arg-type]
            for rank, transport in enumerate(self.transports)
        ]
        self._arriving: dict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def moves(self) -> list[Callable[[], None]]:
        """What can happen next: a frame leaves, or one arrives."""
        leave = [lambda pair=pair: self._leave(*pair) for pair, queue in self.queues.items() if queue]
        return leave + [lambda pair=pair: self._arrive(*pair) for pair, queue in self._arriving.items() if queue]

    def _leave(self, source: int, target: int) -> None:
        frame, wire, sent = self.queues[source, target].popleft()
        self._arriving[source, target].append((frame, bytes(wire)))
        sent()

    def _arrive(self, source: int, target: int) -> None:
        frame, wire = self._arriving[source, target].popleft()
        inbox = self.transports[target].receiver.destination(source, frame)
        if wire:  # there is no memory for none
            inbox[:] = wire
        self.transports[target].receiver.arrived(source, frame)

    def start(self, rank: int, values: torch.Tensor) -> None:
        self.buffers[rank].copy_(values)
        self.exchanges[rank].start()

    def settle(self) -> None:
        while moves := self.moves():
            moves[0]()


@examples(200)
@given(ranks=st.integers(1, 9), halves=st.booleans(), seed=st.integers(0, 10**6))
def test_all_orders_of_arrivals_give_the_same_bits_on_all_ranks(ranks: int, halves: bool, seed: int) -> None:
    """A rank whose step is complete begins the next one at once, while others are still in the one before."""
    choice, network, steps = random.Random(seed), Network(ranks, halves), 3
    torch.manual_seed(seed)
    own = torch.randn(steps, ranks, LENGTH)
    started, sums = [0] * ranks, {}
    while len(sums) < steps * ranks:
        moves = network.moves()
        for rank, exchange in enumerate(network.exchanges):
            if exchange.completed < started[rank]:
                continue
            if started[rank]:
                sums[started[rank] - 1, rank] = network.buffers[rank].clone()
            if started[rank] < steps:

                def begin(rank: int = rank) -> None:
                    started[rank] += 1
                    network.start(rank, own[started[rank] - 1, rank])

                moves.append(begin)
        if moves:
            choice.choice(moves)()
    in_order = Network(ranks, halves)
    for step in range(steps):
        for rank in range(ranks):
            in_order.start(rank, own[step, rank])
        in_order.settle()
        assert torch.allclose(in_order.buffers[0], own[step].sum(0), atol=1e-5)
        for rank in range(ranks):
            assert torch.equal(sums[step, rank], in_order.buffers[0])


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_of_elements(dtype: torch.dtype, halves: bool) -> None:
    network = Network(4, halves, dtype)
    for rank in range(4):
        network.start(rank, torch.full((LENGTH,), rank + 1.0, dtype=dtype))
    network.settle()
    for buffer in network.buffers:
        assert torch.equal(buffer, torch.full((LENGTH,), 10.0, dtype=dtype))


@pytest.mark.parametrize("halves", [False, True])
def test_fewer_elements_than_ranks(halves: bool) -> None:
    network = Network(8, halves, length=2)
    for rank in range(8):
        network.start(rank, torch.ones(2))
    network.settle()
    assert all(torch.equal(buffer, torch.full((2,), 8.0)) for buffer in network.buffers)
    assert all(exchange.has_come for exchange in network.exchanges)


def test_a_rank_is_not_done_before_its_contribution_has_left() -> None:
    network = Network(2, halves=False)
    for rank in range(2):
        network.start(rank, torch.ones(LENGTH))
    for _ in range(2):  # pieces
        network._leave(1, 0)
        network._arrive(1, 0)
    assert torch.equal(network.buffers[0], torch.full((LENGTH,), 2.0))
    assert not network.exchanges[0].has_come
    network.settle()
    assert network.exchanges[0].has_come
    network.exchanges[0].wait()


def test_frames_that_are_not_expected() -> None:
    network = Network(4, halves=True)
    network.start(0, torch.ones(LENGTH))
    frame, _, _ = network.queues[0, 1][0]
    receiver = network.transports[1].receiver
    for step in (0, 2):
        with pytest.raises(ExchangeError, match=f"rank 0 is in step {step} of an exchange, this rank in step 1"):
            receiver.destination(0, frame._replace(step=step))
    with pytest.raises(ExchangeError, match="rank 0 sent a piece of 3 bytes that is not in the schedule"):
        receiver.destination(0, frame._replace(size=3))
    for change in ({"transfer": 2}, {"piece": 1}):
        with pytest.raises(ExchangeError, match="rank 0 sent a piece that is not in the schedule"):
            receiver.destination(0, frame._replace(**change))

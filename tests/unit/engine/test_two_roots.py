"""A tree with two roots, seen by its three ranks 0 - 1 - 2, of which 0 and 1 are roots."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from queued_transport import QueuedTransport
from sweeps import examples

from lightning_autosync.engine.exchanges.trees import TreeExchange
from lightning_autosync.engine.transport import UP
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan import Compressor, Message, Round, Tree, TreeTransfer

LENGTH, SEGMENT = 7, 3
CHAIN = Tree((-1, 0, 1), interface=1)
WHOLE = Round(LENGTH, (TreeTransfer(0, LENGTH, CHAIN, CHAIN, SEGMENT, second_root=1),))
MESSAGE = Message(0, "one", ("weight",), LENGTH - 1, "float32", 0, 0, Compressor(), 0, (WHOLE,))


class Network:
    """Three ranks, each with a buffer and its exchange."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], deque[Any]] = {pair: deque() for pair in ((0, 1), (1, 0), (1, 2), (2, 1))}
        self.transports = [QueuedTransport(rank, self.queues, CHAIN.interface) for rank in range(3)]
        self.buffers = [torch.zeros(LENGTH) for _ in range(3)]
        self.exchanges = [
            TreeExchange(transport, 0, rank, MESSAGE, WHOLE, self.buffers[rank], 0.2)  # type: ignore[arg-type]
            for rank, transport in enumerate(self.transports)
        ]

    def deliver(self, source: int, target: int) -> None:
        """Let the next frame from one rank to another leave and arrive."""
        frame, wire, sent = self.queues[source, target].popleft()
        self.transports[target].receiver.destination(source, frame)[:] = wire
        if sent is not None:
            sent()
        self.transports[target].receiver.arrived(source, frame)

    def start(self, rank: int, values: torch.Tensor) -> None:
        self.buffers[rank].copy_(values)
        self.exchanges[rank].start()


@examples(200)
@given(seed=st.integers(0, 10**6))
def test_all_orders_of_arrivals_give_the_same_bits_on_all_ranks(seed: int) -> None:
    """A rank whose step is complete begins the next one at once, while others are still in the one before."""
    choice, network, steps = random.Random(seed), Network(), 3
    torch.manual_seed(seed)
    own = torch.randn(steps, 3, LENGTH)
    started, sums = [0] * 3, {}
    while len(sums) < 3 * steps:
        waiting = [rank for rank in range(3) if started[rank] < steps]
        ready = [rank for rank in waiting if network.exchanges[rank].completed == started[rank]]
        for rank in ready:
            if started[rank]:
                sums[started[rank] - 1, rank] = network.buffers[rank].clone()
        moves: list[Callable[[], None]] = [
            lambda pair=pair: network.deliver(*pair) for pair, queue in network.queues.items() if queue
        ]
        for rank in ready:

            def begin(rank: int = rank) -> None:
                network.start(rank, own[started[rank], rank])
                started[rank] += 1

            moves.append(begin)
        if not moves:
            break
        choice.choice(moves)()
    for rank in range(3):
        sums[steps - 1, rank] = network.buffers[rank].clone()
    for step in range(steps):
        expected = own[step, 0] + (own[step, 1] + own[step, 2])
        for rank in range(3):
            assert torch.equal(sums[step, rank], expected)


def test_no_root_waits_for_the_other_to_send() -> None:
    network = Network()
    for rank in (0, 1, 2):
        network.start(rank, torch.full((LENGTH,), float(rank + 1)))
    assert len(network.queues[0, 1]) == 3  # before anything has arrived
    assert not network.queues[1, 0]  # rank 1 lacks what rank 2 contributes
    assert network.exchanges[0].root_ranges == [(0, LENGTH)]
    assert network.exchanges[1].root_ranges == []


def test_the_first_root_answers_for_the_sum() -> None:
    network = Network()
    for rank in (0, 1, 2):
        network.start(rank, torch.ones(LENGTH))
    network.exchanges[1].wait_at_root()  # it has nothing to wait for
    with pytest.raises(ExchangeError):
        network.exchanges[0].wait_at_root()
    for source, target in ((2, 1), (1, 0)):
        for _ in range(3):
            network.deliver(source, target)
    network.exchanges[0].wait_at_root()
    assert network.exchanges[0].root_buffer is network.buffers[0]
    assert torch.equal(network.buffers[0], torch.full((LENGTH,), 3.0))


def test_a_root_is_not_done_before_its_sum_has_left() -> None:
    """Its copy of the sum must not change until then."""
    network = Network()
    for rank in (0, 1, 2):
        network.start(rank, torch.ones(LENGTH))
    for _ in range(3):
        network.deliver(2, 1)
    for _ in range(3):
        network.deliver(1, 0)
    assert torch.equal(network.buffers[0], torch.full((LENGTH,), 3.0))
    assert not network.exchanges[0].has_come
    for _ in range(3):
        network.deliver(0, 1)
    assert network.exchanges[0].has_come


def test_a_frame_of_another_step_is_refused() -> None:
    network = Network()
    network.start(0, torch.ones(LENGTH))
    frame, _, _ = network.queues[0, 1][0]
    for step in (0, 2):
        with pytest.raises(ExchangeError, match=f"rank 0 is in step {step} of an exchange, this rank in step 1"):
            network.transports[1].receiver.destination(0, frame._replace(step=step))
    assert frame.phase == UP

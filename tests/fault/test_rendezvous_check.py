"""Ranks that do not come to a job, come twice or are lost while it begins are named on all others."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch.distributed as dist
from crew import HOST, Crew
from ports import free_port
from sweeps import sweep

ONE, OTHER = "one secret of sixteen bytes", "another of sixteen bytes"


def told(*ranks: int | None, port: int = 0, **options: Any) -> list[Any]:
    """What those say who come, as the ranks that they take themselves for."""
    if not port:
        port = free_port()
    with Crew("rendezvous_calls:come", len(ranks), port=port, ranks=list(ranks), **options) as crew:
        gone = {None, options.get("dies"), 0 if "stops" in options else None}
        there = [place for place, rank in enumerate(ranks) if rank not in gone]
        return [crew.result(place, 60.0) for place in there]


@pytest.mark.parametrize("host", [HOST, "localhost", socket.gethostname()])
def test_all_come(host: str) -> None:
    """Torch's process group opens no store of its own, which would listen on all addresses."""
    addresses = {place[0] for *_, place in socket.getaddrinfo(host, None)}
    if host == socket.gethostname():  # which may be a loopback address here, and another elsewhere
        addresses |= {"::", "0.0.0.0"}
    (size, listens), *others = told(0, 1, 2, host=host, timeout=60.0)
    assert size == 3
    assert len(listens) == 1
    assert listens[0] in addresses
    assert others == [[3, []], [3, []]]


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        pytest.param((0, 1, None), "rank 2 did not join within 2 s", marks=pytest.mark.slow),
        ((0, None, None), "ranks 1, 2 did not join within 2 s"),
        ((None, 1, 2), "rank 0 did not join within 2 s"),
    ],
)
def test_who_does_not_come_is_named(ranks: tuple[int | None, ...], error: str) -> None:
    assert all(seen.startswith(error) for seen in told(*ranks))


@pytest.mark.parametrize("twice", [0, 2])
def test_who_comes_twice_is_named_at_once(twice: int) -> None:
    # The test would not end in time if they waited for the rank that is missing.
    for seen in told(*{0: (0, 0, 2), 2: (0, 2, 2)}[twice], timeout=200.0):
        assert seen.startswith(f"two processes have rank {twice}; so far, rank")
        assert "its own RANK" in seen


def test_where_another_process_has_the_port_all_are_told() -> None:
    """As another job's store does, at which they can sign in."""
    other = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    for seen in told(0, 1, 2, port=other.port, timeout=20.0):
        assert seen.startswith(f"rank 0 cannot open its store: another process uses port {other.port} of {HOST}; ")


@pytest.mark.parametrize("lost", sweep([0, 1], [0]))
def test_who_is_lost_while_the_group_forms_is_named(lost: int) -> None:
    for seen in told(0, 1, 2, dies=lost):
        assert f"rank {lost}" in seen
        assert "lost" in seen


@pytest.mark.slow
@pytest.mark.parametrize("step", ["_sign_in", "_is_there"])
def test_a_first_rank_that_is_stopped_is_named(step: str) -> None:
    """It holds the store, and torch would wait for its answers for ever."""
    for seen in told(0, 1, None, stops=step):
        assert seen == "rank 0 is lost: its store does not answer any more (no answer from the store in 4 s)"


@pytest.mark.parametrize(
    ("other", "error"),
    [(ONE, ""), (OTHER, "the secret on rank 1 (set) differs from"), ("", "the secret on rank 1 (not set)")],
)
def test_ranks_connect_with_the_secret_that_they_were_given(other: str, error: str) -> None:
    port = free_port()
    with Crew("rendezvous_calls:connect", 2, port=port, secrets=[ONE, other]) as crew:
        for seen in (crew.result(rank, 60.0) for rank in range(2)):
            assert bool(seen) == bool(error)
            assert error in seen

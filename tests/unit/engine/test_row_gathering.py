"""Rows that every rank sends to all others: the sums, whatever the trees, the sizes and the pace of the ranks."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations, pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import trees
from sweeps import examples

from lightning_autosync.engine.exchanges.gathered_rows import RowGatherExchange
from lightning_autosync.engine.exchanges.rows import Rows, add_rows
from lightning_autosync.engine.transport import DOWN, Frame, Peer, Transport
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan import Compressor, Message, Round, RowBroadcast, Tree, schedule

TABLE, WIDTH, STEPS = 12, 2, 3
TIMEOUT = 60.0
"""Seconds; on a busy machine each of a hundred frames waits for several threads in turn."""
DTYPES = (torch.float32, torch.float64)
DIRECT = RowBroadcast(0, TABLE * WIDTH, (Tree((-1, 0)), Tree((1, -1))), 4)


@st.composite
def touched(draw: st.DrawFn) -> Rows:
    """Some rows of the table, none or all of them included."""
    indices = sorted(draw(st.sets(st.integers(0, TABLE - 1))))
    value = st.floats(-1e3, 1e3, width=32)
    values = draw(st.lists(value, min_size=WIDTH * len(indices), max_size=WIDTH * len(indices)))
    gradients = draw(st.integers(-3, 1))
    return Rows(torch.tensor(indices, dtype=torch.int64), torch.tensor(values).view(-1, WIDTH), gradients)


@st.composite
def broadcasts(draw: st.DrawFn, size: int) -> tuple[RowBroadcast, ...]:
    """Transfers along random trees from every rank."""
    inner = draw(st.sets(st.integers(1, TABLE * WIDTH - 1), max_size=2))
    edges = [0, *sorted(inner), TABLE * WIDTH]
    return tuple(
        RowBroadcast(
            start,
            stop,
            tuple(Tree(draw(trees(size))).rerooted(root) for root in range(size)),
            draw(st.sampled_from([1, 4, 1000])),
        )
        for start, stop in pairwise(edges)
    )


def message_of(transfers: tuple[RowBroadcast, ...], table: int = TABLE, dtype: torch.dtype = torch.float32) -> Message:
    numel, name = table * WIDTH, str(dtype).removeprefix("torch.")
    return Message(0, "table", ("table",), numel, name, 0, table, Compressor(), 0, (Round(numel, transfers),))


def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection. Callers that other tests left look for their own server, and may find this one."""
    caller = socket.create_connection(server.getsockname())
    while True:
        answerer, address = server.accept()
        if address == caller.getsockname():
            return caller, answerer
        answerer.close()


@contextmanager
def exchanges(
    transfers: tuple[RowBroadcast, ...], size: int, table: int = TABLE, dtype: torch.dtype = torch.float32
) -> Iterator[list[RowGatherExchange]]:
    """The exchange of each of ``size`` ranks, connected to all others."""
    ends: list[dict[Peer, socket.socket]] = [{} for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for one, other in combinations(range(size), 2):
            ends[one][Peer(other)], ends[other][Peer(one)] = connected(server)
    transports = [Transport(sockets) for sockets in ends]
    message = message_of(transfers, table, dtype)
    try:
        yield [
            RowGatherExchange(transport, 0, rank, message, WIDTH, dtype, TIMEOUT)
            for rank, transport in enumerate(transports)
        ]
    finally:
        with ThreadPoolExecutor(size) as closing:
            list(closing.map(Transport.close, transports))


def run(exchange: RowGatherExchange, steps: list[Rows]) -> list[Rows]:
    sums = []
    for rows in steps:
        exchange.start(rows)
        sums.append(exchange.wait())
    return sums


@examples(25)
@given(data=st.data(), size=st.integers(2, 4), least=st.sampled_from([1, 40, schedule.LEAST_BROADCAST]))
def test_all_ranks_have_the_same_sum_in_rank_order(data: st.DataObject, size: int, least: int) -> None:
    """Rows of ``least`` bytes take a transfer of their own, so ranks use all, some or one of the transfers."""
    transfers = data.draw(broadcasts(size))
    steps = [[data.draw(touched()) for _ in range(STEPS)] for _ in range(size)]
    few = mock.patch.object(schedule, "LEAST_BROADCAST", least)
    with few, exchanges(transfers, size) as running, ThreadPoolExecutor(size) as ranks:
        found = list(ranks.map(run, running, steps))
        kept = [part.pieces for exchange in running for part in exchange._current.parts.values()]
    assert not any(kept)  # received frames do not stay in memory until the next step
    for step in range(STEPS):
        parts = [rows[step] for rows in steps]
        dense = torch.zeros(TABLE, WIDTH)
        for part in parts:
            dense[part.indices] += part.values
        union = sorted({index for part in parts for index in part.indices.tolist()})
        for sums in found:
            assert sums[step].indices.tolist() == union
            assert torch.equal(sums[step].values, dense[union])
            assert sums[step].gradients == sum(part.gradients for part in parts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("table", "size"), [(1, 2), (2**16, 2), (2**16 + 1, 4), (2**32, 4), (2**32 + 1, 8)])
def test_indices_take_as_few_bytes_as_the_table_needs(table: int, size: int, dtype: torch.dtype) -> None:
    indices = torch.tensor(sorted({0, table // 2, table - 1}))
    rows = Rows(indices, torch.randn(len(indices), 3).to(dtype), 2)
    wire = rows.packed(table)
    assert wire.numel() == 8 + len(indices) * (size + 3 * dtype.itemsize)
    found = Rows.unpacked(wire, 3, dtype, table)
    assert found.gradients == 2
    assert torch.equal(found.indices, indices)
    assert torch.equal(found.values, rows.values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("table", [2**16, 2**16 + 1, 2**32 + 1])
def test_rows_of_large_tables_and_other_types_arrive(table: int, dtype: torch.dtype) -> None:
    edge = (table - 3) * WIDTH
    transfers = tuple(RowBroadcast(*ends, DIRECT.trees, 4) for ends in ((0, edge), (edge, table * WIDTH)))
    steps = [
        Rows(torch.tensor([rank, table // 2, table - 1]), torch.full((3, WIDTH), rank + 0.5), 1) for rank in (0, 1)
    ]
    owns = [[Rows(rows.indices, rows.values.to(dtype), 1)] for rows in steps]
    few = mock.patch.object(schedule, "LEAST_BROADCAST", 1)
    with few, exchanges(transfers, 2, table, dtype) as running, ThreadPoolExecutor(2) as ranks:
        for (total,) in ranks.map(run, running, owns):
            assert total.indices.tolist() == [0, 1, table // 2, table - 1]
            assert total.values[:, 0].tolist() == [0.5, 1.5, 2.0, 2.0]
            assert total.values.dtype == dtype


def test_rows_of_a_parameter_that_changed_its_dtype_are_added() -> None:
    parts = [Rows(torch.tensor([place]), torch.ones(1, WIDTH, dtype=dtype), 1) for place, dtype in enumerate(DTYPES)]
    assert add_rows(parts).values.dtype == DTYPES[0]
    assert add_rows(parts).values.tolist() == [[1.0] * WIDTH] * 2


@given(parts=st.lists(touched(), min_size=1, max_size=5))
def test_merged_rows_are_ascending_unique_and_exact(parts: list[Rows]) -> None:
    dense = torch.zeros(TABLE, WIDTH)
    for part in parts:
        dense[part.indices] += part.values
    total = add_rows(parts)
    assert total.indices.tolist() == sorted({index for part in parts for index in part.indices.tolist()})
    assert torch.equal(total.values, dense[total.indices])
    assert total.gradients == sum(part.gradients for part in parts)


def test_few_rows_travel_over_the_first_transfers_only() -> None:
    trees = DIRECT.trees
    transfers = [RowBroadcast(0, 12, trees, 4), RowBroadcast(12, 18, trees, 4), RowBroadcast(18, 24, trees, 4)]
    for size, shares in ((0, [1.0]), (8192, [1.0]), (8193, [2 / 3, 1 / 3]), (10**6, [0.5, 0.25, 0.25])):
        assert [share for _, share in schedule.used_broadcasts(transfers, size)] == shares


def wire(gradients: int, count: int, indices: list[int], used: int = 1) -> bytes:
    header = struct.pack("=3q", gradients, count, used)
    return header + bytes(4 * WIDTH * len(indices)) + struct.pack(f"={len(indices)}H", *indices)


@pytest.mark.parametrize(
    ("frame", "payload", "fault"),
    [
        (Frame(0, 1, 1, 0, DOWN, 0), wire(1, 1, [TABLE]), "fit no part"),
        (Frame(0, 1, 1, 0, DOWN, 0), wire(1, 2, [5, 1]), "fit no part"),
        (Frame(0, 1, 1, 0, DOWN, 0), wire(1, 2, [1, 1]), "fit no part"),
        (Frame(0, 1, 1, 0, DOWN, 0), wire(1, 1, [1, 2]), "fit no part"),
        (Frame(0, 1, 1, 0, DOWN, 0), wire(1, 1, [1])[:-1], "fit no part"),
        (Frame(0, 1, 1, 0, DOWN, 0), bytes(3), "fit no part"),
        (Frame(0, 1, 1, 0, DOWN, 0), wire(1, 1, [1], used=0), "says that 0 transfers"),
        (Frame(0, 1, 1, 0, DOWN, 0), wire(1, 1, [1], used=2), "says that 2 transfers carry them; allowed: 1 to 1"),
        (Frame(0, 1, 0, 0, DOWN, 0), wire(1, 0, []), "not in the schedule"),
        (Frame(0, 1, 2, 0, DOWN, 0), wire(1, 0, []), "not in the schedule"),
        (Frame(0, 3, 1, 0, DOWN, 0), wire(1, 0, []), "in step 3"),
    ],
    ids=[
        "index",
        "order",
        "a row twice",
        "more rows than announced",
        "half a row",
        "half a header",
        "no transfers",
        "too many transfers",
        "own rows",
        "no transfer",
        "step",
    ],
)
def test_rows_that_do_not_fit_end_the_exchange(frame: Frame, payload: bytes, fault: str) -> None:
    with exchanges((DIRECT,), 2) as (exchange, other):
        transport = other._transport
        sent = frame._replace(size=len(payload))
        transport.submit(lambda: transport.send(Peer(0), sent, memoryview(payload), (0.0,)))
        exchange.start(Rows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, WIDTH), 1))
        with pytest.raises(ExchangeError, match=fault):
            exchange.wait()

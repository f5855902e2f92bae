"""Messages of parameter servers: what is packed comes out, what is no message is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples

from lightning_autosync.engine.exchanges.rows import Rows
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.servers import Piece, Shard
from lightning_autosync.relaxed.server.gradients import (
    DenseGradient,
    add,
    pack_gradients,
    unpack_gradients,
)
from lightning_autosync.relaxed.server.node import ServerNode
from lightning_autosync.relaxed.transport.messages import as_bytes
from lightning_autosync.relaxed.transport.payload import Packed, can_travel, pack, unpack

DTYPES = [
    torch.complex128,
    torch.complex64,
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.uint16,
    torch.int64,
    torch.bool,
]


def travelled(packed: Packed) -> memoryview:
    return memoryview(bytearray(b"".join(as_bytes(packed))))


@examples()
@given(
    shapes=st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), max_size=5),
    text=st.text(max_size=20),
)
def test_tensors_and_values_survive(shapes: list[tuple[list[int], torch.dtype]], text: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(number): torch.randint(0, 2, shape, generator=generator).to(dtype)
        for number, (shape, dtype) in enumerate(shapes)
    }
    found = unpack(travelled(pack(tensors, {"text": text})))
    assert found.values == {"text": text}
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "length"])
def test_damaged_messages_are_refused(damage: str) -> None:
    wire = bytes(travelled(pack({"a": torch.ones(100)})))
    wire = {"cut": wire[:-8], "empty": b"", "noise": b"\x10" + bytes(7) + b"[" * 16, "length": b"\xff" * 8}[damage]
    with pytest.raises(ExchangeError, match="cannot be read"):
        unpack(memoryview(bytearray(wire)))


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2).to(torch.float8_e5m2fnuz), torch.eye(2).to_sparse()],
    ids=["unknown type", "sparse"],
)
def test_what_cannot_travel_is_refused_before_it_does(tensor: torch.Tensor) -> None:
    assert not can_travel(tensor)
    with pytest.raises(
        ExchangeError, match=r"^'odd' cannot be sent: its layout or dtype is torch\..*; allowed: strided, complex128"
    ):
        pack({"odd": tensor})


DENSE = Shard(0, "dense", 0, "float64", (Piece("a", 0, 2), Piece("b", 3, 6)))
TABLE = Shard(1, "table", 0, "float64", (Piece("t", 4, 12),), width=2)
SHARDS = {0: DENSE, 1: TABLE}


def test_gradients_survive_and_add_up() -> None:
    first = {
        0: DenseGradient((torch.ones(2).double(), None), (1, 0)),
        1: Rows(torch.tensor([2, 4]), torch.ones(2, 2).double(), 1),
    }
    second = {0: DenseGradient((torch.ones(2).double(), torch.ones(3).double()), (1, 1))}
    arrived = [unpack_gradients(unpack(travelled(pack_gradients(one))), SHARDS) for one in (first, second)]
    total = add(arrived, 0.5)
    dense, rows = total[0], total[1]
    assert isinstance(dense, DenseGradient)
    assert isinstance(rows, Rows)
    assert dense.counts == (2, 1)
    assert [None if part is None else part.tolist() for part in dense.parts] == [[1.0, 1.0], [0.5, 0.5, 0.5]]
    assert rows.indices.tolist() == [2, 4]
    assert rows.values.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("indices", [[1], [6], [3, 3], [4, 3]])
def test_rows_of_another_shard_are_refused(indices: list[int]) -> None:
    rows = Rows(torch.tensor(indices), torch.ones(len(indices), 2).double(), 1)
    with pytest.raises(ExchangeError, match="rows do not fit shard 1 of group 'table'"):
        unpack_gradients(unpack(travelled(pack_gradients({1: rows}))), SHARDS)


def test_gradients_of_another_size_or_shard_are_refused() -> None:
    one = {0: DenseGradient((torch.ones(3).double(), None), (1, 0))}
    with pytest.raises(ExchangeError, match=r"shard 0 of group .*: got 3 elements"):
        unpack_gradients(unpack(travelled(pack_gradients(one))), SHARDS)
    with pytest.raises(ExchangeError, match="shard 0 is not on this server"):
        unpack_gradients(unpack(travelled(pack_gradients(one))), {1: TABLE})


@pytest.mark.parametrize(
    ("index", "gradient", "message"),
    [
        (0, DenseGradient((torch.ones(2), None), (1, 0)), "shard 0 .* elements of torch.float32; allowed: float64"),
        (0, DenseGradient((torch.ones(2).double(), None), (1.5, 0)), "shard 0: the numbers of gradients are"),  # type: ignore[arg-type]
        (1, Rows(torch.tensor([2.0]), torch.ones(1, 2).double(), 1), "rows do not fit shard 1"),
        (1, Rows(torch.tensor([2]), torch.ones(1, 2), 1), "shard 1 .* elements of torch.float32"),
    ],
)
def test_gradients_of_another_kind_are_refused(index: int, gradient: DenseGradient | Rows, message: str) -> None:
    with pytest.raises(ExchangeError, match=message):
        unpack_gradients(unpack(travelled(pack_gradients({index: gradient}))), SHARDS)


def test_the_lowest_worker_of_a_node_that_still_trains_leads() -> None:
    node = ServerNode(2, [1, 2, 3])
    assert (node.leader, node.others) == (1, [1, 3])
    node.finished(1, epoch=0)
    assert node.leader == 2
    node.hand_over(3, step=4, gradients={})
    assert node.gather(3, {}) is None
    assert list(node.gather(4, {}) or ()) == [2, 3]
    node.hand_over(3, step=4, gradients={})
    assert node.behind(5) == [3]
    assert node.behind(5) == []
    node.absent(3)
    assert list(node.gather(5, {}) or ()) == [2]
    node.finished(1, epoch=1)  # of the next epoch, before the barrier is passed here
    node.pass_barrier(5)
    assert node.active == [2]

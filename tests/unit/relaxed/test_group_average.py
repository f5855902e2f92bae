"""Meshes of threads in one process: messages, life cycle, and averages of groups."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from strangers import KINDS, SECRET, claim, visit
from sweeps import sweep

from lightning_autosync.errors import ExchangeError, Expelled, GroupBroken, MeshTimeout, PeerLost
from lightning_autosync.relaxed.controller import ControllerClient
from lightning_autosync.relaxed.group_average import GroupAverage, cut_chunks, weighted_sum
from lightning_autosync.relaxed.transport import event_loop, handshake, stream
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Sent

HOST = "127.0.0.1"
PATIENT = HeartbeatSettings(interval=0.5, shortest=20.0, longest=30.0)


def together(size: int, play: Callable[[Mesh], Any], **settings: Any) -> list[Any]:
    """Run ``play`` on every mesh of ``size`` ranks, each in a thread; returns what each returned."""
    store, found = dist.HashStore(), [None] * size
    met = threading.Barrier(size, timeout=30.0)

    def run(rank: int) -> None:
        try:
            with contextlib.closing(
                Mesh.open(store, rank, size, secret=SECRET, address=HOST, timeout=30.0, **options)
            ) as mesh:
                met.wait()  # one that has met its peers is not yet one whose peers have met each other
                found[rank] = play(mesh)
        except Exception as error:
            found[rank] = error  # type: ignore[call-overload]

    options = {"heartbeat": PATIENT, **settings}
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


@pytest.mark.parametrize("reason", ["rank 2 did not arrive", None])
def test_what_a_controller_said_before_it_left_is_why_it_left(reason: str | None) -> None:
    def play(mesh: Mesh) -> str:
        if mesh.rank == 0:
            if reason is not None:
                mesh.send(1, "worker.stop", {"reason": reason}).wait(20.0)
            return ""
        with pytest.raises(PeerLost, match="it has left"):
            mesh.receive("nothing", sender=0, timeout=20.0)
        with pytest.raises(ExchangeError) as caught:
            ControllerClient(mesh, 20.0).send("ready")
        return str(caught.value)

    assert together(2, play)[1] == (reason or "rank 0 is lost: it has left")


def test_opening_and_closing_leaves_no_thread_and_no_file_open() -> None:
    def meet(mesh: Mesh) -> None:
        for peer in range(3):
            mesh.send(peer, "hello")
        for peer in range(3):
            mesh.receive("hello", sender=peer, timeout=20.0)

    together(3, meet)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        together(3, meet)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_everyone_reaches_everyone_and_himself() -> None:
    def play(mesh: Mesh) -> list[tuple[int, int, float]]:
        for peer in range(mesh.size):
            mesh.send(peer, "sum", {"from": mesh.rank}, [torch.arange(10.0), torch.full((100_000,), float(mesh.rank))])
        mails = [mesh.receive("sum", sender=peer, timeout=20.0) for peer in range(mesh.size)]
        return [
            (m.sender, m.header["from"], float(torch.frombuffer(m.payload, dtype=torch.float).sum())) for m in mails
        ]

    for found in together(3, play):
        assert found == [(peer, peer, 45.0 + 100_000.0 * peer) for peer in range(3)]


def test_a_peer_that_leaves_is_not_lost() -> None:
    def play(mesh: Mesh) -> tuple[frozenset[int], bool]:
        losses: list[int] = []
        mesh.on_loss(lambda peer, why: losses.append(peer))
        if mesh.rank == 1:
            mesh.send(0, "last")
            return frozenset({1}), True
        mesh.receive("last", sender=1, timeout=20.0)
        with pytest.raises(PeerLost, match="it has left"):
            mesh.receive("more", sender=1, timeout=20.0)
        with pytest.raises(PeerLost):
            mesh.send(1, "too late")
        return mesh.left, not losses

    assert together(2, play) == [(frozenset({1}), True), (frozenset({1}), True)]


def test_waiting_has_an_end() -> None:
    def play(mesh: Mesh) -> str:
        with pytest.raises(MeshTimeout) as error:
            mesh.receive("nothing", timeout=0.05)
        return str(error.value)

    assert together(2, play) == ["no message of kind nothing in 0.05 s"] * 2


def test_strangers_are_turned_away_and_take_nobody_with_them() -> None:
    """Nor does who knows the secret and says nonsense."""

    def play(mesh: Mesh) -> bytes:
        if mesh.rank == 0:
            address = mesh._loop._address
            for kind in KINDS:
                assert visit(address, kind)
            lone, unknown = b'["\\ud800", 1, 1, 1, 1, "h", 1]', b'["join", 7, 1, 0, 0, "h", 1]'
            for words in (b"\xff\xff", b"[]", b"[" * 1000, lone, unknown):
                with socket.create_connection(address, timeout=10.0) as stranger:
                    stranger.sendall(claim(stranger.recv(24), SECRET, words))
                    while stranger.recv(1000):
                        pass
            mesh.send(1, "done")
        else:
            mesh.receive("done", sender=0, timeout=20.0)
        return b""

    together(2, play, heartbeat=HeartbeatSettings(interval=0.1, shortest=20.0, longest=30.0, redial=0.5))


@pytest.mark.slow
def test_a_slow_link_is_not_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that takes several times the bearable silence; decisions pass it by."""
    quick = HeartbeatSettings(interval=0.05, shortest=0.5, longest=0.8)
    monkeypatch.setattr(event_loop, "_TURN", 64 * 1024)
    monkeypatch.setattr(stream, "PIECE", 64 * 1024)
    read = event_loop.EventLoop._read

    def slow_read(loop: Any, peer: int, peer_connection: Any) -> None:
        time.sleep(0.01)
        read(loop, peer, peer_connection)

    monkeypatch.setattr(event_loop.EventLoop, "_read", slow_read)

    def play(mesh: Mesh) -> float:
        other = 1 - mesh.rank
        losses: list[str] = []
        mesh.on_loss(lambda peer, why: losses.append(why))
        begun = time.monotonic()
        mesh.send(other, "large", payload=[torch.zeros(4_000_000)])
        mesh.send(other, "urgent")
        assert mesh.receive("large", "urgent", sender=other, timeout=20.0).kind == "urgent"
        assert mesh.receive("large", sender=other, timeout=20.0).payload.nbytes == 16_000_000
        assert not losses
        return time.monotonic() - begun

    assert all(seconds > 1.5 * quick.longest for seconds in together(2, play, heartbeat=quick))


def test_who_suspects_a_peer_that_others_hear_is_the_one_to_leave() -> None:
    quick = HeartbeatSettings(interval=0.1, shortest=0.5, longest=1.0, redial=0.3)

    def play(mesh: Mesh) -> str:
        if mesh.rank == 2:
            peers = mesh._loop._connections
            mesh._loop.perform(lambda: deafen(peers, mesh))
            with pytest.raises(Expelled, match="cannot hear rank 0, which rank 1 hears"):
                mesh.receive("nothing", sender=0, timeout=20.0)
            return "left"
        with pytest.raises(PeerLost):
            mesh.receive("nothing", sender=2, timeout=20.0)
        # Long enough for both to know, and to know of each other.
        mesh.send(1 - mesh.rank, "well")
        mesh.receive("well", sender=1 - mesh.rank, timeout=20.0)
        return "stayed"

    def deafen(peers: Any, mesh: Mesh) -> None:
        """Nothing from rank 0 arrives any more, and it cannot be reached."""
        peer_connection = peers.by_rank[0]
        peer_connection.stream.read = lambda *_: (_ for _ in ()).throw(BlockingIOError())
        dial = peers._dial

        def unreachable(peer: int, address: Any, hello: Any, timeout: float, settled: Any, missed: Any) -> None:
            missed(TimeoutError("no answer")) if peer == 0 else dial(peer, address, hello, timeout, settled, missed)

        peers._dial = unreachable
        peers._still_wanted = lambda *_: False
        peers.interrupted(0, peer_connection, "it was silent")
        # Nor does its own call come through.
        judge = peers._members.judge
        peers._members.judge = lambda hello: handshake.WAIT if hello.rank == 0 else judge(hello)

    assert together(3, play, heartbeat=quick) == ["stayed", "stayed", "left"]


def test_what_a_lost_peer_thinks_of_this_process_does_not_count() -> None:
    """It was stopped, and gone for all; when it goes on, it answers a call of the time before: it has lost others."""

    def play(mesh: Mesh) -> bool:
        if mesh.rank == 2:
            peers, members = mesh._loop._connections, mesh._members
            hello = peers._hello(handshake.PROBE, members.incarnation_of(1), 0)
            answer = handshake.Answer(handshake.EXPELLED, 1, 0, {})
            connection, other = socket.socketpair()
            mesh._loop.perform(lambda: peers.lost_according_to(1, members.incarnation_of(1), "reported by rank 0"))
            mesh._loop.perform(lambda: peers._connected(1, ("", 0), hello, (connection, answer)))
            other.close()
            assert mesh.error is None
            mesh.send(0, "well")
            ended.set()
        # Rank 0 does not wait for the message: rank 1, which has lost rank 2, may tell it before that rank 2 is lost.
        return ended.wait(20.0)

    ended = threading.Event()
    assert together(3, play) == [True] * 3


def test_a_connection_that_went_dead_is_replaced_before_anybody_is_lost() -> None:
    quick = HeartbeatSettings(interval=0.1, shortest=0.5, longest=1.0, redial=5.0)

    def play(mesh: Mesh) -> bool:
        losses: list[int] = []
        mesh.on_loss(lambda peer, why: losses.append(peer))
        other = 1 - mesh.rank
        peer_connection = mesh._loop._connections.by_rank[other]
        before = peer_connection.sock
        if mesh.rank == 1:
            # What arrives on this connection is never read.
            mesh._loop.perform(lambda: mesh._loop._selector.modify(before, 0x2, other))
        deadline = time.monotonic() + 20.0
        while peer_connection.sock in (before, None) and time.monotonic() < deadline:
            time.sleep(0.02)
        mesh.send(other, "over the new one")
        mesh.receive("over the new one", sender=other, timeout=20.0)
        return not losses

    assert together(2, play, heartbeat=quick) == [True, True]


def test_a_process_that_is_away_all_the_time_still_finds_out_who_is_lost() -> None:
    quick = HeartbeatSettings(interval=0.05, shortest=0.3, longest=0.6, redial=0.3)
    lost = threading.Event()

    def play(mesh: Mesh) -> bool:
        if mesh.rank == 1:
            # It falls silent without a word, and answers no call.
            mesh.receive("go", sender=0, timeout=20.0)
            mesh._loop._connections.tick = lambda now: None  # type: ignore[method-assign]
            mesh._loop._acceptor._admit = lambda caller: None
            mesh._loop._connections._dial = lambda *_: None  # type: ignore[method-assign]
            lost.wait(20.0)
            return True
        flush = mesh._loop._flush

        def starved() -> None:
            time.sleep(0.15)
            flush()

        mesh._loop._flush = starved  # type: ignore[method-assign]
        mesh.send(1, "go")
        with pytest.raises(PeerLost):
            mesh.receive("nothing", sender=1, timeout=10.0)
        lost.set()
        return True

    assert together(2, play, heartbeat=quick) == [True, True]


def test_nothing_listens_after_closing() -> None:
    def play(mesh: Mesh) -> tuple[int, int]:
        average = GroupAverage(mesh, 5.0)
        average.close()
        average.close()
        return len(mesh._handlers) + len(mesh._placers), len(mesh._on_loss) + len(mesh._on_leave)

    assert together(1, play) == [(0, 0)]


def test_a_message_may_take_as_long_as_it_moves() -> None:
    sent = Sent()

    def receiver() -> None:
        for _ in range(5):
            time.sleep(0.1)
            sent.move()
        sent.settle()

    thread = threading.Thread(target=receiver)
    thread.start()
    sent.wait_while_moving(0.3)
    thread.join()
    with pytest.raises(MeshTimeout, match="no part of a message was confirmed"):
        Sent().wait_while_moving(0.05)


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 300))
def test_chunks_cover_the_buffer_once_and_are_shared_evenly(elements: int, members: int, chunk: int) -> None:
    chunks = cut_chunks(elements, members, chunk)
    covered = sorted((begin, end) for begin, end, _ in chunks)
    assert [end for _, end in covered[:-1]] == [begin for begin, _ in covered[1:]]
    assert sum(end - begin for begin, end in covered) == elements
    assert all(0 < end - begin <= chunk for begin, end in covered)
    owned = [sum(end - begin for begin, end, owners in chunks if member in owners) for member in range(members)]
    assert max(owned) - min(owned) <= 1


def test_half_precision_is_summed_in_single() -> None:
    parts = [torch.tensor([256.0], dtype=torch.bfloat16)] + [torch.tensor([1.0], dtype=torch.bfloat16)] * 8
    out = torch.empty(1, dtype=torch.bfloat16)
    weighted_sum(parts, [1.0] * 9, out)
    assert float(out) == 264.0


@pytest.mark.parametrize("dtype", sweep([torch.float32, torch.float64, torch.bfloat16], [torch.float32]))
@pytest.mark.parametrize("size", sweep([1, 2, 3, 5], [1, 2, 5]))
@pytest.mark.parametrize(("elements", "equal"), [(3, False), (1_000_003, False), (1_000_003, True)])
def test_members_end_with_the_same_weighted_sum(dtype: torch.dtype, size: int, elements: int, equal: bool) -> None:
    weights = [1 / size if equal else (rank + 1.0) / sum(range(1, size + 1)) for rank in range(size)]
    # In another order than that of the ranks, and twice, so that memory is used again.
    members = [*range(1, size), 0]

    def buffer(rank: int, turn: int) -> torch.Tensor:
        return torch.randn(elements, generator=torch.Generator().manual_seed(10 * turn + rank)).to(dtype)

    def play(mesh: Mesh) -> list[torch.Tensor]:
        average, results = GroupAverage(mesh, 20.0), []
        for turn in (1, 2):
            own = buffer(mesh.rank, turn)
            results.append(average.run(turn, members, weights, own).clone())
            assert torch.equal(own, buffer(mesh.rank, turn))
        return results

    found = together(size, play)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    for turn in (1, 2):
        expected = sum(w * buffer(member, turn).double() for member, w in zip(members, weights, strict=True))
        assert all(torch.equal(found[0][turn - 1], results[turn - 1]) for results in found)
        torch.testing.assert_close(found[0][turn - 1].double(), expected, rtol=tolerance, atol=tolerance)


def test_groups_that_share_no_member_average_at_the_same_time() -> None:
    def play(mesh: Mesh) -> float:
        average = GroupAverage(mesh, 20.0)
        generation, members = (1, [0, 1]) if mesh.rank < 2 else (2, [2, 3, 4])
        buffer = torch.full((200_000,), float(mesh.rank), dtype=torch.float64)
        return float(average.run(generation, members, [1 / len(members)] * len(members), buffer).mean())

    assert together(5, play) == pytest.approx([0.5, 0.5, 3.0, 3.0, 3.0])


def test_a_member_that_gives_up_breaks_the_group_for_all_and_the_next_one_succeeds() -> None:
    def play(mesh: Mesh) -> float:
        average = GroupAverage(mesh, 20.0)
        # One brings a buffer of another size: nobody can sum that.
        buffer = torch.full((30_000 if mesh.rank < 2 else 20_000,), 1.0)
        with pytest.raises(GroupBroken) as broken:
            average.run(1, range(3), [1 / 3] * 3, buffer)
        assert broken.value.lost == ()
        return float(average.run(2, range(3), [1.0] * 3, torch.ones(50_000)).sum())

    assert together(3, play) == [150_000.0] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_buffer_of_many_more_chunks_breaks_only_the_group(size: int) -> None:
    def play(mesh: Mesh) -> float:
        average = GroupAverage(mesh, 20.0)
        with pytest.raises(GroupBroken, match=r"a different size or dtype|stopped averaging"):
            average.run(1, range(size), [1.0] * size, torch.ones(2_000_000 if mesh.rank else 300_000))
        assert mesh.error is None
        return float(average.run(2, range(size), [1.0] * size, torch.ones(300_000)).sum())

    assert together(size, play) == [size * 300_000.0] * size


def test_a_member_that_leaves_breaks_the_group() -> None:
    heard = threading.Barrier(2, timeout=30.0)

    def play(mesh: Mesh) -> bool:
        average = GroupAverage(mesh, 20.0)
        if mesh.rank == 2:
            return True
        with pytest.raises(GroupBroken) as broken:
            average.run(1, range(3), [1 / 3] * 3, torch.ones(1_000_000))
        heard.wait()  # lest the other hears that this one left, too
        # Whoever hears of it first tells the other, who may be told before it hears of it itself.
        return broken.value.lost == (2,) or broken.value.why.startswith(
            f"rank {1 - mesh.rank} stopped averaging: rank 2 "
        )

    assert together(3, play) == [True] * 3


def test_a_member_that_does_not_come_breaks_the_group_at_the_time_out() -> None:
    def play(mesh: Mesh) -> bool:
        if mesh.rank == 1:
            mesh.receive("over", sender=0, timeout=20.0)
            return True
        begun = time.monotonic()
        with pytest.raises(GroupBroken, match="no data moved"):
            GroupAverage(mesh, 0.3).run(1, range(2), [0.5] * 2, torch.ones(10))
        mesh.send(1, "over")
        return time.monotonic() - begun < 5.0

    assert together(2, play) == [True, True]


@pytest.mark.parametrize(
    "wrong", [{"weights": [1.0]}, {"members": [1], "weights": [1.0]}, {"buffer": torch.ones(2, 2)}]
)
def test_what_cannot_be_averaged_is_refused(wrong: dict[str, Any]) -> None:
    def play(mesh: Mesh) -> None:
        call = {"members": [0, 1], "weights": [0.5, 0.5], "buffer": torch.ones(2), **wrong}
        if mesh.rank == 0:
            with pytest.raises(ExchangeError):
                GroupAverage(mesh, 1.0).run(1, **call)

    together(2, play)

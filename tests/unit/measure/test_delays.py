"""Frames are delayed and not serialized, and a missing device is told. No root is needed."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.measure.emulation import delays, launch, netns, relay
from lightning_autosync.measure.emulation.network import Network
from lightning_autosync.measure.errors import LaunchError

DELAY = 0.2


@contextmanager
def carried(delay: float) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The outer ends of two sockets that stand for a link's devices, while a thread runs the relay between them."""
    with ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        (left, one), (right, other) = pairs
        for end in (left, one, right, other):
            stack.enter_context(end)
        for end in (one, other):
            end.setblocking(False)
        ways = {one.fileno(): (other.fileno(), delay), other.fileno(): (one.fileno(), delay)}
        lifeline, kept = os.pipe()
        stack.callback(os.close, lifeline)
        thread = threading.Thread(target=relay.carry, args=(ways, lifeline))
        thread.start()
        try:
            left.settimeout(60)
            right.settimeout(60)
            yield left, right
        finally:
            os.close(kept)
            thread.join(60)
            assert not thread.is_alive()


def test_many_frames_are_under_way_at_once_and_keep_their_order():
    frames = [bytes([number]) * (1 + 10 * number) for number in range(100)]
    with carried(DELAY) as (left, right):
        start = time.monotonic()
        for frame in frames:
            left.send(frame)
        arrived = [right.recv(2000)]
        first = time.monotonic() - start
        arrived += [right.recv(2000) for _ in frames[1:]]
        last = time.monotonic() - start
    assert arrived == frames
    assert first >= DELAY
    assert last < 0.2 * len(frames) * DELAY


def test_a_round_trip_has_the_delay_twice():
    with carried(DELAY) as (left, right):
        start = time.monotonic()
        left.send(b"there")
        assert right.recv(2000) == b"there"
        right.send(b"back")
        assert left.recv(2000) == b"back"
        assert time.monotonic() - start >= 2 * DELAY


def test_a_missing_device_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(netns, "run_in", lambda namespace, make: make())
    monkeypatch.setattr(delays, "DEVICE", tmp_path / "tun")
    with pytest.raises(LaunchError, match=r"a TAP device, .* fails: .*No such file.*/tun'; load one"):
        delays.open_tap("as0-0-0", "link0")


def test_the_kernel_delays_before_the_token_bucket_where_it_can():
    port, short = (
        Network(ClusterSpec.uniform(2, bandwidth=1e6, latency=latency)).ports[0] for latency in ("20 ms", "1 ms")
    )
    bucket = "tbf rate 8000000bit burst 128kb latency 100ms"
    assert launch.shaping_lines(port, netem=True) == [
        "qdisc add dev link0 root handle 1: netem delay 20000us limit 100000",
        f"qdisc add dev link0 parent 1:1 {bucket}",
    ]
    assert launch.shaping_lines(port, netem=False) == [f"qdisc add dev link0 root {bucket}"]
    assert launch.shaping_lines(short, netem=True) == [f"qdisc add dev link0 root {bucket}"]

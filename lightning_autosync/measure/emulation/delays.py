"""Links that delay frames where the kernel has no ``netem``: pairs of TAP devices, and the process between them."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_autosync.measure.emulation import netns, relay
from lightning_autosync.measure.errors import LaunchError

DEVICE = Path("/dev/net/tun")
TAP_QUEUE = 10_000
"""Frames that wait in a TAP device for the relay. At 500 Mbit/s, so many full frames last for a quarter of a second."""

End = tuple[str, str]
"""A namespace and an interface in it."""

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _TSO4, _TSO6, _TSO_ECN = 1, 2, 4, 8


def open_tap(namespace: str, interface: str) -> int:
    """Create a TAP device in a namespace; returns its descriptor. The device exists until the descriptor is closed.

    It takes segmentation-offloaded packets whole, as a virtual Ethernet port does.

    Raises:
        LaunchError: the kernel has no TAP devices or refuses one.
    """
    try:
        return netns.run_in(namespace, lambda: _open_tap(interface))
    except OSError as error:
        raise LaunchError(
            f"emulated links: the kernel has no netem, and a TAP device, which latencies need then, fails: {error}; "
            "load one of them (`modprobe sch_netem`, `modprobe tun`), or set the cluster's latencies to 1 ms at most"
        ) from None


def _open_tap(interface: str) -> int:
    descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUMS | _TSO4 | _TSO6 | _TSO_ECN)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Relay:
    """A child process that delays the frames of links. It ends once this process ends, even by SIGKILL.

    Args:
        links: for each link the namespace and the interface of both ends, and its latency in seconds. The constructor
            creates the interfaces, which exist as long as the child.

    Raises:
        LaunchError: the kernel has no TAP devices or refuses one.
    """

    def __init__(self, links: Sequence[tuple[End, End, float]]) -> None:
        with ExitStack() as opened:
            arguments, descriptors = list[str](), list[int]()
            for one, other, delay in links:
                for end in (one, other):
                    descriptors.append(open_tap(*end))
                    opened.callback(os.close, descriptors[-1])
                arguments.append(f"{descriptors[-2]}:{descriptors[-1]}:{delay}")
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", relay.__file__, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # so that a Ctrl-C at the terminal does not end it before the ranks
            )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def end(self) -> bool:
        """End the process, and with it the TAP devices; returns whether it ran until now."""
        running = self._process.poll() is None
        self._process.kill()
        self._process.communicate()
        return running

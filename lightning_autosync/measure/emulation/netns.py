"""Linux network namespaces: thin wrappers of ``ip`` and ``tc``, and clean-up that survives even SIGKILL."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lightning_autosync.measure.errors import LaunchError

Made = TypeVar("Made")
DIRECTORY = Path("/run/netns")
CLONE_NEWNET = 0x40000000
TOOLS = ("ip", "tc")
NAME = re.compile(r"as(\d+)-\d+-\d+")

# Waits for the end of its input, which comes when this process closes it or ends, even by SIGKILL. If this process ends
# during set-up, an `ip` that it started may outlive it and add namespaces later. So the janitor looks once a second
# until it has found nothing three times in a row, at most sixty times.
JANITOR = """
cat > /dev/null
calm=0 looks=0
while [ $calm -lt 3 ] && [ $looks -lt 60 ]; do
    calm=$((calm + 1)) looks=$((looks + 1))
    for name in "$@"; do
        if [ -e /run/netns/$name ]; then calm=0; ip netns delete $name; fi
    done
    sleep 1
done
"""


def namespace_name(emulation: int, place: int) -> str:
    """The name of a namespace of this process. It contains the process id, which :func:`remove_stale` reads."""
    return f"as{os.getpid()}-{emulation}-{place}"


def require_namespaces() -> None:
    """Raise ``LaunchError`` unless this process can create network namespaces."""
    if sys.platform != "linux":
        reason = f"they need Linux, not {sys.platform}"
    elif os.geteuid() != 0:
        reason = "they need root to create network namespaces"
    elif missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        reason = f"they need the command '{missing[0]}' of iproute2, which is not installed"
    else:
        return
    raise LaunchError(f"emulated links: {reason}; launches without emulated links: local, torchrun, ssh, slurm")


def configure(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Run ``ip`` or ``tc`` once with a batch of commands, one per line, in a namespace if one is given.

    Raises:
        LaunchError: one of the commands failed.
    """
    text = "\n".join(lines)
    if not text:
        return
    place = ["-n", namespace] if namespace else []
    _check([tool, *place, "-batch", "-"], text + "\n")


def has_netem(namespace: str) -> bool:
    """Whether the kernel can delay packets itself, tried on the loopback interface of a namespace."""
    try:
        configure("tc", ["qdisc add dev lo root netem", "qdisc del dev lo root"], namespace)
    except LaunchError:
        return False
    return True


def set_kernel_parameters(parameters: Mapping[str, str | int], namespace: str) -> None:
    """Write entries of ``/proc/sys/net`` (such as ``ipv4/ip_forward``) in a namespace."""
    script = "".join(f"echo {value} > /proc/sys/net/{name}\n" for name, value in parameters.items())
    _check(["ip", "netns", "exec", namespace, "sh", "-e"], script)


def list_namespaces() -> list[str]:
    """The names of all namespaces that this package created, in any process."""
    return sorted(path.name for path in DIRECTORY.glob("as*") if NAME.fullmatch(path.name))


def delete(names: Iterable[str]) -> list[str]:
    """Delete namespaces, ignoring those that do not exist; returns the names of those that could not be deleted."""
    names = list(names)
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return [name for name in names if (DIRECTORY / name).exists()]


def remove_stale(held: Collection[str]) -> None:
    """Delete the namespaces of ended processes whose janitors were killed too.

    An ended process may have had this process's id, as in a restarted container. So of the namespaces with this id only
    those in ``held`` are kept.
    """
    own = os.getpid()
    delete(
        name for name in list_namespaces() if (name not in held if _owner(name) == own else not _exists(_owner(name)))
    )


class Janitor:
    """A child process that deletes namespaces once this process ends, even by SIGKILL."""

    def __init__(self, names: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", JANITOR, "janitor", *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that a Ctrl-C at the terminal does not end it
        )

    def dismiss(self) -> None:
        """End the janitor when there is nothing left to delete."""
        self._process.kill()
        self._process.communicate()

    def release(self) -> None:
        """Let the janitor begin while this process continues."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def socket_in(namespace: str) -> socket.socket:
    """A new TCP socket in a namespace, usable from any thread of this process."""
    try:
        return run_in(namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    except OSError as error:
        raise LaunchError(f"namespace {namespace}: {error}") from None


def run_in(namespace: str, make: Callable[[], Made]) -> Made:
    """What a function returns that runs in a namespace; raises the ``OSError`` that it raises."""
    # A thread enters a namespace for good, so each call has its own.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run_in, namespace, make).result()


def _run_in(namespace: str, make: Callable[[], Made]) -> Made:
    library = ctypes.CDLL(None, use_errno=True)
    handle = os.open(DIRECTORY / namespace, os.O_RDONLY)
    try:
        if library.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns failed")
        return make()
    finally:
        os.close(handle)


def _check(command: list[str], text: str) -> None:
    result = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if result.returncode != 0:
        detail = " ".join((result.stderr or result.stdout).split())
        raise LaunchError(f"emulated links: {' '.join(command)}: {detail}")


def _owner(name: str) -> int:
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def _exists(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True

"""Linux network namespaces: thin calls of ``ip`` and ``tc``, and clean-up that cannot be forgotten."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_autosync.measure.errors import LaunchError

DIRECTORY = Path("/run/netns")
CLONE_NEWNET = 0x40000000
TOOLS = ("ip", "tc")
NAME = re.compile(r"as(\d+)-\d+-\d+")

# Waits for the end of its input, which comes when the process that holds the other end closes it or ends
# in whatever way. A half-finished set-up may add more after a look, as the `ip` that it started outlives it. So the
# janitor looks until three looks in a row, a second apart, found nothing; sixty times at most.
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
    """The name of a namespace of this process: it tells whose it is, for :func:`remove_stale`."""
    return f"as{os.getpid()}-{emulation}-{place}"


def require_namespaces() -> None:
    """Raise ``LaunchError`` unless this process can make network namespaces."""
    if sys.platform != "linux":
        reason = f"they need Linux, this is {sys.platform}"
    elif os.geteuid() != 0:
        reason = "they need root, to make network namespaces"
    elif missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        reason = f"they need the command '{missing[0]}' of iproute2, which is not installed"
    else:
        return
    raise LaunchError(f"emulated links: {reason}; other launches run the ranks without: local, torchrun, ssh, slurm")


def configure(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Run one ``ip`` or ``tc`` with a batch of commands, one a line, in a namespace if one is named.

    Raises:
        LaunchError: one of the commands failed.
    """
    text = "\n".join(lines)
    if not text:
        return
    place = ["-n", namespace] if namespace else []
    _check([tool, *place, "-batch", "-"], text + "\n")


def set_kernel_parameters(parameters: Mapping[str, str | int], namespace: str) -> None:
    """Write entries of ``/proc/sys/net`` (``ipv4/ip_forward``) of a namespace."""
    script = "".join(f"echo {value} > /proc/sys/net/{name}\n" for name, value in parameters.items())
    _check(["ip", "netns", "exec", namespace, "sh", "-e"], script)


def list_namespaces() -> list[str]:
    """The names of the namespaces that this package made, for any process."""
    return sorted(path.name for path in DIRECTORY.glob("as*") if NAME.fullmatch(path.name))


def delete(names: Iterable[str]) -> list[str]:
    """Delete namespaces; those already gone are passed over. Returns the names of those that are still there."""
    names = list(names)
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return [name for name in names if (DIRECTORY / name).exists()]


def remove_stale(held: Collection[str]) -> None:
    """Delete the namespaces of processes that are no more, whose janitors were ended too.

    One of them may have had this process's number, as in a container that was started again: of that number only those
    that are ``held`` stay.
    """
    own = os.getpid()
    delete(
        name for name in list_namespaces() if (name not in held if _owner(name) == own else not _exists(_owner(name)))
    )


class Janitor:
    """A process that deletes namespaces once this one ends, even by SIGKILL."""

    def __init__(self, names: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", JANITOR, "janitor", *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is not for it
        )

    def dismiss(self) -> None:
        """End it: there is nothing left to delete."""
        self._process.kill()
        self._process.communicate()

    def release(self) -> None:
        """Let it begin although this process goes on."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def socket_in(namespace: str) -> socket.socket:
    """A new TCP socket that lives in a namespace, for use from anywhere in this process."""
    made: list[socket.socket | OSError] = []
    thread = threading.Thread(target=_make_socket, args=(namespace, made))
    thread.start()
    thread.join()
    result = made[0]
    if isinstance(result, OSError):
        raise LaunchError(f"namespace {namespace}: {result}")
    return result


def _make_socket(namespace: str, made: list[socket.socket | OSError]) -> None:
    """Enter the namespace with the calling thread, which must end after this, and make a socket."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        handle = os.open(DIRECTORY / namespace, os.O_RDONLY)
        try:
            if library.setns(handle, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns failed")
            made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        finally:
            os.close(handle)
    except OSError as error:
        made.append(error)


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

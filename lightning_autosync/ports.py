"""The ports on which this process listens: any free one, or those of a range that a firewall lets through.

The range is in an environment variable, so that processes which this one starts keep to it, too.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning_autosync.errors import DocumentError, ExchangeError

T = TypeVar("T")

PortRange = tuple[int, int]
"""The first and the last port."""
VARIABLE = "AUTOSYNC_PORT_RANGE"
"""Environment variable with the range, as in ``20000-20100``."""
ADDRESSES = "AUTOSYNC_ADDRESSES"
"""Environment variable with the addresses of this rank's network interfaces, where the cluster does not tell them."""

_LAST = 65535
_ALLOWED = f"allowed: the first and the last port, from 1 to {_LAST}, for example"


def read_port_range(value: Any) -> PortRange | None:
    """The range from an argument ``port_range``: two numbers, or None for any port.

    Raises:
        DocumentError: the argument is something else.
    """
    if value is None:
        return None
    try:
        first, last = value
        if all(type(port) is int for port in (first, last)) and 1 <= first <= last <= _LAST:
            return first, last
    except (TypeError, ValueError):
        pass
    raise DocumentError(f"port_range: got {value!r}; {_ALLOWED} (20000, 20100)")


def port_range() -> PortRange | None:
    """The range of this process; None for any port.

    Raises:
        ExchangeError: the environment variable has another form.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    try:
        return read_port_range((int(found[1]), int(found[2])) if found else ())
    except ValueError:
        raise ExchangeError(f"{VARIABLE}: got '{text}'; {_ALLOWED} 20000-20100") from None


def set_port_range(ports: PortRange | None) -> None:
    """Let this process, and those that it starts, listen on these ports only; None for any port."""
    if ports is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = f"{ports[0]}-{ports[1]}"


@contextmanager
def listening_within(ports: PortRange | None) -> Iterator[None]:
    """A context in which this process, and those that it starts, listen on these ports only.

    None leaves the range as it is.

    Raises:
        ExchangeError: the range is left as it is, but the environment variable has another form.
    """
    before = os.environ.get(VARIABLE)
    if ports is not None:
        set_port_range(ports)
    else:
        port_range()  # here, so that each of many processes that inherit it need not fail
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before
        else:
            set_port_range(None)


def with_free_port(bind: Callable[[int], T]) -> T:
    """The result of ``bind(port)`` for the first port of the range that is free; of ``bind(0)`` without a range.

    Raises:
        ExchangeError: every port of the range is taken.
        OSError: ``bind`` failed for another reason.
    """
    ports = port_range()
    if ports is None:
        return bind(0)
    for port in range(ports[0], ports[1] + 1):
        try:
            return bind(port)
        except OSError as cause:
            if cause.errno != errno.EADDRINUSE:
                raise
    raise ExchangeError(
        f"no port is free from {ports[0]} to {ports[1]}; give a larger range ({VARIABLE}, or the argument port_range)"
    )

"""Where the processes of a pool run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol


class Launch(Protocol):
    """A place for workers: how to start one there, and how the ranks find each other.

    Attributes:
        address: the address at which the other ranks reach rank 0.
        world_size: the number of ranks that the place is made for; None if it takes any.
    """

    @property
    def address(self) -> str: ...

    @property
    def world_size(self) -> int | None: ...

    def command(
        self, rank: int, command: Sequence[str], variables: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """What to run on this machine so that ``command`` runs in the place of ``rank``, and with what environment.

        There ``variables`` are added to the environment, standard input and outputs are passed on, and no shell
        or other process is left between, so that ending the one ends the other.
        """
        ...

    def environment(self, rank: int) -> dict[str, str]:
        """Environment variables of ``rank`` there: gloo's interface, local rank, node rank."""
        ...


class LocalLaunch:
    """All ranks on this machine, talking over the loopback interface."""

    address = "127.0.0.1"
    world_size = None

    def command(
        self, rank: int, command: Sequence[str], variables: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        return list(command), {**os.environ, **variables}

    def environment(self, rank: int) -> dict[str, str]:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return {"GLOO_SOCKET_IFNAME": loopback, "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}

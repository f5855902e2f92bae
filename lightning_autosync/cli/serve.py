"""``autosync serve``: run a parameter server for workers on other nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, model_validator
from typing_extensions import Self

from lightning_autosync.documents import Configuration, Count, Index, Integer
from lightning_autosync.engine.rendezvous import find_store
from lightning_autosync.engine.secret import required_secret
from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.server.server import serve as serve_until_the_end
from lightning_autosync.relaxed.transport.heartbeat import read_heartbeat


class ServeSettings(Configuration):
    """Which server this process is, and the job that it joins.

    Attributes:
        host, port: address of the job's store.
        rank: rank of this process; those of servers follow the workers'.
        size: number of workers and servers together.
        address: this node's own address; None for that of the interface with the route to the store.
        timeout: seconds that meeting the others may take.
        heartbeat: settings for the loss of silent workers.
    """

    host: Annotated[str, Field(min_length=1)]
    port: Annotated[Integer, Field(gt=0, lt=65536)]
    rank: Index
    size: Count
    address: str | None
    timeout: PositiveFloat
    heartbeat: dict[str, PositiveFloat]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.size:
            raise ValueError(f"rank: {self.rank} is out of range; size is {self.size}")
        return self


def serve(configuration: dict[str, Any], directory: Path) -> None:
    """Serve until the last worker has left.

    Raises:
        DocumentError: a setting is wrong.
        ExchangeError: the server could not join the job, or could not continue.
    """
    settings = ServeSettings.parse(configuration)
    # By default the server's own address is that of the interface with the route to MASTER_ADDR.
    os.environ["MASTER_ADDR"] = settings.host
    secret = required_secret("autosync serve: the job's secret is missing")
    who = f"rank {settings.rank} of {settings.size}"
    print(f"autosync serve: {who}: connecting to the job at {settings.host}:{settings.port}", flush=True)
    try:
        store = find_store(settings.host, settings.port, settings.timeout, waiting=settings.timeout)
    except ConnectionError as cause:
        raise ExchangeError(str(cause)) from None
    print(f"autosync serve: {who}: connected; serving until the last worker leaves", flush=True)
    serve_until_the_end(
        store,
        settings.rank,
        settings.size,
        secret=secret,
        address=settings.address,
        timeout=settings.timeout,
        heartbeat=read_heartbeat(settings.heartbeat),
    )
    print(f"autosync serve: {who}: the last worker has left", flush=True)

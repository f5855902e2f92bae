"""Whose fault an unusable message is: one worker's, which must not end the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_autosync.errors import ExchangeError


class BadMessageError(ExchangeError):
    """A worker sent what no server can use."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} sent what cannot be used: {why}")
        self.rank = rank

    def __reduce__(self) -> tuple[type[ExchangeError], tuple[str]]:
        return ExchangeError, (str(self),)


@contextmanager
def blaming(rank: int) -> Iterator[None]:
    """Around the reading of a message of ``rank``; what goes wrong becomes a `BadMessageError`."""
    try:
        yield
    except (ExchangeError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as cause:
        raise BadMessageError(rank, str(cause) or type(cause).__name__) from cause

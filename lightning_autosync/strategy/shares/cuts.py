"""How a global batch is cut into one part for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_autosync.errors import DocumentError, PlanError

Shares = tuple[float, ...]
SharesArgument = Sequence[float] | Literal["auto"] | None

LOSS_WEIGHT = "loss_weight"
"""Method of the user's module: ``loss_weight(batch)`` is the number of terms whose mean the loss of a batch is."""
MICRO_BATCH = "micro_batch"
"""Argument of the strategies: number of samples that a rank computes at once."""
_ALLOWED = (
    "allowed: 'auto', or one number above 0 for each rank (whole numbers as proportions, or fractions that sum to 1)"
)


@dataclass(frozen=True)
class Cut:
    """The part of a global batch that one rank computes.

    Attributes:
        samples: number of samples of this rank. 0: it repeats a sample of another rank, which does not count.
        total: number of samples of all ranks.
    """

    samples: int
    total: int
    ranks: int

    @property
    def weight(self) -> float:
        """The factor of this rank's gradient before the mean over ranks."""
        return self.ranks * self.samples / self.total


@dataclass(frozen=True)
class SharesOfRanks:
    """Shares from a global batch on, for reports.

    Attributes:
        data_pass: number of the pass over a data loader in this job, from 1.
        batch: number of the global batch in it, from 0.
        shares: share of each rank in a global batch; their sum is 1.
        why: reason for these shares.
    """

    data_pass: int
    batch: int
    shares: Shares
    why: str

    @classmethod
    def of(cls, data_pass: int, batch: int, shares: Sequence[float], why: str) -> SharesOfRanks:
        """The same for shares in any unit."""
        total = math.fsum(shares)
        return cls(data_pass, batch, tuple(share / total for share in shares), why)

    @property
    def place(self) -> str:
        """Where they begin, in words."""
        first = (self.data_pass, self.batch) == (1, 0)
        return "at first" if first else f"from batch {self.batch} of pass {self.data_pass} over the data on"

    @property
    def texts(self) -> list[str]:
        """The share of each rank, in percent."""
        return [f"{share:.1%}" for share in self.shares]

    def __str__(self) -> str:
        return f"{self.place}: {', '.join(self.texts)} for ranks 0 to {len(self.shares) - 1} ({self.why})"


def read_shares(value: Any) -> Shares | Literal["auto"] | None:
    """The value of ``batch_shares``.

    Raises:
        DocumentError: the value is not allowed.
    """
    if value is None or value == "auto":
        return value  # type: ignore[no-any-return]  # one of two values
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise DocumentError(f"batch_shares: {value!r} is not a list of numbers; {_ALLOWED}")
    for rank, share in enumerate(value):
        if isinstance(share, bool) or not isinstance(share, int | float) or not (share > 0 and math.isfinite(share)):
            raise DocumentError(f"batch_shares[{rank}]: {share!r} is not a number above 0; {_ALLOWED}")
    fractions = any(not float(share).is_integer() for share in value)
    if fractions and not math.isclose(total := math.fsum(value), 1.0, rel_tol=1e-3):
        raise DocumentError(f"batch_shares: the fractions sum to {total:g}, not to 1; {_ALLOWED}")
    return tuple(float(share) for share in value)


def read_micro_batch(value: Any) -> int | None:
    """The value of ``micro_batch``.

    Raises:
        DocumentError: it is not a number of samples.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise DocumentError(f"{MICRO_BATCH}: {value!r} is not a number of samples; allowed: 1, 2, ..., or None")
    return value


def check_length(shares: Shares, ranks: int) -> None:
    """Refuse another number of shares than ``ranks``.

    Raises:
        PlanError: there are too few or too many.
    """
    if len(shares) != ranks:
        raise PlanError(f"batch_shares: {len(shares)} numbers were given, but the job has {ranks} ranks; give one each")


def divide(total: int, shares: Sequence[float], unit: int = 1) -> list[int]:
    """Divide ``total`` samples in proportion to ``shares``, by the method of largest remainders.

    If ``shares`` are whole multiples of ``unit`` and their sum is not below ``total``, no part is above its share.

    Args:
        total: number of samples.
        shares: one number above 0 for each rank.
        unit: each part is a multiple of it, except one part if ``total`` is none.
    """
    if unit > 1:
        parts = [unit * part for part in divide(-(-total // unit), shares)]
        slowest = max((rank for rank, part in enumerate(parts) if part), key=lambda rank: parts[rank] / shares[rank])
        parts[slowest] -= sum(parts) - total
        return parts
    whole = math.fsum(shares)
    quotas = [total * share / whole for share in shares]
    # The tolerance keeps a quota of 2.9999999 from being cut to 2.
    parts = [math.floor(quota + 1e-9) for quota in quotas]
    order = sorted(range(len(parts)), key=lambda rank: parts[rank] - quotas[rank])
    for rank in order[: total - sum(parts)]:
        parts[rank] += 1
    return parts


def divide_batch(total: int, shares: Sequence[float], unit: int = 1) -> list[int]:
    """The samples of each rank in a full global batch of ``total`` samples; for ``unit``, see `divide`.

    Raises:
        PlanError: a rank would get no sample, or ``total`` is not a multiple of ``unit``.
    """
    if total % unit:
        fits = max(size for size in range(1, unit) if total % size == 0)
        raise PlanError(
            f"{MICRO_BATCH}: {unit} does not divide {total}, the number of samples in a global batch (batch_size times "
            f"the number of ranks, {len(shares)}); use {fits}, for example, or another batch_size"
        )
    parts = divide(total, shares, unit)
    if 0 in parts:
        rank = parts.index(0)
        what = f"{total} samples" if unit == 1 else f"{total // unit} micro-batches of {unit} samples"
        raise PlanError(
            f"batch_shares: rank {rank} would get none of the {what} of a global batch (its share is "
            f"{shares[rank] / math.fsum(shares):.3g}); use a larger batch_size, "
            f"{'' if unit == 1 else f'a smaller {MICRO_BATCH}, '}or more equal shares"
        )
    return parts

"""What a job would gain over DDP, by prediction: the result document and its table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from rich.table import Table

from lightning_autosync.documents import Count, Duration, Index, Record, Result, bytes_text, seconds_text
from lightning_autosync.measure.figures import numbers_table
from lightning_autosync.report.predict import CUT_BOUND

Kind = Literal["ddp", "choice", "overlap", "shares", "shares_overlap", "micro_batches", "builder", "bound"]
CHOICE: dict[Kind, str] = {
    "choice": "AutoSync",
    "overlap": 'AutoSync, overlap="step"',
    "shares": 'AutoSync, batch_shares="auto"',
    "shares_overlap": 'AutoSync, batch_shares="auto", overlap="step"',
}
"""Names of the rows of AutoSync's choice."""


class GainRow(Record):
    """One way to synchronize, or the bound.

    Attributes:
        kind: ``ddp``, ``choice`` (AutoSync's, without trials), ``overlap`` (its choice with overlap), ``shares`` (the
            plan of ``choice`` with shares), ``shares_overlap`` (the plan of ``overlap`` with shares),
            ``micro_batches`` (that of ``choice`` with whole micro-batches), ``builder``, or ``bound`` (of exact plans
            whose steps do not overlap; there is none if it is 0).
        name: name for people.
        step_time: predicted seconds of a step.
        speedup: step time of the best DDP divided by this one.
        sent: mean bytes that a rank sends in a step, without headers; None for the bound, and where only touched rows
            of a table travel.
        messages: number of messages; None for the bound.
        topologies: topologies of the messages, in alphabetical order.
    """

    kind: Kind
    name: str
    step_time: Duration
    speedup: float
    sent: float | None = None
    messages: Index | None = None
    topologies: tuple[str, ...] = ()


class GainResult(Result):
    """``autosync-gain/1``: predictions of DDP, AutoSync and builders for a workload on a cluster.

    Attributes:
        workload, cluster: names of the workload and the cluster.
        bytes: bytes of all gradients.
        world_size: number of ranks.
        computes: whether the times of the forward and the backward pass are known; they are 0 otherwise.
        reason: why AutoSync chooses its plan.
        bounds_are: ``exact``, or ``cut bound``.
        rows: the rows, by kind; within a kind the fastest first.
        left_out: builders that do not apply, with the reasons.
    """

    FORMAT: ClassVar[str] = "autosync-gain/1"

    workload: str
    cluster: str
    bytes: Index
    world_size: Count
    computes: bool
    reason: str
    bounds_are: Literal["exact", "cut bound"]
    rows: tuple[GainRow, ...]
    left_out: dict[str, str]

    def of(self, kind: Kind) -> list[GainRow]:
        """The rows of a kind, the fastest first."""
        return [row for row in self.rows if row.kind == kind]

    def figures(self) -> dict[str, str]:
        """The best DDP's step time, and speedups: of AutoSync's choice, with each option, and at the bound."""
        kinds: tuple[Kind, ...] = ("choice", "overlap", "shares", "shares_overlap", "micro_batches", "bound")
        names = (
            "speedup", "speedup with overlap", "speedup with shares", "speedup with shares and overlap",
            "speedup with micro-batches", "speedup at bound",
        )  # fmt: skip
        speedups = {
            name: f"{row.speedup:.2f}x" for name, kind in zip(names, kinds, strict=True) for row in self.of(kind)
        }
        return {"best DDP": seconds_text(self.of("ddp")[0].step_time), **speedups}


def gain_table(result: GainResult) -> Table:
    """A row for the best DDP, for AutoSync with each option that applies, for each builder, and for the bound."""
    title = f"{result.workload} ({bytes_text(result.bytes)}) on {result.cluster}, {result.world_size} ranks, predicted"
    table = numbers_table(title, (), ())
    table.add_column("", overflow="fold")
    for heading in ("step", "speedup", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("messages")
    best, *_ = settings = result.of("ddp")
    for row in result.rows:
        if row.kind == "ddp" and row is not best:
            continue
        several = row is best and len(settings) > 1
        name = f"{row.name} (best of {len(settings)})" if several else row.name
        style = "bold" if row is best or row.kind in CHOICE or row.kind == "micro_batches" else None
        table.add_row(name, seconds_text(row.step_time), f"{row.speedup:.2f}x", *_travels(row), style=style)
    return table


def _travels(row: GainRow) -> tuple[str, str]:
    """What travels: bytes sent, and messages with their topologies."""
    if row.messages is None:
        return "", ""
    sent = "rows" if row.sent is None else bytes_text(row.sent)
    return sent, f"{row.messages} {', '.join(row.topologies)}"


def gain_remarks(result: GainResult) -> Iterator[str]:
    """Lines below the table."""
    yield f"AutoSync: the plan by which a job begins, without trials: {result.reason}"
    tables = any(row.kind != "bound" and row.messages and row.sent is None for row in result.rows)
    if result.computes:
        yield (
            "a job does not know its computation before its first step, so it compares times of the synchronization "
            f"alone{', with all rows of embeddings' if tables else ''}, and then of steps whose computation takes as "
            "long as the links need (with overlap, of such steps only); the table compares whole steps"
            f"{', with the touched rows' if tables else ''}"
        )
    yield "speedup: step time of the best DDP divided by this step time; sent: mean of the ranks, in a step"
    if not result.computes:
        yield "the times of forward and backward are unknown and count as 0, so these are times of synchronization"
    if tables:
        yield "rows: only touched rows of embeddings travel; DDP sends whole tables, unless modules have sparse=True"
    if result.of("overlap"):
        yield "overlap: with ranks that share cores, measured steps took 1.0 to 1.3 times as long"
    if result.of("shares"):
        yield "batch shares: each rank computes its part of a batch in proportion to the speed of its node"
    if result.of("micro_batches"):
        yield (
            "micro-batches: shares are whole numbers of them, all ranks begin to synchronize with the slowest one, "
            "gradients travel beside the backward pass of the last one only, and each sample takes as long as in a "
            "whole batch"
        )
    cut = f" ({CUT_BOUND}: possibly no plan is as fast)" if result.bounds_are == CUT_BOUND else ""
    if result.of("bound"):
        yield (
            "bound without overlap: no exact plan has a shorter step, unless steps overlap or batches are shared "
            f"out{cut}"
        )
    if result.left_out:
        yield f"builders that do not apply: {', '.join(result.left_out)} (result.json has the reasons)"

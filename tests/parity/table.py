"""Tables of how pairs ended."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from parity.matrix import DIFFERENT, EQUAL, LISTED, RAISED, Verdict


def summary(verdicts: Sequence[Verdict]) -> Table:
    """How many pairs of each family ended how."""
    table = Table("cases of", "pairs", "equal", "of them to the bit", "both raise", "listed", "different")
    families = list(dict.fromkeys(verdict.case.family for verdict in verdicts))
    for name in families:
        table.add_row(name, *_counts([verdict for verdict in verdicts if verdict.case.family == name]))
    table.add_section()
    table.add_row("all", *_counts(verdicts))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def listing(verdicts: Sequence[Verdict]) -> Table:
    """Pairs that may differ, and why."""
    table = Table("listed", "plans", "reason")
    reasons = dict.fromkeys((verdict.case.name, verdict.told) for verdict in verdicts)
    for name, reason in reasons:
        plans = [verdict.plan for verdict in verdicts if (verdict.case.name, verdict.told) == (name, reason)]
        table.add_row(name, ", ".join(plans), reason)
    return table


def differences(verdicts: Sequence[Verdict]) -> Table:
    """Pairs that must be equal and are not."""
    table = Table("different", "plan", "by", "DDP, AutoSync")
    for verdict in verdicts:
        table.add_row(verdict.case.name, verdict.plan, f"{verdict.gap:.2g}", verdict.told)
    return table


def _counts(verdicts: Sequence[Verdict]) -> list[str]:
    ended = [verdict.ending for verdict in verdicts]
    exact = sum(verdict.ending == EQUAL and verdict.gap == 0.0 for verdict in verdicts)
    counts = [len(verdicts), ended.count(EQUAL), exact, *(ended.count(kind) for kind in (RAISED, LISTED, DIFFERENT))]
    return [str(count) for count in counts]

"""``python -m tests.parity``: all pairs of DDP and AutoSync jobs, and a table of how they ended."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from parity.case import PLANS
from parity.cases import CASES
from parity.matrix import DIFFERENT, LISTED, Verdict, crew, pairs
from parity.table import differences, listing, summary


def main() -> int:
    """The exit code: 1 if any pair differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("names", nargs="*", help="only cases whose family or name contains one of these")
    parser.add_argument("--plan", action="append", choices=list(PLANS), help="only this plan; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the cases, and run nothing")
    arguments = parser.parse_args()
    cases = [case for case in CASES.values() if _named(f"{case.family}: {case.name}", arguments.names)]
    console = Console(width=None if sys.stdout.isatty() else 160)
    if arguments.list:
        for case in cases:
            console.print(f"{case.family}: {case.name} ({', '.join(case.plans)})", highlight=False)
        return 0
    began = time.monotonic()
    verdicts: list[Verdict] = []
    with crew() as ranks, console.status("") as status:

        def tell(name: str) -> None:
            status.update(f"{len(verdicts)} pairs: {name}")

        for verdict in pairs(cases, ranks, arguments.plan, tell):
            verdicts.append(verdict)
            if verdict.ending == DIFFERENT:
                console.print(f"different: {verdict.case.name} | {verdict.plan}: {verdict.told}", highlight=False)
    console.print(summary(verdicts))
    for ending, table in ((LISTED, listing), (DIFFERENT, differences)):
        found = [verdict for verdict in verdicts if verdict.ending == ending]
        if found:
            console.print(table(found))
    console.print(f"{len(verdicts)} pairs in {time.monotonic() - began:.0f} s")
    return int(any(verdict.ending == DIFFERENT for verdict in verdicts))


def _named(text: str, parts: Sequence[str]) -> bool:
    return not parts or any(part in text for part in parts)


if __name__ == "__main__":
    raise SystemExit(main())

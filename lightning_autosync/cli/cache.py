"""``autosync cache``: list, show or clear the plans that earlier jobs found and saved."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from rich.markup import escape
from rich.table import Table

from lightning_autosync.cli.tables import table_console
from lightning_autosync.documents import Configuration, bytes_text, counted
from lightning_autosync.errors import DocumentError
from lightning_autosync.search.memory import Remembered, StepTime, TunedPlan, TuningCache

ALL = "all"
_AGE = re.compile(r"(\d{1,6})([hdw])")
_SECONDS = {"w": 7 * 86400.0, "d": 86400.0, "h": 3600.0, "min": 60.0}


class CacheSettings(Configuration):
    """What to do with remembered plans.

    Attributes:
        action: ``list``, ``show`` or ``clear``.
        key: fingerprint of an entry, or its beginning; ``all`` with ``clear``.
        older: with ``clear``, time since the last use of what is removed, such as ``30d``; None removes all of ``key``.
    """

    action: Literal["list", "show", "clear"] = "list"
    key: Annotated[str, Field(min_length=1)] | None = None
    older: str | None = None

    @field_validator("older", mode="before")
    @classmethod
    def _check_age(cls, older: Any) -> Any:
        if older is not None and not _AGE.fullmatch(str(older)):
            raise ValueError("expected an age such as '12h', '30d' or '8w'")
        return older

    @model_validator(mode="after")
    def _check(self) -> CacheSettings:
        if self.action == "list" and self.key is not None:
            raise ValueError("key: 'list' takes none")
        if self.action == "show" and self.key is None:
            raise ValueError("key: missing; give a key of `autosync cache list`, or its beginning")
        if self.action == "clear" and self.key is None and self.older is None:
            raise ValueError("key: missing; give a key of `autosync cache list`, its beginning, or all, or older=AGE")
        if self.action != "clear" and self.older is not None:
            raise ValueError("older: only for 'clear'")
        return self

    @property
    def seconds(self) -> float | None:
        """``older`` in seconds."""
        if self.older is None:
            return None
        return int(self.older[:-1]) * _SECONDS[self.older[-1]]


def cache(configuration: dict[str, Any], directory: Path) -> None:
    """List, show or clear remembered plans; nothing is written to ``directory``.

    Raises:
        DocumentError: a setting is wrong, no entry or several have this key, or the cache cannot be read or cleared.
    """
    settings = CacheSettings.parse(configuration)
    plans = TuningCache()
    if plans.directory is None:
        raise DocumentError(
            "there is no cache: LIGHTNING_AUTOSYNC_CACHE is empty, or the user has no home directory; set it"
        )
    if settings.action == "list":
        _list(plans)
    elif settings.action == "show":
        assert settings.key is not None
        _show(_the_one(plans, settings.key))
    else:
        chosen = None if settings.key in (None, ALL) else _the_one(plans, str(settings.key)).fingerprint
        print(f"{plans.directory}: {counted(plans.clear(settings.seconds, chosen), 'plan')} removed")


def _the_one(plans: TuningCache, key: str) -> Remembered:
    """The only file whose fingerprint begins with ``key``."""
    found = [one for one in plans.entries() if one.fingerprint.startswith(key)]
    if not found:
        raise DocumentError(f"key: no plan in {plans.directory} has a key that begins with '{key}'")
    if len(found) > 1:
        keys = ", ".join(sorted(one.fingerprint for one in found))
        raise DocumentError(f"key: {len(found)} keys begin with '{key}'; give more of one: {keys}")
    return found[0]


def _list(plans: TuningCache) -> None:
    entries = plans.entries()
    table = Table(header_style="bold")
    for heading in ("key", "model", "parameters", "size", "ranks", "hosts", "plan", "speedup", "age"):
        table.add_column(
            heading, justify="right" if heading in ("parameters", "size", "ranks", "hosts", "age") else "left"
        )
    for one in entries:
        if one.entry is not None:
            table.add_row(*map(escape, _row(one.fingerprint, one.entry)))
    if table.row_count:
        table_console().print(table)
    for one in entries:
        if one.fault:
            print(f"unreadable: {one.fault}")
    print(f"{plans.directory}: {counted(table.row_count, 'plan')}")


def _row(fingerprint: str, entry: TunedPlan) -> list[str]:
    key = entry.key
    return [
        fingerprint,
        key.workload.name,
        f"{sum(variable.numel for variable in key.workload.variables):,}",
        bytes_text(key.workload.bytes),
        str(len(key.hosts)),
        str(len(set(key.hosts))),
        entry.origin,
        _speedup(entry),
        _age(time.time() - entry.written.timestamp()),
    ]


def _speedup(entry: TunedPlan) -> str:
    evidence = entry.evidence
    if evidence.speedup is None:
        return "-"
    first = evidence.compared[0]
    name = f"plan {first.plan}" if first.name == entry.origin else first.name
    return f"{evidence.speedup:.2f} over {name}"


def _age(seconds: float) -> str:
    """The largest unit in which an age is at least 1."""
    unit = next((unit for unit, length in _SECONDS.items() if unit != "w" and seconds >= length), "min")
    return f"{max(0, int(seconds // _SECONDS[unit]))} {unit}"


def _show(found: Remembered) -> None:
    if found.entry is None:
        raise DocumentError(found.fault)
    for part in describe_tuned(found.entry):
        if isinstance(part, str):
            print(part)
        else:
            table_console().print(part)
    print(found.path)


def describe_tuned(entry: TunedPlan) -> list[str | Table]:
    """An entry in words, and as tables of step times and of the plan."""
    return [*_words(entry), _comparison(entry), entry.plan.describe(entry.key.workload).rstrip()]


def _words(entry: TunedPlan) -> list[str]:
    key, workload, evidence = entry.key, entry.key.workload, entry.evidence
    predicted = evidence.predicted
    hosts = list(dict.fromkeys(key.hosts))
    size = "the builders' own size" if key.bucket_bytes is None else f"{key.bucket_bytes} bytes"
    return [
        f"key {key.fingerprint}: {workload.name}, {counted(len(workload.variables), 'parameter')} of "
        f"{bytes_text(workload.bytes)}, {counted(len(key.hosts), 'rank')} on {counted(len(hosts), 'host')} "
        f"({', '.join(f'{host}: {key.hosts.count(host)}' for host in hosts)})",
        f"allowed: {key.semantics}; messages: {size}; device: {key.device}",
        f"written {entry.written.isoformat(timespec='seconds')} by lightning-autosync {key.package} with torch "
        f"{entry.torch}, after {counted(evidence.synchronized_steps, 'synchronized step')}"
        + (", before its trials had ended" if entry.unfinished else ""),
        f"cluster '{entry.cluster.name}': {_rates(entry)}",
        f"plan: {entry.origin}; "
        + ("no prediction" if predicted is None else f"predicted: {predicted:.4g} s to synchronize a step"),
    ]


def _rates(entry: TunedPlan) -> str:
    """The range of the links' rates."""
    rates = [rate for link in entry.cluster.links for rate in (link.bandwidth, link.reverse_bandwidth) if rate]
    count = counted(len(entry.cluster.links), "link")
    if not rates:
        return f"{count}, rates unknown"
    return f"{count} of {min(rates) * 8e-6:.4g} to {max(rates) * 8e-6:.4g} Mbit/s"


def _comparison(entry: TunedPlan) -> Table:
    """The step times by trials, with the speedup of the plan over each."""
    table = Table(title="step times, as compared in trials", title_justify="left", header_style="bold")
    for heading in ("plan", "fingerprint", "seconds", "steps", "speedup over it"):
        table.add_column(heading, justify="left" if heading in ("plan", "fingerprint") else "right")
    own = entry.evidence.measured
    _add(table, own, "-")
    for other in entry.evidence.compared:
        _add(table, other, f"{other.seconds / own.seconds:.2f}")
    return table


def _add(table: Table, measured: StepTime, speedup: str) -> None:
    table.add_row(escape(measured.name), escape(measured.plan), f"{measured.seconds:.4g}", str(measured.steps), speedup)

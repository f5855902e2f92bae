"""A plan as a text table."""

from __future__ import annotations

from rich.table import Table

from lightning_autosync.documents import bytes_text, counted, short_labels, table_text
from lightning_autosync.plan.spec import Group, SyncPlan
from lightning_autosync.workload import Workload

_MOST_CHARACTERS = 28
"""Longest name of a group or variable in the table, if numbers and differences do not need more."""
_HEADINGS = ("group", "variables", "architecture", "topology", "shards", "placement", "compressor", "priority")


def plan_table(plan: SyncPlan, workload: Workload | None = None, width: int = 120) -> str:
    """A text table of the plan's groups, with their sizes if the workload is given."""
    table = Table(title=_title(plan), title_justify="left", header_style="bold")
    for heading in _HEADINGS if workload is None else (*_HEADINGS, "size"):
        table.add_column(
            heading, justify="right" if heading in ("shards", "priority", "size") else "left", overflow="fold"
        )
    names = short_labels([group.name for group in plan.groups], _MOST_CHARACTERS)
    variables = short_labels([group.variables[0] for group in plan.groups], _MOST_CHARACTERS)
    for group, name, variable in zip(plan.groups, names, variables, strict=True):
        row = [name, variable if len(group.variables) == 1 else f"{variable} and {len(group.variables) - 1} more"]
        row += _row(group)
        if workload is not None:
            row.append(bytes_text(sum(workload.variable(name).bytes for name in group.variables)))
        table.add_row(*row)
    return table_text(table, width)


def _title(plan: SyncPlan) -> str:
    consistency = plan.consistency.model_dump(exclude_none=True)
    mode = consistency.pop("mode")
    details = ", ".join(f"{name} {value}" for name, value in consistency.items())
    waits = ", waits at the end of the backward pass" if plan.waits else ""
    return (
        f"plan {plan.fingerprint}: {counted(plan.world_size, 'rank')}, {mode}{f' ({details})' if details else ''}, "
        f"semantics {plan.semantics}{waits}"
    )


def _row(group: Group) -> list[str]:
    """The cells of a group after its name and variables."""
    shards = str(group.shards) if group.partition else "-"
    if group.partition and group.partition.axis is not None:
        shards += f" on axis {group.partition.axis}"
    if group.partition and group.partition.weights:
        total = sum(group.partition.weights)
        shards += " (" + " ".join(f"{weight / total:.0%}" for weight in group.partition.weights) + ")"
    topology = group.topology + (" + local" if group.local_aggregation else "")
    if group.trees:
        paired = any(tree.broadcast for tree in group.trees)
        used = len({tree.interface for tree in group.trees})
        over = f" over {used} interfaces" if used > 1 else ""
        topology += f" ({len(group.trees)} {'tree pairs' if paired else 'trees'}{over})"
    return [
        group.architecture,
        topology,
        shards,
        " ".join(map(str, group.placement)) if group.placement else "-",
        group.compressor.kind,
        str(group.priority),
    ]

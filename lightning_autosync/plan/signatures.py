"""`signature`: plans by what they do, whatever their messages are called."""

from __future__ import annotations

from lightning_autosync.documents import digest
from lightning_autosync.plan.spec import SyncPlan


def signature(plan: SyncPlan) -> str:
    """A digest of what a plan does: equal plans whose messages only have other names have the same one."""
    groups = [group.model_dump(mode="json", exclude={"name"}, exclude_defaults=True) for group in plan.groups]
    return digest([plan.consistency.model_dump(mode="json"), groups])

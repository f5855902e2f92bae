"""The published JSON schema of plan files. ``python -m lightning_autosync.plan.schema`` writes it anew."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_autosync.documents import write_text
from lightning_autosync.plan.spec import SyncPlan


def schema_path() -> Path:
    """Where the schema lies: beside this module, in the wheel too."""
    return Path(__file__).with_name("autosync-plan-1.schema.json")


if __name__ == "__main__":
    write_text(schema_path(), json.dumps(SyncPlan.json_schema(), indent=2) + "\n")

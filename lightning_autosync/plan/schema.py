"""The JSON schema of plan files for editors and other programs: ``python -m lightning_autosync.plan.schema FILE``.

The schema lists the topologies and codecs that are registered in this environment.
"""

from __future__ import annotations

import json
import sys

from lightning_autosync.documents import write_text
from lightning_autosync.plan.spec import SyncPlan

if __name__ == "__main__":
    write_text(sys.argv[1], json.dumps(SyncPlan.json_schema(), indent=2) + "\n")

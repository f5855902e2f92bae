"""Files that another process holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLDER = """
import sys
from pathlib import Path
from lightning_autosync.documents import held
with held(Path(sys.argv[1]), ValueError()):
    print("held", flush=True)
    input()
"""


@contextmanager
def held_elsewhere(path: Path) -> Iterator[None]:
    """Within the block another process holds the file, which it lets go of by its death."""
    line = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            other.kill()

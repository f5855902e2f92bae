"""PyTorch's profiler shows what a job does for each message, by name, on the thread that does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import profiler_jobs


def test_the_profiler_shows_each_message_on_its_threads(duo: Any, tmp_path: Path) -> None:
    found = duo.run(profiler_jobs.ranges, folder=str(tmp_path), builder="ps", all_threads=True)
    for shown in found:
        names = {name.rpartition("/")[0] for name in shown["main"]}
        for message in names:
            assert {f"{message}/{what}" for what in ("pack", "launch", "wait", "unpack")} <= set(shown["main"])
            assert {f"{message}/{what}" for what in ("reduce", "broadcast")} <= set(shown["other"])
        assert names

"""A rank that dies or hangs: a bounded, clear error on every other rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from ports import free_port

TESTS = Path(__file__).parent.parent
TIMEOUT = 5.0
VICTIM = 1
SCRIPT = """
import json, sys, torch.distributed as dist
from engine_calls import with_a_lost_peer
dist.init_process_group("gloo")
print(json.dumps(with_a_lost_peer(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))), flush=True)
sys.stdout.flush()
import os; os._exit(0)
"""


def survivors(topology: str, how: str) -> list[dict[str, Any]]:
    """What the ranks beside the victim saw. A pool of workers would end with its first dead rank."""
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "distributed"))),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "3",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, topology, how, str(VICTIM), str(TIMEOUT)]
    ranks = [
        forked.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        outputs = {rank: process.communicate(timeout=60)[0] for rank, process in enumerate(ranks) if rank != VICTIM}
        return [json.loads(output) for output in outputs.values()]
    finally:
        for process in ranks:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "topology", ["ring", *(pytest.param(name, marks=pytest.mark.slow) for name in ("star", "shared_memory"))]
)
def test_a_killed_rank_is_named_at_once(topology: str) -> None:
    for found in survivors(topology, "kill"):
        assert found["error"].startswith(f"rank {VICTIM} is lost: its process has ended")
        assert found["seconds"] < TIMEOUT
        assert found["finite"]


@pytest.mark.parametrize("topology", [pytest.param("star", marks=pytest.mark.slow), "shared_memory"])
def test_a_stopped_rank_is_noticed_at_the_time_out(topology: str) -> None:
    # The first to give up closes its connections, which the other may notice before its own time is over.
    for found in survivors(topology, "stop"):
        assert f"rank {VICTIM} is lost: it does not answer" in found["error"]
        assert found["seconds"] < 3 * TIMEOUT
        assert found["finite"]

"""A Trainer's job beside a process of `autosync serve`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import relaxed_jobs
from strangers import SECRET
from test_serve_verb import start


def test_a_training_on_a_server_process_is_ddp(duo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSYNC_SECRET", SECRET.decode())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(tmp_path, host="127.0.0.1", port=port, rank=2, size=3, timeout=60)
    try:
        assert max(duo.run(relaxed_jobs.against_ddp_by_a_server, port=port, secret=SECRET.decode())) < 1e-5
        _, told = process.communicate(timeout=30)
        assert process.returncode == 0, told
    finally:
        process.kill()
        process.wait()

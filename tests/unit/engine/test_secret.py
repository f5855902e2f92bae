"""Where the job's secret comes from, and what is sealed with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from strangers import SECRET

from lightning_autosync.engine import secret as secrets_module
from lightning_autosync.engine.secret import common_secret, given_secret, required_secret, seal, unseal
from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.mesh import Mesh

LONG = "of more than sixteen bytes"


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSYNC_SECRET", raising=False)
    monkeypatch.delenv("AUTOSYNC_SECRET_FILE", raising=False)


def test_it_comes_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert given_secret() is None
    with pytest.raises(ExchangeError, match="it is needed: set AUTOSYNC_SECRET, or AUTOSYNC_SECRET_FILE"):
        required_secret("it is needed")
    monkeypatch.setenv("AUTOSYNC_SECRET", LONG)
    assert given_secret() == required_secret("") == LONG.encode()
    monkeypatch.setenv("AUTOSYNC_SECRET_FILE", "file")
    with pytest.raises(ExchangeError, match="both set"):
        given_secret()
    monkeypatch.delenv("AUTOSYNC_SECRET")
    file = tmp_path / "secret"
    file.write_text(LONG + "\n")
    file.chmod(0o600)
    monkeypatch.setenv("AUTOSYNC_SECRET_FILE", str(file))
    assert given_secret() == LONG.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_of_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text(LONG)
    file.chmod(mode)
    monkeypatch.setenv("AUTOSYNC_SECRET_FILE", str(file))
    with pytest.raises(ExchangeError, match=f"{file}: other users may read or write this file \\(mode 0{mode:o}\\)"):
        given_secret()


def test_what_is_no_secret_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in ("short", "x" * 5000):
        monkeypatch.setenv("AUTOSYNC_SECRET", text)
        with pytest.raises(ExchangeError, match=r"AUTOSYNC_SECRET: the secret has \d+ bytes; allowed: 16 to 4096"):
            given_secret()
    monkeypatch.delenv("AUTOSYNC_SECRET")
    monkeypatch.setenv("AUTOSYNC_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(ExchangeError, match=r"none: No such file"):
        given_secret()
    monkeypatch.setenv("AUTOSYNC_SECRET_FILE", str(tmp_path))
    with pytest.raises(ExchangeError, match="directory"):
        given_secret()


def test_ranks_that_were_given_none_take_that_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_0 = ["", "", "drawn by rank 0"]
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(secrets_module, "gather_json", lambda own, group: [rank_0, own])
    assert common_secret() == b"drawn by rank 0"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["", "", ""], "the secret on rank 1 (not set) differs from that on rank 0 (set)"),
        (["another", "", ""], "the secret on rank 1 (set) differs from that on rank 0 (set)"),
        (["", "file: others may read it", ""], "rank 1: file: others may read it"),
    ],
)
def test_ranks_that_were_given_others_are_named(monkeypatch: pytest.MonkeyPatch, given: list[str], error: str) -> None:
    monkeypatch.setenv("AUTOSYNC_SECRET", LONG)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(secrets_module, "gather_json", lambda own, group: [own, given])
    with pytest.raises(ExchangeError, match=re.escape(error)):
        common_secret()


def test_what_is_sealed_is_of_its_place_and_secret() -> None:
    sealed = seal(SECRET, "here", "text with spaces")
    assert unseal(SECRET, "here", sealed) == "text with spaces"
    wrong: list[tuple[Any, ...]] = [(SECRET, "there", sealed), (b"another", "here", sealed), (SECRET, "here", "x text")]
    for arguments in wrong:
        with pytest.raises(ExchangeError, match="was written with a secret that differs"):
            unseal(*arguments)


def test_a_store_does_not_hold_the_secret() -> None:
    """Whoever reaches the store could read it there."""
    store = dist.HashStore()
    Mesh.open(store, 0, 1, secret=SECRET, address="127.0.0.1", timeout=20.0).close()
    assert not store.check(["mesh/1/secret"])


def test_an_address_that_a_stranger_wrote_is_not_called() -> None:
    store = dist.HashStore()
    store.set("mesh/1/address/1", '["127.0.0.1", 9]')
    with pytest.raises(ExchangeError, match="'address of rank 1 in mesh 1' was written with a secret that differs"):
        Mesh.open(store, 0, 2, secret=SECRET, address="127.0.0.1", timeout=20.0)

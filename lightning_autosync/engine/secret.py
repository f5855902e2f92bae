"""The secret by which processes of a job authenticate: from the environment, a file, or the process group."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat

import torch.distributed as dist

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.errors import ExchangeError

SECRET, SECRET_FILE = "AUTOSYNC_SECRET", "AUTOSYNC_SECRET_FILE"
"""Environment variables: the secret itself, and the name of a file with the secret."""
_SHORTEST, _LONGEST = 16, 4096
"""Bytes. A shorter secret could be guessed from recorded handshakes."""


def given_secret() -> bytes | None:
    """The secret that the launcher set; None if it set none.

    Raises:
        ExchangeError: the secret is too short or too long, or its file cannot be read, or is open to other users.
    """
    text, file = os.environ.get(SECRET, ""), os.environ.get(SECRET_FILE, "")
    if text and file:
        raise ExchangeError(f"{SECRET} and {SECRET_FILE} are both set; allowed: one of them")
    if not text and not file:
        return None
    found = _read(file) if file else text.encode(errors="surrogateescape").strip()
    name = f"{SECRET_FILE}={file}" if file else SECRET
    if not _SHORTEST <= len(found) <= _LONGEST:
        raise ExchangeError(
            f"{name}: the secret has {len(found)} bytes; allowed: {_SHORTEST} to {_LONGEST}; `openssl rand -hex 32` "
            "makes one"
        )
    return found


def required_secret(why: str) -> bytes:
    """Like `given_secret`, but a missing secret is an error.

    Raises:
        ExchangeError: there is no secret; the error begins with ``why``.
    """
    found = given_secret()
    if found is None:
        raise ExchangeError(
            f"{why}: set {SECRET}, or {SECRET_FILE} to a file that holds it. All processes of the job need the same "
            "secret; `openssl rand -hex 32` makes one"
        )
    return found


def common_secret(group: dist.ProcessGroup | None = None, required: str = "") -> bytes:
    """The launcher's secret, or else one that rank 0 draws and sends over the process group; collective.

    Args:
        group: the ranks; None is the default group.
        required: reason why the launcher must set a secret; empty if it need not.

    Raises:
        ExchangeError: some rank has a different secret, none, or cannot read it (raised on every rank).
    """
    own, fault = None, ""
    try:
        own = required_secret(required) if required else given_secret()
    except ExchangeError as cause:
        fault = str(cause)
    drawn = secrets.token_hex(32) if dist.get_rank(group) == 0 else ""
    offers = gather_json([_digest(own) if own is not None else "", fault, drawn], group)
    for rank, (digest, problem, _) in enumerate(offers):
        if problem:
            raise ExchangeError(f"rank {rank}: {problem}")
        if digest != offers[0][0]:
            raise ExchangeError(
                f"{SECRET}, {SECRET_FILE}: the secret on rank {rank} ({'set' if digest else 'not set'}) differs from "
                f"that on rank 0 ({'set' if offers[0][0] else 'not set'}); allowed: the same on all ranks, or none"
            )
    return own if own is not None else str(offers[0][2]).encode()


def seal(secret: bytes, what: str, text: str) -> str:
    """``text`` with its HMAC, for a place that others can write to.

    Args:
        secret: the job's secret.
        what: name of the place; `unseal` refuses text that was sealed for another place.
        text: the text to seal.
    """
    return f"{_mark(secret, what, text)} {text}"


def unseal(secret: bytes, what: str, sealed: str) -> str:
    """The text that `seal` sealed.

    Raises:
        ExchangeError: the text was sealed with another secret or for another place.
    """
    mark, _, text = sealed.partition(" ")
    if not hmac.compare_digest(mark.encode(), _mark(secret, what, text).encode()):
        raise ExchangeError(f"'{what}' was written with a secret that differs from this process's")
    return text


def _mark(secret: bytes, what: str, text: str) -> str:
    return hmac.new(secret, f"{what}\0{text}".encode(), hashlib.sha256).hexdigest()


def _digest(secret: bytes) -> str:
    return hmac.new(secret, b"autosync: the same secret on all ranks", hashlib.sha256).hexdigest()


def _read(file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ExchangeError(
                    f"{SECRET_FILE}={file}: other users may read or write this file (mode {stat.S_IMODE(mode):04o}); "
                    "run `chmod 600` on it"
                )
            # Two bytes more: room for a line end, and enough to notice a secret that is too long.
            return opened.read(_LONGEST + 2).strip()
    except OSError as cause:
        raise ExchangeError(f"{SECRET_FILE}={file}: {cause.strerror}") from None

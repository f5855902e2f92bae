"""The file form of a simulator: ``simulator.json`` with a format line, and its weights as safetensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from lightning_autosync.documents import Document
from lightning_autosync.errors import DocumentError
from lightning_autosync.simulator.constants import Constants

HEADER = "simulator.json"
WEIGHTS = "weights.safetensors"


class SimulatorError(DocumentError):
    """A saved simulator cannot be read, or a simulator cannot run here."""


class Header(Document):
    """What a saved simulator is.

    Attributes:
        kind: its name, as in ``SIMULATORS``.
        constants: costs of the hosts that its replay uses.
        settings: sizes of its networks, by the kind's own names.
    """

    FORMAT: ClassVar[str] = "autosync-simulator/2"
    ERROR: ClassVar[type[DocumentError]] = SimulatorError

    kind: str
    constants: Constants = Constants()
    settings: dict[str, Any] = Field(default_factory=dict)


def write_header(directory: str | os.PathLike[str], kind: str, constants: Constants, settings: dict[str, Any]) -> None:
    """Write ``simulator.json`` into a directory, which is made where it is not there."""
    Header(kind=kind, constants=constants, settings=settings).save(Path(directory) / HEADER)


def read_header(directory: str | os.PathLike[str], kind: str | None = None) -> Header:
    """Read ``simulator.json`` of a directory.

    Raises:
        SimulatorError: there is none, it is wrong, of another format version, or not of ``kind``.
    """
    path = Path(directory) / HEADER
    if not path.is_file():
        raise SimulatorError(f"{directory}: no simulator: there is no {HEADER}; `autosync fit` writes one")
    header = Header.load(path)
    if kind is not None and header.kind != kind:
        raise SimulatorError(f"{path}: kind: expected '{kind}', got '{header.kind}'")
    return header

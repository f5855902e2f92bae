"""The command ``autosync``, with one file per verb."""

from __future__ import annotations

from lightning_autosync.cli.application import main

__all__ = ["main"]

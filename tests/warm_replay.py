"""Imported by the server of `forked`: compiles the replay, or loads what was compiled, so that its forks need not."""

from __future__ import annotations

from lightning_autosync.replay import warm_up

warm_up()

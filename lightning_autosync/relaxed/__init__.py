"""Relaxed synchronization: messages between live processes, averages of groups, and peers that are lost and return."""

from __future__ import annotations

"""Synchronization without lock-step: messages between live processes, group averages, lost and returning peers."""

from __future__ import annotations

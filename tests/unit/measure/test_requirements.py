"""Where links cannot be emulated, the error says why and what to do instead."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.workers import LaunchError


def test_other_systems_are_pointed_to_the_other_launches(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match=r"need Linux, not darwin; launches .*: local, torchrun, ssh"):
        EmulatedLaunch(ClusterSpec.uniform(nodes=2, bandwidth=1e6))


def test_other_users_are_pointed_to_the_other_launches(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match=r"need root.*: local, torchrun, ssh, slurm$"):
        EmulatedLaunch(ClusterSpec.uniform(nodes=2, bandwidth=1e6))


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(LaunchError, match="'tc' of iproute2"):
        netns.require_namespaces()

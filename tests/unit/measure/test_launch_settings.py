"""The config group of launches: where workers run, and what is said where they cannot."""

from __future__ import annotations

import os

import pytest

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.launches.launch import LocalLaunch
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.workers import LaunchError


def test_local_needs_no_cluster():
    with LaunchSettings().open(None) as launch:
        assert isinstance(launch, LocalLaunch)


def test_local_ranks_have_the_loopback_interface_for_each_of_the_cluster():
    with LaunchSettings().open(resolve_cluster("two_interfaces")) as launch:
        assert launch.environment(3)["AUTOSYNC_ADDRESSES"] == "127.0.0.1,127.0.0.1"


def test_emulated_links_need_a_cluster():
    with (
        pytest.raises(DocumentError, match="cluster: missing; launch=emulated"),
        LaunchSettings(kind="emulated").open(None),
    ):
        pass


def test_without_root_the_other_launch_is_named(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    settings, cluster = LaunchSettings(kind="emulated"), ClusterSpec.star(bandwidths=[1e6, 1e6])
    with (
        pytest.raises(
            LaunchError, match=r"^launch=emulated: .*they need root.*launches without emulated links: local,"
        ),
        settings.open(cluster),
    ):
        pass

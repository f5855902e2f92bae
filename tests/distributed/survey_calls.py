"""Calls in workers: the survey of a job, also with faults."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest import mock

import torch.distributed as dist

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.connections import connect_pairs
from lightning_autosync.errors import ExchangeError
from lightning_autosync.measure.probe import hosts, meter
from lightning_autosync.measure.probe.quick import compare_with_job, survey_job
from lightning_autosync.strategy.tuning.proposals import find_links


def survey(limit: float = 10.0) -> dict[str, Any]:
    """What a survey found, as plain data."""
    found = survey_job(60.0, limit)
    return {**asdict(found), "cluster": found.cluster.to_dict()}


def compare(described: dict[str, Any]) -> list[str]:
    """The links whose rates are far from a description."""
    return compare_with_job(ClusterSpec.from_dict(described), 60.0)


def links(described: dict[str, Any] | None, probe: float) -> dict[str, Any]:
    """The costs of hosts with which a job predicts plans, and whether rates of links are known."""
    cluster = None if described is None else ClusterSpec.from_dict(described)
    found = find_links(cluster, nodes=2, devices=2, probe=probe, timeout=60.0)
    return {"constants": found.constants.to_dict(), "measured": found.cluster.measured, "fault": found.fault}


def links_without_sockets(described: dict[str, Any]) -> dict[str, Any]:
    """As `links`, where the last rank has no file descriptor left."""
    if dist.get_rank() < dist.get_world_size() - 1:
        return links(described, 5.0)
    with mock.patch.object(hosts.socket, "socketpair", side_effect=OSError("too many open files")):
        return links(described, 5.0)


def survey_without_connection() -> dict[str, Any]:
    """As `survey`, where the last rank connects to nobody."""
    if dist.get_rank() == dist.get_world_size() - 1:

        def refuse(*arguments: Any) -> Any:
            for connection in connect_pairs(*arguments).values():
                connection.close()
            raise ExchangeError("the network is down")

        meter.connect_pairs = refuse
    try:
        return survey()
    finally:
        meter.connect_pairs = connect_pairs

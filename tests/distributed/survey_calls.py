"""Calls in workers: the survey of a job, also with faults."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest import mock

import torch.distributed as dist

from lightning_autosync.engine.connections import connect_pairs
from lightning_autosync.errors import ExchangeError
from lightning_autosync.measure.probe import meter, quick
from lightning_autosync.measure.probe.quick import survey_job
from lightning_autosync.measure.probe.survey import take_survey


def survey(limit: float = 10.0) -> dict[str, Any]:
    """What a survey found, as plain data."""
    found = survey_job(60.0, limit)
    return {**asdict(found), "cluster": found.cluster.to_dict()}


def survey_with_one_that_decides() -> dict[str, Any]:
    """As `survey`, where each rank counts as a host, and ranks other than the first fail if they have to decide."""

    def decide(*arguments: Any, **options: Any) -> Any:
        assert dist.get_rank() == 0, "this rank would decide by itself what to measure"
        return take_survey(*arguments, **options)

    with (
        mock.patch.object(meter, "_namespace", return_value=f"of rank {dist.get_rank()}"),
        mock.patch.object(quick, "take_survey", decide),
    ):
        return survey()


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

"""``autosync probe``: measure a job's links and hosts; write ``cluster.yaml`` and ``constants.yaml``."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.cli.progress import ShownProgress
from lightning_autosync.cli.tables import table_console
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import RESULT
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.launches.launch import require_torchrun
from lightning_autosync.measure.launches.settings import TorchrunSettings
from lightning_autosync.measure.probe.job import probe_ranks
from lightning_autosync.measure.probe.settings import ProbeDocument, ProbeSettings
from lightning_autosync.measure.probe.table import link_rows, links_table, nodes_table, pairs_table
from lightning_autosync.measure.workers.pool import WorkerPool
from lightning_autosync.replay.constants import Constants

_log = logging.getLogger(__name__)


def probe(configuration: dict[str, Any], directory: Path) -> None:
    """Run one probe, and write ``cluster.yaml``, ``constants.yaml`` and ``result.json`` to ``directory``.

    Within a job only rank 0 writes and prints.

    Raises:
        AutoSyncError: a setting is wrong, links cannot be emulated here, or a rank failed.
    """
    settings = ProbeSettings.parse(configuration)
    if isinstance(settings.launch, TorchrunSettings):
        found = _within_job(settings)
        if found is None:
            return
        answer = found
    else:
        answer = run_probe(settings)
    truth = settings.emulated_cluster()
    cluster = ClusterSpec.from_dict(answer["cluster"], source="probe")
    result = ProbeDocument(**answer, settings=settings.model_dump(mode="json"), links=tuple(link_rows(cluster, truth)))
    console = table_console()
    console.print(nodes_table(answer, cluster))
    if cluster.links:
        console.print(pairs_table(answer))
        console.print(links_table(cluster, truth))
    console.print(f"{answer['transfers']} transfers, {answer['seconds']:.0f} s", highlight=False)
    result.write(directory)
    files = [RESULT, "cluster.yaml"]
    cluster.save(directory / "cluster.yaml")
    if answer["constants"] is not None:
        Constants.from_dict(answer["constants"]).save(directory / "constants.yaml")
        files.append("constants.yaml")
    console.print(", ".join(str(directory / name) for name in files), soft_wrap=True, highlight=False)


def run_probe(settings: ProbeSettings) -> dict[str, Any]:
    """Start the ranks, probe, and end them; returns the result of :func:`probe_ranks`."""
    assert not isinstance(settings.launch, TorchrunSettings)
    where = settings.named_cluster()
    measured = "links, then hosts" if settings.constants else "links"
    _log.info("probe: measures %s; this takes seconds to minutes, longer with more nodes", measured)
    with (
        settings.launch.open(where) as launch,
        WorkerPool(launch.world_size or settings.ranks, launch, timeout=settings.timeout) as pool,
        ShownProgress("probe") as report,
    ):
        answer: dict[str, Any] = pool.run(probe_ranks, report=report, **_arguments(settings))[0]
    return answer


def _within_job(settings: ProbeSettings) -> dict[str, Any] | None:
    """Probe as a rank of a running job; returns None on all ranks except rank 0."""
    require_torchrun("probe")
    arguments = _arguments(settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings.timeout))
    try:
        if dist.get_rank() != 0:
            probe_ranks(**arguments)
            return None
        with ShownProgress("probe") as report:
            return probe_ranks(**arguments, report=report)
    finally:
        dist.destroy_process_group()


def _arguments(settings: ProbeSettings) -> dict[str, Any]:
    """The arguments of `probe_ranks`."""
    if settings.head + settings.window > settings.timeout:
        raise DocumentError("timeout: must be at least head + window, the time of one transfer")
    fields = ("name", "scheduling", "head", "window", "every_pair", "constants", "accelerated", "timeout")
    # Addresses of emulated or loopback links are useless for later jobs.
    return {
        **{name: getattr(settings, name) for name in fields},
        "addresses": settings.launch.kind in ("ssh", "slurm", "torchrun"),
    }

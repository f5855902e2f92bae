"""A whole plan in numbers: what the replay says of it, and how much of it there is of each kind."""

from __future__ import annotations

import numpy

from lightning_autosync.learned.scene import Floats
from lightning_autosync.learned.traits import COMPRESSORS, MODES, Traits

_PATH = ("forward", "backward", "optimizer", "finish", "launch", "hosts", "cores", "pipeline", "links")
"""What a step waits for."""
_ON = {"its pipeline": "pipeline", "shared cores": "cores"}


def overall(traits: Traits) -> Floats:
    """[features] shares, logarithms of counts, and the replay's step in units of the least one; none tells names."""
    return numpy.concatenate([_times(traits), _counts(traits), _kinds(traits), _surroundings(traits)])


def _times(traits: Traits) -> Floats:
    """What the replay says."""
    prediction, scene = traits.prediction, traits.scene
    step = prediction.step_time
    links = len(scene.topology.channels)
    busy = prediction.demand.sum(axis=0) / step
    wires, hosts, cores = busy[:links], busy[links : links + scene.ranks], busy[links + scene.ranks :]
    workload = scene.workload
    path = dict.fromkeys(_PATH, 0.0)
    for span in prediction.critical_path:
        path[_waits_for(span.name)] += span.seconds / step
    shares = [
        numpy.log(step / scene.scale),
        numpy.log(step),
        numpy.log(traits.fluid / step),
        prediction.synchronization_time / step,
        (workload.forward_time + workload.backward_time) / step,
        wires.max(initial=0.0),
        wires.mean() if links else 0.0,
        hosts.max(),
        hosts.mean(),
        cores.sum(),
    ]
    return numpy.array([*shares, *path.values()])


def _waits_for(name: str) -> str:
    if name in _PATH:
        return name
    channel = name.rpartition(" on ")[2]
    return _ON.get(channel, "hosts" if channel.startswith("host of rank ") else "links")


def _counts(traits: Traits) -> Floats:
    """How many messages, shards and pieces there are, in all and a second."""
    shards, step = traits.shards, traits.prediction.step_time
    numbers = [
        len(traits.mode),
        len(shards.message),
        shards.pieces.sum(),
        (traits.mode == 0).sum(),
        (traits.mode == 1).sum(),
        (traits.mode > 3).sum(),
        (shards.pieces * (shards.depth > 0)).sum(),
    ]
    ranks = traits.scene.ranks
    crowd = traits.scene.constants.crowd(ranks)
    a_second = [1e-3 * crowd * ranks * number / step for number in (len(traits.mode), shards.pieces.sum())]
    depth = numpy.average(shards.depth, weights=shards.bytes + 1) if len(shards.depth) else 0.0
    return numpy.array([*numpy.log1p(numbers), *numpy.log1p(a_second), depth / ranks])


def _kinds(traits: Traits) -> Floats:
    """Share of the bytes that travels so and so, and of the messages."""
    weights = traits.bytes / max(1.0, traits.bytes.sum())
    modes = numpy.bincount(traits.mode, weights, len(MODES))
    compressors = numpy.bincount(traits.compressor, weights, len(COMPRESSORS))
    counts = numpy.bincount(traits.mode, minlength=len(MODES)) / len(traits.mode)
    flags = [
        weights @ traits.served,
        weights @ traits.local,
        weights @ traits.row_wise,
        weights @ (traits.priority > 0),
    ]
    return numpy.concatenate([modes, compressors, counts, flags])


def _surroundings(traits: Traits) -> Floats:
    """The workload and the cluster, as far as no plan changes them."""
    scene = traits.scene
    rates = scene.topology.capacities
    latencies = [channel.latency for channel in scene.topology.channels]
    return numpy.array(
        [
            numpy.log(scene.ranks),
            numpy.log(len(scene.cluster.nodes)),
            numpy.log10(scene.bytes.sum() + 1) / 8,
            numpy.log(len(scene.bytes)),
            numpy.log(rates.max() / rates.min()) if len(rates) else 0.0,
            numpy.log1p(1e4 * max(latencies, default=0.0) / scene.scale),
            numpy.log(scene.constants.crowd(scene.ranks)),
        ]
    )

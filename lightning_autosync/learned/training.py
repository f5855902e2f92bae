"""Trains one network: a ranking loss over pairs (RankNet; Burges et al., 2005), plus a regression loss on times."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn

from lightning_autosync.documents import Index, Record
from lightning_autosync.engine.cpu_scheduling import one_thread
from lightning_autosync.learned.examples import Examples
from lightning_autosync.learned.networks import SimulatorNetwork

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]

CERTAIN = 2.0
"""Smallest difference, in standard errors, of two measured times that count as different."""
_CHUNK = 32
"""Number of plans of one workload on one cluster that stay together in a batch: more plans make more pairs to rank."""
_FAR = 0.2
"""Error of a logarithm above which the loss is linear instead of quadratic (Huber, 1964)."""
_CLIP = 1.0
"""Largest norm of the gradient."""


class Training(Record):
    """How networks are trained.

    Attributes:
        part: trained part: ``all`` of a network, or its ``head`` alone, for which plans are embedded only once.
        epochs: number of passes over the samples.
        least_steps: smallest total number of steps; few samples get more epochs.
        learning_rate: peak learning rate of AdamW; it warms up over a twentieth of the steps and follows a cosine.
        weight_decay: weight decay of AdamW.
        batch: number of plans in a step.
        sharpness: factor on differences of scores in the ranking loss; for logarithms of seconds, 10 separates times
            that differ by 10%. It applies only to kinds that correct the replay: scores of the paper's simulators have
            no unit, and their published loss has no factor (1).
    """

    part: Literal["all", "head"] = "all"
    epochs: Annotated[PositiveInt, Field(le=100_000)] = 20
    least_steps: Annotated[Index, Field(le=10_000_000)] = 100
    learning_rate: Annotated[PositiveFloat, Field(le=1e3)] = 2e-3
    weight_decay: Annotated[NonNegativeFloat, Field(le=1e3)] = 1e-3
    batch: Annotated[PositiveInt, Field(le=1_000_000)] = 192
    sharpness: Annotated[PositiveFloat, Field(le=1e6)] = 10.0


TUNING = Training(part="head", epochs=10, learning_rate=1e-3)
"""Default settings for networks that were fitted before."""
MEMBERS = 3
"""Default number of networks of an ensemble."""
_TRAINING = {"linear": Training(epochs=30, learning_rate=1e-2)}


def first_training(kind: str) -> Training:
    """Default settings of the first fit of a kind of network."""
    return _TRAINING.get(kind, Training())


@one_thread()  # a step takes milliseconds, and waits for the slowest thread where cores are busy
def train(
    network: SimulatorNetwork,
    examples: Examples,
    settings: Training,
    seed: int,
    validation: Examples | None = None,
) -> float | None:
    """Train a network in place.

    Args:
        network: the network; training continues from its weights.
        settings: training settings.
        validation: examples whose loss chooses the best epoch, or the initial network if no epoch improves on it. None
            keeps the last epoch.

    Returns:
        The validation loss of the kept weights; None without ``validation``.
    """
    random = numpy.random.default_rng(seed)
    trained, answers = _trained(network, examples, settings)
    optimizer = torch.optim.AdamW(trained.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    steps_of_epoch = math.ceil(len(examples) / settings.batch)
    epochs = max(settings.epochs, math.ceil(settings.least_steps / steps_of_epoch))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_factor(step, epochs * steps_of_epoch))
    best, kept = math.inf, None
    if validation is not None:
        best, kept = _validate(network, validation, settings), copy.deepcopy(network.state_dict())
    for _ in range(epochs):
        network.train()
        for places in _batches(examples.pair, settings.batch, random):
            optimizer.zero_grad()
            loss = _loss(network, answers(places), examples.part(places), settings.sharpness)
            loss.backward()
            nn.utils.clip_grad_norm_(trained.parameters(), _CLIP)
            optimizer.step()
            scheduler.step()
        if validation is not None and (found := _validate(network, validation, settings)) < best:
            best, kept = found, copy.deepcopy(network.state_dict())
    if kept is None:
        return None
    network.load_state_dict(kept)
    return best


def _trained(
    network: SimulatorNetwork, examples: Examples, settings: Training
) -> tuple[nn.Module, Callable[[Integers], torch.Tensor]]:
    """The module to train, and a function from indices of examples to their scores."""
    if settings.part == "all":
        return network, lambda places: network(network.collate([examples.items[place] for place in places]))
    embedded = embed(network, examples.items)
    return network.head, lambda places: network.score(embedded[torch.from_numpy(places)])


def embed(network: SimulatorNetwork, items: Sequence[Any], batch: int = 256) -> torch.Tensor:
    """[plans, width] inputs of the network's head."""
    network.eval()
    with torch.no_grad():
        parts = [network.embed(network.collate(items[start : start + batch])) for start in range(0, len(items), batch)]
    return torch.cat(parts)


@one_thread()
def scores(network: SimulatorNetwork, items: Sequence[Any]) -> Floats:
    """[plans] the network's scores."""
    if not items:
        return numpy.zeros(0)
    embedded = embed(network, items)
    with torch.no_grad():
        return network.score(embedded).numpy().astype(numpy.float64)


def distinct_pairs(target: Floats, noise: Floats, drift: Floats, batch: Integers) -> NDArray[numpy.bool_]:
    """[samples, samples] whether two measured times differ by more than their noise.

    Args:
        target: [samples] logarithms of the seconds.
        noise: [samples] standard errors of ``target`` within a batch.
        drift: [samples] standard deviations of the part that a batch shares; it cancels within a batch.
        batch: [samples] number of the batch.
    """
    between = batch[:, None] != batch[None, :]
    variance = noise[:, None] ** 2 + noise[None, :] ** 2 + between * (drift[:, None] ** 2 + drift[None, :] ** 2)
    distinct: NDArray[numpy.bool_] = abs(target[:, None] - target[None, :]) > CERTAIN * numpy.sqrt(variance)
    return distinct


def _loss(
    network: SimulatorNetwork | type[SimulatorNetwork], score: torch.Tensor, part: Examples, sharpness: float
) -> torch.Tensor:
    """The ranking loss over distinguishable pairs, plus the regression loss if the kind has one."""
    same = part.pair[:, None] == part.pair[None, :]
    distinct = distinct_pairs(part.target, part.noise, part.drift, part.batch)
    slower = (part.target[:, None] > part.target[None, :]) & same & distinct
    upper, lower = (torch.from_numpy(places) for places in numpy.nonzero(slower))
    factor = sharpness if network.CORRECTS else 1.0
    base = torch.from_numpy(part.base).float()
    value = base + score
    loss = score.sum() * 0.0  # keeps the graph for backward if a batch has no distinguishable pair
    if len(upper):
        loss = loss + nn.functional.softplus(factor * (value[lower] - value[upper])).mean()
    if network.REGRESSION:
        target = torch.from_numpy(part.target).float()
        loss = loss + network.REGRESSION * nn.functional.huber_loss(value / _FAR, target / _FAR)
    return loss


def _validate(network: SimulatorNetwork, examples: Examples, settings: Training) -> float:
    """The loss over all pairs of examples of the same workload and cluster."""
    score = torch.from_numpy(scores(network, examples.items)).float()
    total = 0.0
    for pair in numpy.unique(examples.pair):
        places = numpy.flatnonzero(examples.pair == pair)
        total += len(places) * float(_loss(network, score[places], examples.part(places), settings.sharpness))
    return total / len(examples)


def _batches(pair: Integers, size: int, random: numpy.random.Generator) -> Iterator[Integers]:
    """Batches that contain every sample once, in shuffled chunks of one workload and cluster."""
    chunks = []
    for one in numpy.unique(pair):
        members = random.permutation(numpy.flatnonzero(pair == one))
        chunks += [members[start : start + _CHUNK] for start in range(0, len(members), _CHUNK)]
    order = random.permutation(len(chunks))
    shuffled = numpy.concatenate([chunks[place] for place in order])
    for start in range(0, len(shuffled), size):
        yield shuffled[start : start + size]


def _rate_factor(step: int, steps: int) -> float:
    """Factor on the learning rate: a linear warm-up, then a cosine decay."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))) + 1e-3)

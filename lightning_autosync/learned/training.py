"""Trains one network: pairs in the right order (RankNet; Burges et al., 2005), and times near the measured ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import numpy
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn

from lightning_autosync.documents import Index, Record
from lightning_autosync.learned.examples import Examples
from lightning_autosync.learned.networks import SimulatorNetwork


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch and DGL compute on the calling thread alone, within the block or the decorated function.

    These networks' steps last milliseconds: threads gain little where cores are idle, and where live workers or other
    trainings keep them busy, every operation waits for the slowest thread.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]

CERTAIN = 2.0
"""Standard errors of a difference from which on two measured times are told apart."""
_CHUNK = 32
"""Plans of one workload on one cluster that come together in a batch; the more, the more pairs to rank."""
_FAR = 0.2
"""Error of a logarithm from which on it counts linearly and no more squared (Huber, 1964)."""
_CLIP = 1.0
"""Norm of the gradient at most."""


class Training(Record):
    """How networks are trained.

    Attributes:
        part: ``all`` of a network, or its ``head`` alone, for which plans are embedded once.
        epochs: passes over the samples.
        least_steps: steps in all at least; few samples are passed over more often.
        learning_rate: of Adam at its height; it warms up over a twentieth of the steps and falls as a cosine.
        weight_decay: of AdamW.
        batch: plans in a step.
        sharpness: factor on differences of scores in the ranking loss; for logarithms of seconds, 10 tells 10% apart.
            Only of a kind that corrects the replay: scores of the paper's simulators have no unit, and their loss has
            no factor (1), as published.
    """

    part: Literal["all", "head"] = "all"
    epochs: Annotated[PositiveInt, Field(le=100_000)] = 20
    least_steps: Annotated[Index, Field(le=10_000_000)] = 100
    learning_rate: Annotated[PositiveFloat, Field(le=1e3)] = 2e-3
    weight_decay: Annotated[NonNegativeFloat, Field(le=1e3)] = 1e-3
    batch: Annotated[PositiveInt, Field(le=1_000_000)] = 192
    sharpness: Annotated[PositiveFloat, Field(le=1e6)] = 10.0


TUNING = Training(part="head", epochs=10, learning_rate=1e-3)
"""For networks that were fitted before."""


@one_thread()
def train(
    network: SimulatorNetwork,
    examples: Examples,
    settings: Training,
    seed: int,
    validation: Examples | None = None,
) -> float | None:
    """Train a network in place.

    Args:
        network: trained further from what it knows.
        examples: to learn from.
        settings: how.
        seed: of the order of the samples.
        validation: by whose loss the best epoch is chosen, or the network as it was; None keeps the last.

    Returns:
        The validation loss of what was kept; None without.
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
    """The module to train, and a function that gives the scores of the examples at some places."""
    if settings.part == "all":
        return network, lambda places: network(network.collate([examples.items[place] for place in places]))
    embedded = embed(network, examples.items)
    return network.head, lambda places: network.score(embedded[torch.from_numpy(places)])


def embed(network: SimulatorNetwork, items: Sequence[Any], batch: int = 256) -> torch.Tensor:
    """[plans, width] outputs of the network before its head."""
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


def told_apart(target: Floats, noise: Floats, drift: Floats, batch: Integers) -> NDArray[numpy.bool_]:
    """[samples, samples] whether two measured times differ by more than their noise.

    Args:
        target: [samples] logarithms of the seconds.
        noise: [samples] standard errors of these within a batch.
        drift: [samples] standard deviations of what a batch has in common, which is no difference within it.
        batch: [samples] number of each one's batch.
    """
    between = batch[:, None] != batch[None, :]
    variance = noise[:, None] ** 2 + noise[None, :] ** 2 + between * (drift[:, None] ** 2 + drift[None, :] ** 2)
    apart: NDArray[numpy.bool_] = abs(target[:, None] - target[None, :]) > CERTAIN * numpy.sqrt(variance)
    return apart


def _loss(
    network: SimulatorNetwork | type[SimulatorNetwork], score: torch.Tensor, part: Examples, sharpness: float
) -> torch.Tensor:
    """The ranking loss over pairs that can be told apart, and the regression loss where the kind has one."""
    same = part.pair[:, None] == part.pair[None, :]
    apart = told_apart(part.target, part.noise, part.drift, part.batch)
    slower = (part.target[:, None] > part.target[None, :]) & same & apart
    upper, lower = (torch.from_numpy(places) for places in numpy.nonzero(slower))
    factor = sharpness if network.CORRECTS else 1.0
    base = torch.from_numpy(part.base).float()
    value = base + score
    loss = score.sum() * 0.0
    if len(upper):
        loss = loss + nn.functional.softplus(factor * (value[lower] - value[upper])).mean()
    if network.REGRESSION:
        target = torch.from_numpy(part.target).float()
        loss = loss + network.REGRESSION * nn.functional.huber_loss(value / _FAR, target / _FAR)
    return loss


def _validate(network: SimulatorNetwork, examples: Examples, settings: Training) -> float:
    """The loss over all pairs of the examples, workload by workload and cluster by cluster."""
    score = torch.from_numpy(scores(network, examples.items)).float()
    total = 0.0
    for pair in numpy.unique(examples.pair):
        places = numpy.flatnonzero(examples.pair == pair)
        total += len(places) * float(_loss(network, score[places], examples.part(places), settings.sharpness))
    return total / len(examples)


def _batches(pair: Integers, size: int, random: numpy.random.Generator) -> Iterator[Integers]:
    """Every sample once, in chunks of one workload and cluster."""
    chunks = []
    for one in numpy.unique(pair):
        members = random.permutation(numpy.flatnonzero(pair == one))
        chunks += [members[start : start + _CHUNK] for start in range(0, len(members), _CHUNK)]
    order = random.permutation(len(chunks))
    shuffled = numpy.concatenate([chunks[place] for place in order])
    for start in range(0, len(shuffled), size):
        yield shuffled[start : start + size]


def _rate_factor(step: int, steps: int) -> float:
    """Factor on the learning rate: a linear warm-up, then a cosine."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))) + 1e-3)

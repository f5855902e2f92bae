"""What the checks of replicas cost a training step: ``python tests/benchmarks/cost_of_checks.py``.

Of the layers60 and layers300 models of ``autosync bench experiment=overhead``: the look at the parameters before each
backward pass, and the comparison of weights, a thousandth of which falls on each step. Medians of 200 and 20.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from lightning_autosync.engine.replicas import ParameterTracker, bit_sum
from lightning_autosync.strategy.settings import CHECK_REPLICAS

STEP = {60: 0.0365, 300: 0.0422}
"""Seconds of a step of two ranks under the best-tuned DDP, by parameter tensors (docs/measured-links.md)."""


def layers(tensors: int) -> nn.Module:
    """About 4.4 million parameters in so many tensors."""
    width = int((4.4e6 / (tensors / 2)) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2)))


def median(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    torch.set_num_threads(1)
    for tensors, step in STEP.items():
        module = layers(tensors)
        watch = ParameterTracker(module)
        parameters = [parameter.detach() for parameter in module.parameters()]
        look = median(watch.changed, 200)
        compare = median(lambda found=parameters: [bit_sum(each) for each in found], 20)
        cost = look + compare / CHECK_REPLICAS
        print(
            f"{tensors} tensors: look {1e6 * look:.0f} us, comparison {1e3 * compare:.1f} ms every {CHECK_REPLICAS} "
            f"steps; {cost / step:.2%} of a step of {1e3 * step:.1f} ms"
        )


if __name__ == "__main__":
    main()

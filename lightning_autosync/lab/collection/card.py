"""The data card of a dataset: its contents and its origin, as README.md in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_autosync.documents import bytes_text, write_text
from lightning_autosync.learned.dataset import COLUMNS, Dataset
from lightning_autosync.workload import Workload, catalogue

_HEAD = """\
# Step times of synchronization plans

{count} pairs of a plan and its measured step time: {workloads} workloads on {clusters} clusters, written by
`autosync collect`. Links are emulated (network namespaces and token buckets, no latencies up to 1 ms), and computation
is paced: it lasts as long as the workload says and takes no core. Processes, connections and sums are real.

Read it with `lightning_autosync.learned.dataset.Dataset.load("{name}")`: a sequence of `Sample`; `.frame()` gives a
pandas data frame. Samples measured beside too much other load ({disturbed} here) are left out unless
`disturbed=True`. Each file's SHA-256 is in `manifest.json` and checked when it is read.

## How it was collected
Every workload (a model of the catalogue, scaled to a size and a share of computation that were drawn) is on every
cluster. Plans are drawn in several ways (column `kind`): `reference` and `buckets` are DDP's own way with buckets of
the default or a random size, a builder's name means its plan with default or random arguments, `free` plans draw every
aspect of every message by itself, `drawn` ones are uniform points of the plan space, `evolved` ones its points after
selection, mutation and crossover with the replay as price. Plans that the replay prices at many times the best one are
not measured. A plan runs in live workers with an engine of its own, after steps of warm-up that are not counted.
Before each batch of plans the reference plan is measured again, which shows whether times drift.
"""

_LIMITS = """\
## Limits
Models are small: {least} to {most} of gradients. Widths are scaled, and dense parameters with less than a
given share of a model's bytes are left out (`lightest` of `autosync collect`). {compression} a message.
Counted steps of a sample: {steps}.

"""
_COMPRESSED = '"compressor":(?!"none")'
"""In the canonical JSON of a plan: a message that is compressed."""


def write_card(directory: Path) -> None:
    """Write the card of the dataset in a folder.

    Raises:
        DocumentError: the dataset is damaged.
    """
    write_text(directory / "README.md", card(directory))


def card(directory: Path) -> str:
    """The text of the card."""
    dataset = Dataset.load(directory, disturbed=True)
    frame = dataset.frame()
    workloads = [dataset[int(place)].workload for place in frame.drop_duplicates("workload").index]
    head = _HEAD.format(
        count=len(frame),
        workloads=len(workloads),
        clusters=frame["cluster"].nunique(),
        name=directory.name,
        disturbed=int(frame["disturbed"].sum()),
    )
    if not workloads:
        return "\n".join([head, _schema()])
    parts = [head, _limits(frame, workloads), _schema(), _counts(frame), _quality(frame), _environments(dataset)]
    return "\n".join(parts)


def _schema() -> str:
    rows = [(f"`{name}`", meaning) for name, meaning in COLUMNS.items()]
    return "## Columns of samples\n" + _table(("column", "meaning"), rows)


def _limits(frame: Any, workloads: Sequence[Workload]) -> str:
    """Sizes of the workloads beside those of the models whose names they have; steps and compression of the samples."""
    sizes = [workload.bytes for workload in workloads]
    steps = frame["steps"].map(len).value_counts().sort_index()
    compressed = int(frame["plan"].str.contains(_COMPRESSED).sum())
    rows = [
        (workload.name, *_size(workload), *_size_of_whole(workload.name))
        for workload in sorted(workloads, key=lambda workload: workload.name)
    ]
    told = _LIMITS.format(
        least=bytes_text(min(sizes)),
        most=bytes_text(max(sizes)),
        steps=", ".join(f"{number} ({samples} samples)" for number, samples in steps.items()),
        compression=f"{compressed} plans compress" if compressed else "No plan compresses",
    )
    return told + _table(("workload", "size", "parameters", "size of the model", "parameters of the model"), rows)


def _size_of_whole(name: str) -> tuple[str, str]:
    """The size of the model of the catalogue from which a workload was drawn; empty if its name is of no model."""
    model = name.rpartition("-")[0]
    return _size(catalogue.build(model)) if model in catalogue.names() else ("", "")


def _size(workload: Workload) -> tuple[str, str]:
    return bytes_text(workload.bytes), str(len(workload.variables))


def _counts(frame: Any) -> str:
    """Numbers of pairs by workload and cluster, and by kind."""
    counts = frame.pivot_table(
        index="workload_name", columns="cluster_name", values="seconds", aggfunc="count", fill_value=0
    )
    rows = [(name, *map(str, row)) for name, row in zip(counts.index, counts.to_numpy().tolist(), strict=True)]
    by_kind = [
        (kind, str(len(group)), f"{1e3 * group['seconds'].median():.1f}") for kind, group in frame.groupby("kind")
    ]
    return "\n".join(
        [
            "## Pairs",
            _table(("workload", *counts.columns), rows),
            _table(("kind", "pairs", "median step, ms"), by_kind),
        ]
    )


def _quality(frame: Any) -> str:
    """Noise of samples, drift of the reference plans, and errors of the replay."""
    quiet = frame[~frame["disturbed"]]
    if not len(quiet):
        return ""
    error = (quiet["replayed"] / quiet["seconds"] - 1).abs()
    drift = (quiet["drift"] - 1).abs()
    rows = [
        (name, f"{values.median():.1%}", f"{values.quantile(0.9):.1%}")
        for name, values in (
            ("standard error of a sample's median step", quiet["noise"]),
            ("reference plan's step off its median", drift.dropna()),
            ("replay's price off the median step", error.dropna()),
        )
        if len(values)
    ]
    return "## Noise, of undisturbed samples\n" + _table(("", "median", "90 in 100 below"), rows)


def _environments(dataset: Dataset) -> str:
    lines = ["## Measured on"]
    for fingerprint, facts in dataset.environments.items():
        lines.append(f"- `{fingerprint}`: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    return "\n".join([*lines, ""])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

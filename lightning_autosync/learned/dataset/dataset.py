"""`Dataset`: measured steps read from files."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import checked, parse_json
from lightning_autosync.errors import DocumentError, needed_for
from lightning_autosync.learned.dataset.parts import Manifest, load_manifest, no_rows, read_table
from lightning_autosync.learned.dataset.sample import (
    COLUMNS,
    DOCUMENTS,
    PAIR,
    Sample,
    row_sample,
    row_steps,
    step_noise,
)
from lightning_autosync.replay.constants import Cores
from lightning_autosync.workload import Workload

Documents = Mapping[tuple[str, str], tuple[str, str]]
"""JSON text and its source, by kind (workload, cluster, environment) and fingerprint."""
_Facts = dict[str, Any]
_SOURCE = "source"
"""Column with the source of a row: file and row number, from 0."""


class Dataset(Sequence[Sample]):
    """A sequence of samples. Each workload and cluster is read once, on first use.

    Args:
        rows: a `pyarrow.Table` with the columns of `COLUMNS`, and a column ``source`` that names rows in errors.
    """

    def __init__(self, rows: Any, documents: Documents) -> None:
        self._rows = rows
        self._documents = documents
        self._workloads: dict[str, Workload] = {}
        self._clusters: dict[str, ClusterSpec] = {}
        self._samples: dict[int, Sample] = {}

    @classmethod
    def load(
        cls, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, disturbed: bool = False
    ) -> Dataset:
        """The samples in one or more folders, in the order in which they were added.

        Each folder contributes each pair (workload, cluster and plan) once.

        Args:
            paths: folders written by ``autosync collect`` or `Writer`.
            disturbed: whether to include samples that were measured under too much other load, for pairs without an
                undisturbed sample.

        Raises:
            DocumentError: a folder has no dataset, or a file is missing, truncated, altered or of another version; the
                message names the file and a remedy.
        """
        from lightning_autosync.learned.dataset.arrow import pyarrow

        folders = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
        documents: dict[tuple[str, str], tuple[str, str]] = {}
        tables: list[Any] = []
        for folder in folders:
            manifest = load_manifest(folder)
            for part in manifest.of("documents"):
                rows = _placed(read_table(folder, part), str(folder / part.file)).to_pylist()
                documents |= {(row["kind"], row["fingerprint"]): (row["document"], row[_SOURCE]) for row in rows}
            tables.append(_samples(folder, manifest, disturbed))
        samples = pyarrow.concat_tables([_placed(no_rows("samples"), ""), *tables])
        _check_documents(samples, documents, folders)
        return cls(samples.combine_chunks(), documents)

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Dataset: ...
    def __getitem__(self, index: int | slice) -> Sample | Dataset:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        place = range(len(self))[index]
        if place not in self._samples:
            row = self._rows.slice(place, 1).to_pylist()[0]
            workload, cluster = self._workload(row["workload"]), self._cluster(row["cluster"])
            self._samples[place] = row_sample(row, workload, cluster, row[_SOURCE])
        return self._samples[place]

    def __iter__(self) -> Iterator[Sample]:
        return (self[place] for place in range(len(self)))

    def select(self, places: Iterable[int]) -> Dataset:
        """The samples at some indices, in this order; they share workloads and clusters with this dataset."""
        from lightning_autosync.learned.dataset.arrow import pyarrow

        # The type is explicit, because pyarrow cannot infer it from an empty list.
        chosen = Dataset(self._rows.take(pyarrow.array(places, pyarrow.int64())), self._documents)
        chosen._workloads, chosen._clusters = self._workloads, self._clusters
        return chosen

    def frame(self) -> Any:
        """A `pandas.DataFrame` with one row per sample: the columns of `COLUMNS` and derived ones.

        The derived columns are ``workload_name``, ``cluster_name``, ``ranks``, ``seconds`` and ``noise`` (as in
        `Sample`), and ``drift``: ``reference`` divided by its median over the samples of the same workload, cluster and
        environment.

        Raises:
            DocumentError: the steps of a row are invalid.
        """
        with needed_for("A data frame of samples"):
            frame = self._rows.select(list(COLUMNS)).to_pandas()
        named: dict[str, Callable[[str], Workload | ClusterSpec]] = {
            "workload": self._workload,
            "cluster": self._cluster,
        }
        for kind, find in named.items():
            names = {of: find(of).name for of in frame[kind].unique()}
            frame[f"{kind}_name"] = frame[kind].map(names).astype("string")
        ranks = {of: self._cluster(of).world_size for of in frame["cluster"].unique()}
        frame["ranks"] = frame["cluster"].map(ranks)
        steps = [row_steps(*row) for row in zip(frame["steps"], self._rows[_SOURCE].to_pylist(), strict=True)]
        frame["steps"] = steps
        frame["seconds"] = [statistics.median(taken) for taken in steps]
        frame["noise"] = [step_noise(taken) for taken in steps]
        usual = frame.groupby(["workload", "cluster", "environment"])["reference"].transform("median")
        frame["drift"] = frame["reference"] / usual
        return frame

    @cached_property
    def environments(self) -> dict[str, dict[str, Any]]:
        """The environments of the samples, by fingerprint."""
        found = sorted(set(self._rows["environment"].to_pylist()))
        return {fingerprint: checked(_Facts, *self._plain("environment", fingerprint)) for fingerprint in found}

    @property
    def cores(self) -> set[float]:
        """The numbers of cores that ranks shared, from the environments that record it.

        Raises:
            DocumentError: a recorded value is not a number of cores.
        """
        made = set()
        for fingerprint, facts in self.environments.items():
            if "cores" in facts:
                _, where = self._plain("environment", fingerprint)
                kind: Any = Cores
                made.add(float(checked(kind, facts["cores"], f"{where}: cores")))
        return made

    def _workload(self, fingerprint: str) -> Workload:
        if fingerprint not in self._workloads:
            self._workloads[fingerprint] = Workload.from_dict(*self._plain("workload", fingerprint))
        return self._workloads[fingerprint]

    def _cluster(self, fingerprint: str) -> ClusterSpec:
        if fingerprint not in self._clusters:
            self._clusters[fingerprint] = ClusterSpec.from_dict(*self._plain("cluster", fingerprint))
        return self._clusters[fingerprint]

    def _plain(self, kind: str, fingerprint: str) -> tuple[Any, str]:
        """A document as plain data, and its source for errors."""
        text, place = self._documents[kind, fingerprint]
        where = f"{place}: {kind} {fingerprint}"
        return parse_json(text, where), where


def _samples(folder: Path, manifest: Manifest, disturbed: bool) -> Any:
    """One row per pair in a folder, with its source; for ``disturbed`` see `Dataset.load`."""
    from lightning_autosync.learned.dataset.arrow import pyarrow

    parts = [_placed(read_table(folder, part), str(folder / part.file)) for part in manifest.of("samples")]
    rows = pyarrow.concat_tables([_placed(no_rows("samples"), ""), *parts])
    if not disturbed:
        return rows.filter(pyarrow.compute.invert(rows["disturbed"]))
    pairs = list(zip(*(rows[name].to_pylist() for name in PAIR), strict=True))
    marks = rows["disturbed"].to_pylist()
    settled = {pair for pair, mark in zip(pairs, marks, strict=True) if not mark}
    kept = [not mark or pair not in settled for pair, mark in zip(pairs, marks, strict=True)]
    return rows.filter(pyarrow.array(kept, pyarrow.bool_()))


def _placed(rows: Any, path: str) -> Any:
    """The rows with a column of their sources."""
    from lightning_autosync.learned.dataset.arrow import pyarrow

    places = [f"{path}: row {number}" for number in range(rows.num_rows)]
    return rows.append_column(_SOURCE, pyarrow.array(places, pyarrow.string()))


def _check_documents(rows: Any, documents: Documents, folders: Sequence[Path]) -> None:
    for kind in DOCUMENTS:
        for fingerprint in rows[kind].unique().to_pylist():
            if (kind, fingerprint) not in documents:
                raise DocumentError(
                    f"{', '.join(map(str, folders))}: samples need {kind} {fingerprint}, but no part contains it; "
                    "restore its documents part from a copy"
                )

"""`Dataset`: measured steps read from files."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.simulator.dataset.entry import COLUMNS, row_sample
from lightning_autosync.simulator.dataset.manifest import Table, load_manifest, read_part
from lightning_autosync.simulator.dataset.sample import Sample, step_noise
from lightning_autosync.simulator.dataset.tables import from_parquet, schema
from lightning_autosync.workload import Workload

Documents = Mapping[tuple[str, str], str]
"""JSON text by kind (workload, cluster, environment) and fingerprint."""


class Dataset(Sequence[Sample]):
    """A sequence of samples; documents are read when they are first asked for, each workload and cluster once.

    Args:
        rows: a `pyarrow.Table` with the columns of `COLUMNS`.
        documents: those that the rows name.
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
        """The samples in one or several folders, in the order in which they were added.

        Args:
            paths: folders that ``autosync collect`` or `Writer` filled.
            disturbed: whether those measured beside too much other load come too.

        Raises:
            DocumentError: a folder has no dataset, or a file is missing, truncated, altered or of another version; the
                message names it and says what to do.
        """
        import pyarrow
        import pyarrow.compute

        folders = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
        documents: dict[tuple[str, str], str] = {}
        tables: list[Any] = []
        for folder in folders:
            for table in _read(folder, "documents"):
                documents |= {(row["kind"], row["fingerprint"]): row["document"] for row in table.to_pylist()}
            tables += _read(folder, "samples")
        rows = pyarrow.concat_tables(tables) if tables else schema("samples").empty_table()
        _check_documents(rows, documents, folders)
        if not disturbed:
            rows = rows.filter(pyarrow.compute.invert(rows["disturbed"]))
        return cls(rows.combine_chunks(), documents)

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
            self._samples[place] = row_sample(row, self._workload(row["workload"]), self._cluster(row["cluster"]))
        return self._samples[place]

    def __iter__(self) -> Iterator[Sample]:
        return (self[place] for place in range(len(self)))

    def select(self, places: Iterable[int]) -> Dataset:
        """The samples at some places, in that order; workloads and clusters are shared with this dataset."""
        chosen = Dataset(self._rows.take(list(places)), self._documents)
        chosen._workloads, chosen._clusters = self._workloads, self._clusters
        return chosen

    def frame(self) -> Any:
        """A `pandas.DataFrame`, a row a sample: the columns of `COLUMNS` and what follows from them.

        Added are ``workload_name`` and ``cluster_name``, ``ranks``, ``seconds`` and ``noise`` (as of `Sample`), and
        ``drift``: `reference` over its median among the samples of the same workload, cluster and environment.
        """
        frame = self._rows.select(list(COLUMNS)).to_pandas()
        for kind in ("workload", "cluster"):
            names = {of: self._plain(kind, of)["name"] for of in frame[kind].unique()}
            frame[f"{kind}_name"] = frame[kind].map(names).astype("string")
        ranks = {of: self._cluster(of).world_size for of in frame["cluster"].unique()}
        frame["ranks"] = frame["cluster"].map(ranks)
        steps = [tuple(taken) for taken in frame["steps"]]
        frame["steps"] = steps
        frame["seconds"] = [statistics.median(taken) for taken in steps]
        frame["noise"] = [step_noise(taken) for taken in steps]
        usual = frame.groupby(["workload", "cluster", "environment"])["reference"].transform("median")
        frame["drift"] = frame["reference"] / usual
        return frame

    @cached_property
    def environments(self) -> dict[str, dict[str, Any]]:
        """What samples ran on, by fingerprint."""
        found = sorted(set(self._rows["environment"].to_pylist()))
        return {fingerprint: self._plain("environment", fingerprint) for fingerprint in found}

    def _workload(self, fingerprint: str) -> Workload:
        if fingerprint not in self._workloads:
            self._workloads[fingerprint] = Workload.from_dict(self._plain("workload", fingerprint))
        return self._workloads[fingerprint]

    def _cluster(self, fingerprint: str) -> ClusterSpec:
        if fingerprint not in self._clusters:
            self._clusters[fingerprint] = ClusterSpec.from_dict(self._plain("cluster", fingerprint))
        return self._clusters[fingerprint]

    def _plain(self, kind: str, fingerprint: str) -> Any:
        return json.loads(self._documents[kind, fingerprint])


def _read(folder: Path, table: Table) -> Iterator[Any]:
    for part in load_manifest(folder).of(table):
        yield from_parquet(table, read_part(folder, part), str(folder / part.file))


def _check_documents(rows: Any, documents: Documents, folders: Sequence[Path]) -> None:
    for kind in ("workload", "cluster", "environment"):
        for fingerprint in rows[kind].unique().to_pylist():
            if (kind, fingerprint) not in documents:
                raise DocumentError(
                    f"{', '.join(map(str, folders))}: {kind} {fingerprint} is named by samples but in no part; "
                    "restore the documents part that held it from a copy"
                )

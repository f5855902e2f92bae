"""Mutated documents of every kind: what is wrong is an error of this package that names the file, soon and cheaply."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import document_mutations as mutations
import pyarrow
import pytest
import torch
import yaml
from document_kinds import KINDS, Kind
from pyarrow import parquet

import lightning_autosync
from hydra_plugins.autosync._config import SweepError
from lightning_autosync.documents import Document, read_data
from lightning_autosync.errors import AutoSyncError, MissingPackageError

OWN = (AutoSyncError, SweepError)
SHORT, LONG = 60, 20_000
"""Mutations of all kinds together."""
MOST_SECONDS = 30
"""Of processor time for one document."""
MOST_MEMORY = 200 * 2**20
"""Bytes by which documents may raise the process's peak."""


class Endless(BaseException):
    """A document took too long; no exception that any code handles."""


@dataclass
class Fuzzer:
    """Reads mutations of one kind in a directory; keeps what went wrong by the place where it did."""

    kind: Kind
    folder: Path
    leaks: dict[str, str] = field(default_factory=dict)
    refused: int = 0
    slowest: float = 0.0
    grown: int = 0

    def __post_init__(self) -> None:
        self._folder = self.folder / "documents"
        self._folder.mkdir(parents=True)
        self._files = self.kind.make(self._folder)
        self._contents = {path.relative_to(self._folder): path.read_bytes() for path in self._all()}
        use = self.kind.read(self._folder)
        if use is not None:
            use()

    def play(self, seed: int) -> None:
        """One mutation."""
        random = Random(seed)
        name = Path(random.choice(self._files))
        content = _mutated(random, name, self._contents[name])
        self._restore(name, content)
        if self.kind.seal is not None and random.random() < 0.8:
            self.kind.seal(self._folder)
        begin, before = time.process_time(), _fresh_peak()
        why = self._read(name)
        self.slowest = max(self.slowest, time.process_time() - begin)
        grown = _peak() - before
        self.grown = max(self.grown, grown)
        if grown > MOST_MEMORY and not why:
            why = f"memory: {grown / 2**20:.0f} MB more"
        if why:
            self.leaks.setdefault(why, f"seed {seed}: {name}: {content[:2000]!r}")

    def _read(self, name: Path) -> str:
        use = None
        try:
            with _limited():
                use = self.kind.read(self._folder)
        except OWN as error:
            self.refused += 1
            return self._judged(str(error), name)
        except (Exception, Endless) as error:
            return _place(error)
        try:
            with _limited():
                if use is not None:
                    use()
        except OWN:
            self.refused += 1
        except (Exception, Endless) as error:
            return f"in use: {_place(error)}"
        return ""

    def _judged(self, message: str, name: Path) -> str:
        """What is wrong with a message."""
        names = (str(self._folder), *self.kind.names)
        if not any(one in message for one in names):
            return f"names no file: {re.sub(r'[0-9.]+', '0', message)[:80]}"
        if len(message) > 2000:
            return f"too long: {message[:200]}"
        return ""

    def _restore(self, name: Path, content: bytes) -> None:
        wanted = {**self._contents, name: content}
        for path in self._all():
            if path.relative_to(self._folder) not in wanted:
                path.unlink()
        for one, text in wanted.items():
            path = self._folder / one
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text)

    def _all(self) -> list[Path]:
        return [path for path in sorted(self._folder.rglob("*")) if path.is_file()]


def _mutated(random: Random, name: Path, content: bytes) -> bytes:
    if name.suffix == ".ckpt":  # its bytes are Lightning's to read
        buffer = BytesIO()
        made = mutations.mutate(random, torch.load(BytesIO(content), weights_only=True)["autosync"])
        torch.save({"autosync": made}, buffer)
        return buffer.getvalue()
    if random.random() < 0.25:
        return mutations.damage(random, content)
    if name.suffix == ".json":
        return mutations.as_json(mutations.mutate(random, json.loads(content)))
    if name.suffix in (".yaml", ".yml"):
        made = mutations.mutate(random, yaml.safe_load(content))
        return mutations.as_yaml(made) if random.random() < 0.3 else mutations.as_json(made)
    if name.suffix in (".jsonl", ".journal"):
        lines = content.splitlines(keepends=True)
        chosen = random.randrange(len(lines))
        lines[chosen] = mutations.as_json(mutations.mutate(random, json.loads(lines[chosen]))) + b"\n"
        return b"".join(lines)
    if name.suffix == ".parquet":
        return _mutated_table(random, content)
    return mutations.damage(random, content)


def _mutated_table(random: Random, content: bytes) -> bytes:
    found = parquet.read_table(BytesIO(content))
    rows: Any = found.to_pylist()
    made = [mutations.mutate(random, row) if random.random() < 0.5 else row for row in rows]
    buffer = BytesIO()
    try:
        parquet.write_table(pyarrow.Table.from_pylist(made, schema=found.schema), buffer)
    except (pyarrow.ArrowException, OverflowError, TypeError, AttributeError, ValueError):
        try:
            parquet.write_table(pyarrow.Table.from_pylist(made), buffer)
        except (pyarrow.ArrowException, OverflowError, TypeError, AttributeError, ValueError):
            return mutations.damage(random, content)
    return buffer.getvalue()


def _place(error: BaseException) -> str:
    """The kind of an error, and where in the package it came from."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if "lightning_autosync" in path:
            found = f"{path.rpartition('lightning_autosync/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__} at {found}: {str(error)[:60]!r}"


def _fresh_peak() -> int:
    """Resets this process's peak of memory to its present use, and returns it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Largest resident memory in bytes since it was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_an_earlier_peak_of_memory_hides_no_later_one() -> None:
    size = 300 * 2**20
    for _ in range(2):
        before = _fresh_peak()
        block = bytearray(b"x") * size
        assert _peak() - before > 0.9 * size
        del block


@contextmanager
def _limited() -> Iterator[None]:
    """Ends what takes too much of the processor's time; the alarm clock is pytest's."""

    def end(*_: object) -> None:
        raise Endless(f"more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def play(name: str, count: int, folder: Path) -> Fuzzer:
    """So many mutations of a kind; the same for the same count."""
    torch.set_num_threads(1)
    fuzzer = Fuzzer(KINDS[name], folder)
    begin = time.process_time()
    for number in range(count):
        fuzzer.play(zlib.crc32(name.encode()) + number)
    shutil.rmtree(folder)
    taken = time.process_time() - begin
    print(
        f"{name}: {count} mutations, {fuzzer.refused} refused, {taken:.1f} s, slowest {fuzzer.slowest:.2f} s, "
        f"{fuzzer.grown / 2**20:.0f} MB"
    )
    return fuzzer


def _count(name: str, total: int) -> int:
    """How many of the mutations are of a kind."""
    return math.ceil(total * KINDS[name].share / sum(kind.share for kind in KINDS.values()))


@pytest.mark.parametrize("name", KINDS)
def test_mutated(name: str, tmp_path: Path) -> None:
    fuzzer = play(name, _count(name, SHORT), tmp_path / "fuzz")
    assert fuzzer.leaks == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KINDS)
def test_mutated_often(name: str, tmp_path: Path) -> None:
    fuzzer = play(name, _count(name, LONG), tmp_path / "fuzz")
    assert fuzzer.leaks == {}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_files_that_are_small_only_as_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bomb.{suffix}"
    for content in mutations.bombs():
        path.write_bytes(content)
        before = _fresh_peak()
        with _limited(), suppress(AutoSyncError):
            read_data(path)
        assert _peak() - before < MOST_MEMORY


READERS = {"read_data", "parse_json", "read_text", "whole_lines", "checked"}
RAW = re.compile(
    r"json\.loads?\(|yaml\.\w*load\(|\.read_text\(|\.read_bytes\(|(?<!`)torch\.load\(|read_table\(|pickle\.loads?\("
)
NO_DOCUMENTS = {
    "lab.collection.drawing": "text that was made in the same process",
    "lab.collection.collector": "/proc",
    "measure.conditions": "/proc and /sys",
    "learned.registry": "the package's own configuration",
    "measure.timelines": "what tc says",
    "relaxed.transport.handshake": "messages between ranks",
    "relaxed.transport.stream": "messages between ranks",
    "relaxed.transport.payload": "messages between ranks",
    "engine.collectives": "messages between ranks",
    "engine.connections": "messages between ranks, /proc",
    "engine.failure_detector": "messages between ranks",
    "engine.rendezvous": "messages between ranks",
    "engine.exchanges.shared_memory": "/proc",
    "search.tuning.trials": "/proc",
    "search.prediction_server": "orders of its parent",
    "strategy.job": "messages between ranks",
    "strategy.trainer_state": "messages between ranks",
    "strategy.tuning.memory": "/proc and control groups",
    "strategy.tuning.predictor": "replies of its child",
    "measure.workers.job_pool": "messages between ranks",
    "measure.workers.process": "messages of workers",
    "measure.workers.worker": "messages of workers",
}
"""Modules that read something else, and what."""
COVERED = {name for kind in KINDS.values() for name in kind.covers}


def _modules() -> Iterator[tuple[str, str]]:
    package = Path(lightning_autosync.__file__).parent
    for path in sorted(package.rglob("*.py")):
        yield ".".join(path.relative_to(package).with_suffix("").parts), path.read_text()


def test_every_document_is_of_a_kind() -> None:
    for name, _ in _modules():
        with suppress(MissingPackageError):  # Ray is not installed here
            import_module(f"lightning_autosync.{name}")
    pending, found = [Document], set()
    while pending:
        for kind in pending.pop().__subclasses__():
            pending.append(kind)
            if kind.__module__.startswith("lightning_autosync."):
                found.add(kind.__module__.removeprefix("lightning_autosync."))
    assert found <= COVERED


def test_every_reader_is_of_a_kind() -> None:
    """A module that reads is one that a kind covers, or one of those that read no documents."""
    reading = {
        name
        for name, text in _modules()
        if not name.startswith("documents.") and (RAW.search(text) or READERS & _imported(text))
    }
    assert reading - COVERED == set(NO_DOCUMENTS)


def _imported(text: str) -> set[str]:
    """Names that a module has from `lightning_autosync.documents`."""
    if "from lightning_autosync.documents import" not in text:
        return set()  # to parse all modules takes seconds
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
    return {name.name for node in found if node.module == "lightning_autosync.documents" for name in node.names}

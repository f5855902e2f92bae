"""Storages of Optuna studies, journal files and databases, and a common error for all that they raise."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import optuna
from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from lightning_autosync.errors import DocumentError
from lightning_autosync.search.journal import Journal
from lightning_autosync.search.passwords import without_password, without_passwords

_JOURNALS = (".journal", ".log", ".jsonl")


STEP_SECONDS = "seconds of a step"
"""Name of the values of studies of plans."""


class StudyError(DocumentError):
    """A study cannot be opened, or is of another job."""


class StorageError(StudyError):
    """The storage of a study does not answer."""


def open_storage(storage: str | os.PathLike[str]) -> optuna.storages.BaseStorage:
    """Open a database (a URL) or a journal file (a path; the file is created if it does not exist).

    Raises:
        StudyError: the storage cannot be opened.
    """
    text = os.fspath(storage)
    try:
        if "://" in text:
            # Databases drop idle connections. With the ping SQLAlchemy reconnects, so that this does not end the run.
            return optuna.storages.get_storage(RDBStorage(text, engine_kwargs={"pool_pre_ping": True}))
        if Path(text).suffix not in _JOURNALS:
            raise StudyError(f"{text}: not a storage; allowed: a URL, or a journal file named *{', *'.join(_JOURNALS)}")
        Path(text).parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(Journal(text))
    except StudyError:
        raise
    except Exception as error:  # database drivers and journal readers have no common error class
        raise StudyError(
            f"{without_password(text)}: cannot be opened as a storage of studies: {one_line(error)}"
        ) from None


def open_plan_storage(storage: str | os.PathLike[str]) -> optuna.storages.BaseStorage:
    """`open_storage` for a study of plans, whose attributes hold workloads and plans as text.

    Raises:
        StudyError: the storage cannot be opened, or refuses texts of more than 64 KiB, as Optuna's tables in MySQL do.
    """
    text, backend = os.fspath(storage), ""
    with suppress(ArgumentError, ValueError):  # for a wrong URL, opening it gives a better message
        backend = make_url(text).get_backend_name()
    if backend in ("mysql", "mariadb"):
        raise StudyError(
            f"{without_password(text)}: Optuna's tables in MySQL hold at most 64 KiB of text, and studies of plans "
            "need more; use PostgreSQL, SQLite or a journal file"
        )
    return open_storage(storage)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn errors of databases and file systems within the block into a `StorageError`.

    Raises:
        StorageError: the storage did not answer.
    """
    try:
        yield
    except (OptunaError, SQLAlchemyError, OSError) as error:
        raise StorageError(
            f"the study's storage does not answer: {one_line(error)}; run the same command to resume once it does"
        ) from error


def name_metrics(study: optuna.Study, names: Sequence[str]) -> None:
    """Name the values of a study's trials, one name for each direction, as dashboards and data frames show them."""
    if study.metric_names != list(names):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(names))


def missing_file(storage: str) -> str | None:
    """The file of a storage if it does not exist, else None. Opening a missing SQLite file would create it."""
    if "://" not in storage:
        return None if Path(storage).is_file() else storage
    with suppress(ArgumentError, ValueError):  # for a wrong URL, opening it gives a better message
        url = make_url(storage)
        path = url.database or ":memory:"
        if url.get_backend_name() == "sqlite" and not path.startswith((":memory:", "file:")):
            return None if Path(path).is_file() else path
    return None


def one_line(error: Exception) -> str:
    """An error's type and message in one line of at most 300 characters, without passwords."""
    return without_passwords(" ".join(f"{type(error).__name__}: {error}".split()))[:300]

"""The command line before Hydra reads it: several cluster files of one name, several directories of options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_autosync.cluster.shipped import shipped_clusters
from lightning_autosync.errors import DocumentError

_FILES = (".yaml", ".yml", ".json")
_DIRECTORY = ("--config-dir", "-cd")
_SEARCH_PATH = "hydra.searchpath"


def prepared(arguments: Sequence[str], folder: Path) -> list[str]:
    """The arguments with links in ``folder`` for cluster files of taken names, and no more than one ``--config-dir``.

    Raises:
        DocumentError: names cannot be told apart, a directory is not there, or it cannot be told what to search.
    """
    directories, _ = _split(arguments)
    named = [_with_own_names(argument, directories, folder) for argument in arguments]
    return _with_one_directory(named)


def _with_own_names(argument: str, directories: Sequence[str], folder: Path) -> str:
    """``cluster=FILE,...`` with links to files that have the name of another one, of an option, or of each other.

    A file becomes an option of its own name, and Hydra takes the first option of a name that it finds.
    """
    key, _, value = argument.partition("=")
    choices = value.split(",") if key == "cluster" else []
    files = {choice: Path(os.path.abspath(choice)) for choice in choices if choice.endswith(_FILES)}
    if not files:
        return argument
    options = {path.stem for directory in directories for path in Path(directory, "cluster").glob("*.yaml")}
    names = _names(set(files.values()), {*shipped_clusters(), *options, *(set(choices) - set(files))})
    made = [_link(choice, files[choice], names, folder) if choice in files else choice for choice in choices]
    return f"cluster={','.join(made)}"


def _link(choice: str, path: Path, names: dict[Path, str], folder: Path) -> str:
    if names[path] == path.stem or not path.is_file():
        return choice
    link = folder / f"{names[path]}{path.suffix}"
    if not link.is_symlink():
        link.symlink_to(path)
    return str(link)


def _names(paths: set[Path], taken: set[str]) -> dict[Path, str]:
    """A name for each file: its own, behind the names of as many folders as tell it from all others.

    Raises:
        DocumentError: no folder does.
    """
    names = {path: path.stem for path in paths}
    for depth in range(2, max(len(path.parts) for path in paths) + 1):
        for path in list(_alike(names, taken)):
            names[path] = re.sub(r"[^\w.-]", "_", "_".join(path.with_suffix("").parts[-depth:]))
    clash = next(_alike(names, taken), None)
    if clash is not None:
        raise DocumentError(f"cluster: {clash}: another one goes by the name of '{names[clash]}', too; rename the file")
    return names


def _alike(names: dict[Path, str], taken: set[str]) -> Iterator[Path]:
    given = list(names.values())
    return (path for path, name in names.items() if name in taken or given.count(name) > 1)


def _with_one_directory(arguments: Sequence[str]) -> list[str]:
    """The arguments with all directories but the last in Hydra's search path; Hydra itself heeds the last alone.

    Files of clusters will be in a directory of their own, which is the last then.
    """
    directories, others = _split(arguments)
    files = any(_has_file(argument) for argument in others)
    if len(directories) + files <= 1:
        return list(arguments)
    if any(argument.lstrip("+").startswith(f"{_SEARCH_PATH}=") for argument in others):
        why = "beside a file of a cluster" if files else "several times"
        raise DocumentError(f"--config-dir: given {why} and with {_SEARCH_PATH}; put the directory into that list")
    for directory in directories:
        if not os.path.isdir(directory):
            raise DocumentError(f"--config-dir: there is no directory {directory}")
    searched, last = (directories, []) if files else (directories[:-1], ["--config-dir", directories[-1]])
    paths = ",".join(_quoted(f"file://{os.path.abspath(directory)}") for directory in searched)
    return [*with_override(others, f"{_SEARCH_PATH}=[{paths}]"), *last]


def with_override(arguments: Sequence[str], override: str) -> list[str]:
    """The arguments and one more override, beside the others: Hydra's parser takes overrides of one place only."""
    places = (place for place, word in enumerate(arguments) if word[0:1] == "~" or (word[0:1] != "-" and "=" in word))
    place = next(places, 0)
    return [*arguments[:place], override, *arguments[place:]]


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The directories of options, and all other arguments."""
    directories, others = [], []
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in _DIRECTORY:
            others.append(word)
        else:
            directories.append(value if equals else next(words, ""))
    return directories, others


def _has_file(argument: str) -> bool:
    key, _, value = argument.partition("=")
    return key == "cluster" and any(choice.endswith(_FILES) for choice in value.split(","))


def _quoted(text: str) -> str:
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"

"""Prepares the command line for Hydra: renamed keys, cluster files and several ``--config-dir`` options."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.cluster.files import shipped_clusters
from lightning_autosync.cluster.units import warn_of_bare_numbers
from lightning_autosync.documents import SUFFIXES, naming_lines, read_data, write_text
from lightning_autosync.errors import ClusterError, DocumentError

RENAMED_KEYS: Mapping[str, Mapping[str, str]] = {
    "tune": {
        "trial.least": "trial.min_steps",
        "trial.most": "trial.max_steps",
        "trial.hopeless": "trial.max_slowdown",
        "search.failures": "search.max_failures",
    },
}
"""By verb, keys that were renamed since an earlier release. Files may use old names, since the configuration classes
accept them (`Configuration.RENAMED`). But Hydra rejects old names on the command line, so they are replaced there."""
WORDS: Mapping[str, tuple[str, ...]] = {"cache": ("action", "key")}
"""By verb, the keys whose values may be given as words without their names, in this order."""
_DIRECTORY = ("--config-dir", "-cd")
SEARCH_PATH = "hydra.searchpath"
_CLUSTER_PATH = re.compile(r"[+~]*cluster(?:@[^=]*)?=.*(?:\.\.|(?<=[\s'\"(\[,=])/|\.(?:ya?ml|json)\b)")
"""An override of the cluster group whose value has a path out of the group's folder, or a file's suffix."""
_INTERPOLATION = re.compile(r"(\\*)\$\{")
"""The beginning of an OmegaConf interpolation, with preceding backslashes."""


def with_todays_keys(verb: str, arguments: Sequence[str]) -> list[str]:
    """The arguments with old keys renamed; prints a notice for each to standard error."""
    return [_with_todays_key(verb, argument) for argument in arguments]


def _with_todays_key(verb: str, argument: str) -> str:
    key, equals, value = argument.partition("=")
    name = key.lstrip("+~")
    new = RENAMED_KEYS.get(verb, {}).get(name)
    if new is None:
        return argument
    print(f"autosync {verb}: {name} is now called {new}; a later release will drop the old name", file=sys.stderr)
    return f"{key.removesuffix(name)}{new}{equals}{value}"


def with_names(verb: str, arguments: Sequence[str]) -> list[str]:
    """The arguments with words turned into ``KEY='WORD'`` for the verb's `WORDS`; words after an option are its own.

    Values of these keys are quoted, because Hydra would read a fingerprint such as ``12e4`` as a number.

    Raises:
        DocumentError: there are more words than keys.
    """
    names = WORDS.get(verb, ())
    if not names:
        return list(arguments)
    made, waiting = [], list(names)
    for before, word in zip(["", *arguments], arguments, strict=False):
        key, equals, value = word.partition("=")
        if key in names and equals:
            word = f"{key}={_quoted(value.strip(chr(39)))}"
        elif word[:1] not in "-+~" and not equals and before[:1] != "-":
            if not waiting:
                raise DocumentError(f"'{word}': too many words; allowed: {' '.join(names).upper()}, then key=value")
            word = f"{waiting.pop(0)}={_quoted(word)}"
        made.append(word)
    return made


def prepared(arguments: Sequence[str], folder: Path) -> list[str]:
    """The arguments for Hydra. Cluster files (``cluster=FILE``) become options that are written to ``folder``.

    Hydra uses only the last ``--config-dir``, so the others move to its search path.

    Raises:
        DocumentError: a file is missing or not a cluster, files have no distinct names, a directory is missing, or the
            command line also sets Hydra's search path.
    """
    directories, others = _split(arguments)
    made = [_with_options(argument, directories, folder) for argument in others]
    has_files = made != others
    searched = directories if has_files else directories[:-1]
    if searched:
        why = "with a cluster file" if has_files else "several times"
        if any(argument.lstrip("+").startswith(f"{SEARCH_PATH}=") for argument in others):
            raise DocumentError(f"--config-dir: given {why} and with {SEARCH_PATH}; add the directory to the latter")
        if missing := [directory for directory in directories if not os.path.isdir(directory)]:
            raise DocumentError(f"--config-dir: directory {missing[0]} does not exist")
        made = with_override(made, _search_path(searched))
    if has_files:
        return [*made, "--config-dir", str(folder)]
    return [*made, "--config-dir", directories[-1]] if searched else list(arguments)


def for_compose(arguments: Sequence[str]) -> list[str] | None:
    """The overrides for `hydra.compose`: the directory of ``--config-dir``, which it does not take, is searched too.

    None if it cannot compose what Hydra will compose, because options name other files.
    """
    directories, others = _split(arguments)
    if any(argument.startswith(("--config", "-c", "--cfg")) for argument in others):
        return None
    overrides = [argument for argument in others if not argument.startswith("-")]
    if not directories:
        return overrides
    made = _search_path(directories)
    given = [override for override in overrides if override.startswith(f"{SEARCH_PATH}=[") and override.endswith("]")]
    for override in given:  # `prepared` has put the user's directories there
        overrides.remove(override)
        made = f"{override[:-1]},{made.partition('[')[2]}"
    searched = any(override.lstrip("+").startswith(f"{SEARCH_PATH}=") for override in overrides)
    return None if searched or not all(map(os.path.isdir, directories)) else [made, *overrides]


def _search_path(directories: Sequence[str]) -> str:
    """The override that has Hydra search directories."""
    paths = ",".join(_quoted(f"file://{os.path.abspath(directory)}") for directory in directories)
    return f"{SEARCH_PATH}=[{paths}]"


def refuse_passwords(arguments: Sequence[str]) -> None:
    """Refuse passwords of databases in files that Hydra may read: it would copy them to files of the run.

    Raises:
        DocumentError: a file in a directory of options has an address with a password.
    """
    for directory in _directories_of_options(arguments):
        for path in sorted(Path(directory).rglob("*.yaml")):
            if place := _place_of_password(path):
                raise DocumentError(
                    f"{path}: {place}: the address contains a password, which each run would save; write "
                    "${oc.env:NAME} instead, and set the environment variable NAME to the password or the address"
                )


def _directories_of_options(arguments: Sequence[str]) -> list[str]:
    """The directories that the command line names, by an option or for Hydra's search path."""
    directories, others = _split(arguments, (*_DIRECTORY, "--config-path", "-cp"))
    for argument in others:
        key, _, value = argument.partition("=")
        if key.lstrip("+") == SEARCH_PATH:
            paths = (path.strip(" '\"").removeprefix("file://") for path in value.strip("[]").split(","))
            directories += [path for path in paths if path and "://" not in path]
    return directories


def _place_of_password(path: Path) -> str | None:
    """The key of the first address with a password in a file; None if there is none, or if Hydra cannot read it."""
    try:
        text = path.read_text(encoding="utf-8")
        if "://" not in text:
            return None
        data = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    from lightning_autosync.search.passwords import places_of_passwords

    return next(places_of_passwords(data), None)


def with_override(arguments: Sequence[str], override: str) -> list[str]:
    """The arguments with a further override beside the others: Hydra's parser needs all overrides in one place."""
    places = (place for place, word in enumerate(arguments) if word[0:1] == "~" or (word[0:1] != "-" and "=" in word))
    place = next(places, 0)
    return [*arguments[:place], override, *arguments[place:]]


def _split(arguments: Sequence[str], options: Sequence[str] = _DIRECTORY) -> tuple[list[str], list[str]]:
    """The directories that ``options`` name, and all other arguments."""
    directories, others = [], []
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in options:
            others.append(word)
        else:
            directories.append(value if equals else next(words, ""))
    return directories, others


def _quoted(text: str) -> str:
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


def _with_options(argument: str, directories: Sequence[str], folder: Path) -> str:
    """``cluster=FILE,...`` with each file replaced by an option in ``folder``; other arguments are unchanged."""
    key, _, value = argument.partition("=")
    choices = value.split(",") if key == "cluster" else []
    files = {choice: Path(os.path.abspath(choice)) for choice in choices if choice.endswith(SUFFIXES)}
    if not files:
        _refuse_paths(argument)
        return argument
    options = {path.stem for directory in directories for path in Path(directory, "cluster").glob("*.yaml")}
    names = _names(set(files.values()), {*shipped_clusters(), *options, *(set(choices) - set(files))})
    for choice in choices:
        if choice in files:
            _write_option(choice, folder / "cluster" / f"{names[files[choice]]}.yaml")
        else:
            _refuse_paths(f"cluster={choice}")
    return f"cluster={','.join(names[files[choice]] if choice in files else choice for choice in choices)}"


def _refuse_paths(argument: str) -> None:
    """Refuse a path that Hydra would load as an option: an untrusted file could name targets that Hydra then runs."""
    if _CLUSTER_PATH.match(argument):
        raise DocumentError(
            f"'{argument}': a path is not allowed here; give cluster=FILE, or several as cluster=FILE,FILE with -m; "
            f"names must end in {', '.join(SUFFIXES)}, without quotes or brackets"
        )


def _names(paths: set[Path], taken: set[str]) -> dict[Path, str]:
    """A unique name for each file: its own name, prefixed with as many names of parent folders as necessary.

    Hydra uses the first option of a name that it finds, so names must also differ from those of other options. It has
    other meanings for most characters but letters of ASCII, digits, ``_``, ``.`` and ``-``; ``_`` replaces these.
    """
    names = {path: _plain_name(path.stem) for path in paths}
    for depth in range(2, max(len(path.parts) for path in paths) + 1):
        for path in list(_alike(names, taken)):
            names[path] = _plain_name("_".join(path.with_suffix("").parts[-depth:]))
    clash = next(_alike(names, taken), None)
    if clash is not None:
        raise DocumentError(f"cluster: {clash}: another cluster also has the name '{names[clash]}'; rename the file")
    return names


def _plain_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)


def _alike(names: dict[Path, str], taken: set[str]) -> Iterator[Path]:
    given = list(names.values())
    return (path for path, name in names.items() if name in taken or given.count(name) > 1)


def _write_option(choice: str, option: Path) -> None:
    """Write only the checked values of a file, since Hydra obeys directives and targets in files of groups."""
    path = Path(choice)
    if not path.is_file():
        raise DocumentError(f"cluster: file {choice} does not exist")
    data = read_data(path, ClusterError)
    with naming_lines(path):
        ClusterSpec.from_dict(data, choice)
    warn_of_bare_numbers(data, choice)
    write_text(option, json.dumps(_without_interpolation(data)))  # JSON is valid YAML, and Hydra reads only *.yaml


def _without_interpolation(data: Any) -> Any:
    """Plain data with each ``${`` escaped, so that OmegaConf does not interpolate it."""
    if isinstance(data, dict):
        return {key: _without_interpolation(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_interpolation(value) for value in data]
    return _INTERPOLATION.sub(r"\1\1\\${", data) if isinstance(data, str) else data

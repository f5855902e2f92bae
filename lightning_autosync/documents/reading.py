"""Plain data from YAML and JSON files and texts, and line numbers of fields in errors about a file."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lightning_autosync.documents.descriptions import render_location
from lightning_autosync.documents.limits import LARGEST_NUMBER, MOST_BYTES, MOST_LEVELS, MOST_VALUES, MOST_YAML_BYTES
from lightning_autosync.documents.text import MOST_SHOWN, shortened, shown
from lightning_autosync.documents.yaml_loader import Loader
from lightning_autosync.errors import DocumentError

SUFFIXES = (".yaml", ".yml", ".json")
"""Suffixes of documents' files."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_path(value: str | os.PathLike[str]) -> bool:
    """Whether a value is the path of a document rather than a name, such as that of a builder or a shipped cluster.

    Text is a path if it ends in .yaml, .yml or .json or contains a directory.
    """
    return isinstance(value, os.PathLike) or value.endswith(SUFFIXES) or bool(os.path.dirname(value))


def read_text(path: Path, error: type[DocumentError] = DocumentError) -> str:
    """The text of a file. Raises ``error`` if it cannot be read."""
    try:
        most = MOST_BYTES if path.suffix == ".json" else MOST_YAML_BYTES
        with path.open("rb") as stream:
            content = stream.read(most + 1)  # not the size that `stat` gives, which is 0 for /dev/zero
        if len(content) > most:
            raise error(f"{path}: the file has more than {most} bytes; allowed: {MOST_YAML_BYTES} (JSON: {MOST_BYTES})")
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as cause:
        why = cause.strerror if isinstance(cause, OSError) else cause  # str(cause) would name the file again
        raise error(f"{path}: cannot be read: {why}") from None


def read_data(path: str | os.PathLike[str], error: type[DocumentError] = DocumentError, *, finite: bool = True) -> Any:
    """Plain data from a YAML or JSON file: None, bool, int, float, str, lists, and mappings with text keys.

    Duplicate keys and data beyond the limits of `lightning_autosync.documents.limits` are refused.

    Args:
        finite: whether infinities and NaN are refused. Results may have them in parts that are not used.

    Raises:
        DocumentError: the file cannot be read, or is not plain data (the class is ``error``).
    """
    path = Path(path)
    text = read_text(path, error)
    if path.suffix == ".json":
        return parse_json(text, str(path), error, finite=finite)
    return _parsed(lambda: yaml.load(text, Loader), "YAML", str(path), error, finite)


def parse_json(text: Any, source: str, error: type[DocumentError] = DocumentError, *, finite: bool = True) -> Any:
    """Plain data as in `read_data`, from a JSON text; ``source`` names the origin of the text.

    Raises:
        DocumentError: it is not plain data (the class is ``error``).
    """
    if not isinstance(text, str):
        raise error(f"{source}: not valid JSON: expected text, got {type(text).__name__}")
    return _parsed(lambda: _from_json(text), "JSON", source, error, finite)


def whole_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The place (``PATH:LINE``) and the text of each line of a file; nothing if there is no file.

    A truncated last line is left out.

    Raises:
        DocumentError: the file cannot be read, or a line is too long or not UTF-8.
    """
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), 1):
                if len(line) > MOST_BYTES:
                    raise DocumentError(f"{path}:{number}: the line is longer than {MOST_BYTES} bytes, the maximum")
                if not line.endswith(b"\n"):
                    return
                yield f"{path}:{number}", _decoded(line, f"{path}:{number}")
    except OSError as cause:
        raise DocumentError(f"{path}: cannot be read: {cause.strerror}") from None


def _decoded(line: bytes, source: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as cause:
        raise DocumentError(f"{source}: cannot be read: {cause}") from None


def _parsed(parse: Callable[[], Any], language: str, source: str, error: type[DocumentError], finite: bool) -> Any:
    try:
        data = parse()
    except RecursionError:
        raise error(f"{source}: not valid {language}: nested too deeply") from None
    except Exception as cause:  # PyYAML's conversions of scalars raise errors of all kinds
        why = " ".join(str(cause).split()).replace('in "<unicode string>", line', "at line")
        raise error(f"{source}: not valid {language}: {shortened(why, 3 * MOST_SHOWN)}") from None
    if (unfit := _unfit(data, finite)) is not None:
        raise error(f"{source}: {unfit}")
    return data


def _from_json(text: str) -> Any:
    # An estimate before parsing: one of these characters precedes each value, and few of them occur within texts.
    count = 1 + sum(text.count(mark) for mark in ",[{")
    if count > MOST_VALUES:
        raise ValueError(f"it has about {count} values; allowed: at most {MOST_VALUES}")
    return json.loads(text, object_pairs_hook=_mapping)


def _unfit(data: Any, finite: bool) -> str | None:
    """The reason why a document is refused, with the field of its first wrong value; None if all values are allowed."""
    if (why := _wrong(data, finite)) is not None:
        return why
    place: list[int | str] = []
    levels = [_parts(data)]  # iterators instead of lists, because a document may have many values
    while levels:
        key, value = next(levels[-1], (None, None))
        if key is None:
            levels.pop()
            place = place[: len(levels) - 1]
            continue
        why = _wrong(value, finite)
        if len(levels) > MOST_LEVELS:
            why = f"nested too deeply; allowed: {MOST_LEVELS} levels"
        if why is not None:
            return f"{shortened(render_location((*place, key), None))}: {why}"
        if isinstance(value, dict | list):
            place.append(key)
            levels.append(_parts(value))
    return None


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a value with their keys or indices."""
    if isinstance(value, dict):
        return iter(value.items())
    return enumerate(value) if isinstance(value, list) else iter(())


def _wrong(value: Any, finite: bool) -> str | None:
    """Why a value, apart from its items, is not allowed in a document; None if it is allowed."""
    if isinstance(value, dict):
        wrong = next((key for key in value if not isinstance(key, str) or not _is_text(key)), None)
        return None if wrong is None else f"key {shown(wrong)} is not a string; put it in quotes"
    if isinstance(value, str):
        return None if _is_text(value) else "the string contains a lone surrogate, which is not a character"
    if value is None or isinstance(value, bool | list):
        return None
    if not isinstance(value, int | float):
        return f"YAML reads it as a {type(value).__name__}; put it in quotes"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not finite" if finite else None
    return None if abs(value) <= LARGEST_NUMBER else f"the number is beyond {LARGEST_NUMBER:g}, the limit"


def _is_text(value: str) -> bool:
    return value.isascii() or not _SURROGATE.search(value)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys."""
    made = dict(pairs)
    if len(made) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key '{key}' is given twice")
    return made


_FIELD = re.compile(r"\w+(?:\.\w+|\[\d+\])*")
"""A field's name in errors: ``links[2].bandwidth``."""
_PART = re.compile(r"(\w+)|\[(\d+)\]")


@contextmanager
def naming_lines(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the line number to errors within the block that start with ``PATH: FIELD`` of this file."""
    try:
        yield
    except DocumentError as error:
        line = _line_of(Path(path), str(error).removeprefix(f"{path}: "))
        raise error if line is None else type(error)(f"{error} (line {line})") from None


def _line_of(path: Path, text: str) -> int | None:
    """The line of the field at the start of a text, or of its parent; None if neither is found."""
    field = _FIELD.match(text)
    try:
        node = yaml.compose(read_text(path), Loader)  # also reads JSON, which is a subset of YAML
    except Exception:  # a JSON file beyond the limits of YAML
        return None
    line = None
    for name, index in _PART.findall(field[0] if field else ""):
        if index and isinstance(node, yaml.SequenceNode) and int(index) < len(node.value):
            node = node.value[int(index)]
            line = node.start_mark.line + 1
        elif name and isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == name), None)
            if found is None:
                return line
            line, node = found[0].start_mark.line + 1, found[1]
        else:
            return line
    return line

"""Line numbers of fields in errors about a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from lightning_autosync.documents.reading import read_text
from lightning_autosync.documents.yaml_loader import Loader
from lightning_autosync.errors import DocumentError

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

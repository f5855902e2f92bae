"""Reading and writing the package's documents: clusters, workloads, plans.

A document is a frozen pydantic model with a format line (``autosync-plan/1``) and a YAML or JSON form. Every fault is
reported as one error that names the file and the field.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, Strict, TypeAdapter, ValidationError, model_validator

from lightning_autosync.errors import DocumentError, UnwritableError

Kind = TypeVar("Kind")
DocumentType = TypeVar("DocumentType", bound="Document")
ResultType = TypeVar("ResultType", bound="Result")
RecordType = TypeVar("RecordType", bound="Record")
ConfigurationType = TypeVar("ConfigurationType", bound="Configuration")

MOST_BYTES = 16 * 2**20
"""Largest size of a document's file, or of a line in a file with one document per line."""
MOST_YAML_BYTES = 4 * 2**20
"""Largest size of a YAML file, because its reader takes a second per megabyte."""
MOST_VALUES = 500_000
"""Largest number of values in a document, with YAML aliases expanded."""
MOST_NODES = 100_000
"""Largest number of nodes in a YAML text, because its reader takes a kilobyte per node. JSON has no such limit."""
MOST_LEVELS = 64
"""Largest depth of nested lists and mappings."""
LARGEST_NUMBER = 1e60
"""Largest absolute value of a number without a field's own limit; products of a few such numbers are still finite."""
MOST_DIGITS = 400
"""Largest number of digits of a number in YAML, because its reader takes quadratic time."""
RESULT = "result.json"
"""Name of the file that a command writes its result to."""
LEAST, LONGEST = 1e-12, 1e9
"""Smallest and largest measured time in seconds."""
LARGEST = 2**53
"""Largest integer in a document: above it, floats cannot represent every integer."""
Integer = Annotated[int, Strict(), Field(ge=-LARGEST, le=LARGEST)]
"""An integer; ``true`` and ``\"2\"`` are refused."""
Index = Annotated[Integer, Field(ge=0)]
"""An integer of at least 0."""
Count = Annotated[Integer, Field(gt=0)]
"""An integer of at least 1."""
PositiveDuration = Annotated[float, Field(ge=LEAST, le=LONGEST)]
"""Measured seconds above zero."""
Duration = Annotated[float, Field(ge=0, le=LONGEST)]
"""Measured seconds, possibly zero."""
TimeOffset = Annotated[float, Field(ge=-LONGEST, le=LONGEST)]
"""Seconds since a reference time, possibly negative."""
_SHOWN = 100
"""Number of characters of a wrong value in an error."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIELD = re.compile(r"\w+(?:\.\w+|\[\d+\])*")
"""A field's name in errors: ``links[2].bandwidth``."""
_PART = re.compile(r"(\w+)|\[(\d+)\]")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_BLOCK = 1 << 16
"""Number of bytes read at once in the search for the end of a line."""


class Record(BaseModel):
    """A frozen part of a document; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self: RecordType, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> RecordType:
        """A copy with some fields replaced, without validation, as in pydantic. Cached properties are dropped."""
        # pydantic copies the whole `__dict__`, so cached properties would keep values of the old fields.
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy


PLAIN = ConfigDict(extra="forbid", allow_inf_nan=False)
"""``__pydantic_config__`` of dataclasses that `checked` validates, which makes them as strict as records."""


class Configuration(Record):
    """Settings of a command, or a part of them: plain data from a config, validated field by field.

    ``RENAMED`` maps old names of fields to their current names. Old names still work, but warn.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _take_earlier_names(cls, data: Any) -> Any:
        return with_current_names(data, cls.RENAMED)

    @classmethod
    def parse(cls: type[ConfigurationType], data: Any) -> ConfigurationType:
        """Settings from plain data.

        Raises:
            DocumentError: the data is wrong; the message names the first wrong field.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise DocumentError(describe_validation_error(error, data)) from None


def with_current_names(data: Any, renamed: Mapping[str, str]) -> Any:
    """Plain data in which renamed keys have their current names; each old key warns (``FutureWarning``).

    A value under an old name takes precedence over one under the current name, which may be a default from ``conf/``.

    Args:
        data: a mapping; anything else is returned unchanged.
        renamed: current names by old names.
    """
    if not isinstance(data, dict) or not (found := renamed.keys() & data.keys()):
        return data
    for old in sorted(found):
        warnings.warn(
            f"{old}: this key is now named {renamed[old]}; a later release will remove the old name",
            FutureWarning,
            stacklevel=2,
        )
    kept = {name: value for name, value in data.items() if name not in found}
    return kept | {renamed[old]: data[old] for old in found}


class Document(Record):
    """A frozen record with a file form.

    Subclasses set ``FORMAT`` (name and version of the file form) and ``ERROR`` (class of the errors).
    """

    FORMAT: ClassVar[str]
    ERROR: ClassVar[type[DocumentError]] = DocumentError

    @classmethod
    def from_dict(cls: type[DocumentType], data: Any, source: str | None = None) -> DocumentType:
        """Build the document from plain data; ``source`` names its origin in errors.

        Raises:
            DocumentError: the format line or a field is wrong (the class is ``ERROR``).
        """
        where = source or cls.__name__
        if not isinstance(data, dict):
            raise cls.ERROR(f"{where}: expected a mapping of fields, got {type(data).__name__}")
        fields = dict(data)
        check_format(fields.pop("format", None), cls.FORMAT, where, cls.ERROR)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise cls.ERROR(f"{where}: {describe_validation_error(error)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The document as plain data, the format line first; fields with default values are left out."""
        return {"format": self.FORMAT, **self.model_dump(mode="json", exclude_defaults=True)}

    @classmethod
    def load(cls: type[DocumentType], path: str | os.PathLike[str]) -> DocumentType:
        """Read the document from a ``.yaml``, ``.yml`` or ``.json`` file.

        Raises:
            DocumentError: the file cannot be read, or its content is wrong (the class is ``ERROR``).
        """
        data = read_data(path, cls.ERROR)
        with naming_lines(path):
            return cls.from_dict(data, source=str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document atomically, as JSON if the file's suffix is ``.json``, else as YAML."""
        write_data(path, self.to_dict())

    @property
    def fingerprint(self) -> str:
        """A stable digest of the content: equal documents have equal fingerprints on every machine."""
        return digest(self.to_dict())

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of the file form, the format line included."""
        schema = cls.model_json_schema()
        schema["properties"] = {"format": {"const": cls.FORMAT}, **schema["properties"]}
        schema["required"] = ["format", *schema.get("required", [])]
        return schema


class Result(Document):
    """The result of a command: ``result.json`` in its directory, in which no field is left out."""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, the format line first."""
        return {"format": self.FORMAT, **self.model_dump(mode="json", by_alias=True)}

    def write(self, directory: Path) -> None:
        """Write the result into the directory of its command, atomically."""
        write_text(directory / RESULT, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def read(cls: type[ResultType], directory: Path) -> ResultType:
        """Read the result from the directory of its command.

        Raises:
            DocumentError: the file is missing, damaged or of another command.
        """
        return cls.load(directory / RESULT)


def check_format(found: Any, expected: str, where: str, error: type[DocumentError]) -> None:
    """Raise ``error`` for a missing, unknown or newer format line."""
    name, version = expected.rsplit("/", 1)
    if found == expected:
        return
    if found is None:
        raise error(f"{where}: format: missing; expected '{expected}'")
    found_name, _, found_version = str(found).rpartition("/")
    if (
        found_name == name
        and found_version.isdecimal()
        and len(found_version) < 9
        and int(found_version) > int(version)
    ):
        raise error(f"{where}: format: '{found}' was written by a newer release; this one reads '{expected}'")
    raise error(f"{where}: format: {shown(found)} cannot be read; expected '{expected}'")


def describe_validation_error(error: ValidationError, data: Any = None) -> str:
    """One line with the first problem and the number of further ones; ``data`` is the validated data."""
    problems = error.errors(include_url=False)
    # A list whose only item is wrong is also reported as too short, but the item's own error says more.
    problems = [problem for problem in problems if problem["type"] != "too_short"] or problems
    first = problems[0]
    message = shortened(first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "), 5 * _SHOWN)
    if first["type"] == "extra_forbidden":
        message = "unknown field"
    elif first["type"] == "missing":
        message = "missing"
    elif "input" in first and not isinstance(first["input"], dict | list):
        message += f" (got {shown(first['input'])})"
    location = _render_location(first["loc"], data)
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{shortened(location, 3 * _SHOWN)}: {message}{rest}" if location else f"{message}{rest}"


def _render_location(location: tuple[int | str, ...], data: Any) -> str:
    text = ""
    for part in location:
        if isinstance(data, dict):
            if part == data.get("kind"):
                continue  # pydantic also names the alternative of a discriminated union, which is not a field
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@contextmanager
def naming_lines(path: str | os.PathLike[str], source: str | None = None) -> Iterator[None]:
    """Add the line number to errors within the block that start with ``SOURCE: FIELD`` of this file."""
    try:
        yield
    except DocumentError as error:
        line = _line_of(Path(path), str(error).removeprefix(f"{source or path}: "))
        raise error if line is None else type(error)(f"{error} (line {line})") from None


def _line_of(path: Path, text: str) -> int | None:
    """The line of the field at the start of a text, or of its parent; None if neither is found."""
    field = _FIELD.match(text)
    try:
        node = yaml.compose(read_text(path), _Loader)  # also reads JSON, which is a subset of YAML
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


def read_text(path: Path, error: type[DocumentError] = DocumentError, source: str | None = None) -> str:
    """The text of a file. Raises ``error`` if it cannot be read; ``source`` names the file in the message."""
    source = source or str(path)
    try:
        most = MOST_BYTES if path.suffix == ".json" else MOST_YAML_BYTES
        with path.open("rb") as stream:
            content = stream.read(most + 1)  # not the size that `stat` gives, which is 0 for /dev/zero
        if len(content) > most:
            raise error(
                f"{source}: the file has more than {most} bytes; allowed: {MOST_YAML_BYTES} (JSON: {MOST_BYTES})"
            )
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as cause:
        why = cause.strerror if isinstance(cause, OSError) else cause  # str(cause) would name the file again
        raise error(f"{source}: cannot be read: {why}") from None


def read_data(
    path: str | os.PathLike[str],
    error: type[DocumentError] = DocumentError,
    source: str | None = None,
    *,
    finite: bool = True,
) -> Any:
    """Plain data from a YAML or JSON file: None, bool, int, float, str, lists, and mappings with text keys.

    Duplicate keys and data beyond the limits of this module are refused.

    Args:
        path: path of the file.
        error: class of the errors.
        source: name of the file in errors; the path by default.
        finite: whether infinities and NaN are refused. Results may have them in parts that are not used.

    Raises:
        DocumentError: the file cannot be read, or is not plain data (the class is ``error``).
    """
    path = Path(path)
    source = source or str(path)
    text = read_text(path, error, source)
    if path.suffix == ".json":
        return parse_json(text, source, error, finite=finite)
    return _parsed(lambda: yaml.load(text, _Loader), "YAML", source, error, finite)


def parse_json(text: Any, source: str, error: type[DocumentError] = DocumentError, *, finite: bool = True) -> Any:
    """Plain data as in `read_data`, from a JSON text; ``source`` names the origin of the text.

    Raises:
        DocumentError: it is not plain data (the class is ``error``).
    """
    if not isinstance(text, str):
        raise error(f"{source}: not valid JSON: expected text, got {type(text).__name__}")
    return _parsed(lambda: _from_json(text), "JSON", source, error, finite)


def whole_lines(path: Path, error: type[DocumentError] = DocumentError) -> Iterator[tuple[str, str]]:
    """The place (``PATH:LINE``) and the text of each line of a file; nothing if there is no file.

    A truncated last line is left out.

    Raises:
        DocumentError: the file cannot be read, or a line is too long or not UTF-8 (the class is ``error``).
    """
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), 1):
                if len(line) > MOST_BYTES:
                    raise error(f"{path}:{number}: the line is longer than {MOST_BYTES} bytes, the maximum")
                if not line.endswith(b"\n"):
                    return
                yield f"{path}:{number}", _decoded(line, f"{path}:{number}", error)
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror}") from None


def _decoded(line: bytes, source: str, error: type[DocumentError]) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as cause:
        raise error(f"{source}: cannot be read: {cause}") from None


def checked(kind: type[Kind], data: Any, source: str, error: type[DocumentError] = DocumentError) -> Kind:
    """A value of a type (a dataclass, a mapping of records, ...) from plain data; ``source`` names the data's origin.

    Raises:
        DocumentError: the data is wrong; the message names the first wrong field (the class is ``error``).
    """
    try:
        return cast("Kind", _adapter(cast("Hashable", kind)).validate_python(data))
    except ValidationError as wrong:
        raise error(f"{source}: {describe_validation_error(wrong, data)}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _parsed(parse: Callable[[], Any], language: str, source: str, error: type[DocumentError], finite: bool) -> Any:
    try:
        data = parse()
    except RecursionError:
        raise error(f"{source}: not valid {language}: nested too deeply") from None
    except Exception as cause:  # PyYAML's conversions of scalars raise errors of all kinds
        why = " ".join(str(cause).split()).replace('in "<unicode string>", line', "at line")
        raise error(f"{source}: not valid {language}: {shortened(why, 3 * _SHOWN)}") from None
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
            return f"{shortened(_render_location((*place, key), None))}: {why}"
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


def shown(value: Any) -> str:
    """A wrong value as text for errors."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python refuses to convert very long integers to text
        return f"a number of {value.bit_length()} bits"


def shortened(text: str, most: int = _SHOWN) -> str:
    """The text, truncated to ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 plan``, ``2 plans``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys (PyYAML would keep the last value) and documents that would need much memory."""

    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise ValueError(f"it has more than {MOST_NODES} values, the limit of YAML files; use JSON")
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if node.tag in _NUMBERS and len(node.value) > MOST_DIGITS:
            raise ValueError(
                f"a number has {len(node.value)} digits; allowed: at most {MOST_DIGITS} (line "
                f"{node.start_mark.line + 1})"
            )
        return node

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and (count := _expanded(node, {})) > MOST_VALUES:
            raise ValueError(f"its aliases expand to {count} values; allowed: at most {MOST_VALUES}")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked before merge keys (<<) are resolved, because a mapping may override merged keys.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise ValueError(f"key '{key.value}' is given twice (line {key.start_mark.line + 1})")
                seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Resolve merge keys (<<): own keys override merged ones, and earlier merged mappings override later ones.

        PyYAML 6.0.4 lets a merged key of one character win over the key that overrides it.
        """
        own: list[tuple[yaml.Node, yaml.Node]] = []
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:value":
                key.tag = "tag:yaml.org,2002:str"  # the key '='
            if key.tag != "tag:yaml.org,2002:merge":
                own.append((key, value))
                continue
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(part, yaml.MappingNode):
                    raise ValueError(f"<< merges mappings, not a {part.id} (line {part.start_mark.line + 1})")
                self.flatten_mapping(part)
                merged[:0] = part.value
        node.value = merged + own  # the last pair with a key counts


def _expanded(node: yaml.Node, known: dict[int, int | None]) -> int:
    """The number of values in a node, with aliases expanded.

    Args:
        node: root of the counted nodes.
        known: results by ``id`` of nodes; None while a node is being counted, which detects cycles.
    """
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise ValueError(f"an alias refers to a node that contains it (line {node.start_mark.line + 1})")
        return count
    known[id(node)] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    known[id(node)] = count = 1 + sum(_expanded(part, known) for part in parts)
    return count


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys."""
    made = dict(pairs)
    if len(made) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key '{key}' is given twice")
    return made


def write_data(path: str | os.PathLike[str], data: Any) -> None:
    """Write plain data as JSON if the file's suffix is ``.json``, else as YAML."""
    write_text(path, json.dumps(data, indent=2) + "\n" if Path(path).suffix == ".json" else as_yaml(data))


def as_yaml(data: Any) -> str:
    """Plain data as YAML."""
    text: str = yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None)
    return text


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically, by renaming a temporary file: readers see the whole new file or the old one."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Like `write_text`, for binary content."""
    path = Path(path)
    # Without the module tempfile, whose files only the owner may read, whatever the umask.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("xb") as file:
                file.write(content)
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert system errors within the block to errors that name the file.

    Raises:
        UnwritableError: instead of an ``OSError``.
    """
    try:
        yield
    except UnwritableError:
        raise
    except OSError as cause:
        raise UnwritableError(f"{os.fspath(path)}: cannot be written: {cause.strerror or cause}") from None


def identity(directory: Path) -> str:
    """A unique and persistent name of this directory, which differs from those of equal paths on other machines.

    Raises:
        DocumentError: the file with the name is damaged; a new name would part the directory from its earlier results.
        UnwritableError: the name cannot be written.
    """
    file = directory / ".identity"
    if not file.exists():
        write_text(file, f"{directory.absolute()} {secrets.token_hex(4)}\n")
    name = read_text(file).strip()
    if not name:
        raise DocumentError(
            f"{file}: the file is empty, but must contain the name of this directory: restore it, or use another "
            "directory"
        )
    return name


@contextmanager
def held(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold a lock file within the block; the operating system releases the lock if this process dies.

    Raises ``refusal`` if another process holds the lock.

    Raises:
        UnwritableError: the file cannot be created.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # the error's class and number differ between systems
            raise refusal from None
        yield


def append_lines(path: str | os.PathLike[str], lines: str) -> None:
    """Append whole lines to a file, which is created if necessary.

    A truncated last line, which a killed process may have left, is dropped first. Processes that share a file need a
    lock of their own.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.truncate(_end_of_lines(file))
            file.write(lines.encode())


def _end_of_lines(file: IO[bytes]) -> int:
    """The position behind the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def canonical(data: Any) -> str:
    """The canonical JSON text of plain data, with sorted keys and without blanks."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def digest(data: Any) -> str:
    """A digest of plain data with twelve hexadecimal digits."""
    return digest_text(canonical(data))


def digest_text(text: str) -> str:
    """The `digest` of the data with this canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]

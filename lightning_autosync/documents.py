"""Reading and writing the package's own documents: clusters, workloads, plans.

A document is a frozen pydantic model with a format line (``autosync-plan/1``), one YAML or JSON
form, and one clear error for whatever is wrong with it, naming file and field.
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
RecordType = TypeVar("RecordType", bound="Record")
ConfigurationType = TypeVar("ConfigurationType", bound="Configuration")

MOST_BYTES = 16 * 2**20
"""Limit of a document's file, or of a line of a file that has a document a line."""
MOST_YAML_BYTES = 4 * 2**20
"""Limit of a YAML file; its reader takes a second a megabyte."""
MOST_VALUES = 500_000
"""Limit of values in a document, with the aliases of YAML written out."""
MOST_NODES = 100_000
"""Limit of nodes of a YAML document as it is written: reading takes a kilobyte for each. JSON has no such limit."""
MOST_LEVELS = 64
"""Limit of lists and mappings within each other."""
LARGEST_NUMBER = 1e60
"""Limit of numbers where no field has a lower one: products of a few such numbers are still finite."""
MOST_DIGITS = 400
"""Limit of digits of a number in YAML, whose reader takes quadratic time."""
LEAST, LONGEST = 1e-12, 1e9
"""Limits in seconds of anything that was measured."""
LARGEST = 2**53
"""The largest whole number in a document: beyond, floats would not tell neighbours apart."""
Integer = Annotated[int, Strict(), Field(ge=-LARGEST, le=LARGEST)]
"""A whole number; neither ``true`` nor ``\"2\"`` is one."""
Index = Annotated[Integer, Field(ge=0)]
"""A whole number from 0 on."""
Count = Annotated[Integer, Field(gt=0)]
"""A whole number from 1 on."""
Taken = Annotated[float, Field(ge=LEAST, le=LONGEST)]
"""Measured seconds, which are not zero."""
Spent = Annotated[float, Field(ge=0, le=LONGEST)]
"""Measured seconds, which may be zero."""
Moment = Annotated[float, Field(ge=-LONGEST, le=LONGEST)]
"""Seconds since some beginning, which may be negative."""
_SHOWN = 100
"""Characters of a wrong value that an error shows."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIELD = re.compile(r"\w+(?:\.\w+|\[\d+\])*")
"""How an error names a field: ``links[2].bandwidth``."""
_PART = re.compile(r"(\w+)|\[(\d+)\]")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_BLOCK = 1 << 16
"""Bytes that are searched at once for the end of a line."""


class Record(BaseModel):
    """A frozen part of a document; fields that it does not know are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self: RecordType, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> RecordType:
        """A copy with some fields replaced, unchecked, as pydantic does it. Cached properties are dropped."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy


PLAIN = ConfigDict(extra="forbid", allow_inf_nan=False)
"""The ``__pydantic_config__`` of dataclasses that `checked` makes: as strict as records."""


class Configuration(Record):
    """Settings of a command, or a part of them: plain data from a config, checked field by field.

    ``RENAMED`` maps earlier names of fields to the names of today. Data with an earlier name still works, and warns.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _take_earlier_names(cls, data: Any) -> Any:
        return with_todays_names(data, cls.RENAMED)

    @classmethod
    def parse(cls: type[ConfigurationType], data: Any) -> ConfigurationType:
        """Settings from plain data.

        Raises:
            DocumentError: the first thing wrong, by field.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise DocumentError(describe_validation_error(error, data)) from None


def with_todays_names(data: Any, renamed: Mapping[str, str]) -> Any:
    """Plain data in which keys that were renamed have the names of today; each one warns (``FutureWarning``).

    A value under an earlier name goes before one under the name of today: the latter may be a default from ``conf/``.

    Args:
        data: a mapping; anything else is returned as it is.
        renamed: earlier names and those of today.
    """
    if not isinstance(data, dict) or not (found := renamed.keys() & data.keys()):
        return data
    for old in sorted(found):
        warnings.warn(
            f"{old}: this key is called {renamed[old]} now; a later release drops the old name",
            FutureWarning,
            stacklevel=2,
        )
    kept = {name: value for name, value in data.items() if name not in found}
    return kept | {renamed[old]: data[old] for old in found}


class Document(Record):
    """A frozen record with a file form.

    Subclasses set ``FORMAT`` (name and version of the file form) and ``ERROR`` (what to raise).
    """

    FORMAT: ClassVar[str]
    ERROR: ClassVar[type[DocumentError]] = DocumentError

    @classmethod
    def from_dict(cls: type[DocumentType], data: Any, source: str | None = None) -> DocumentType:
        """Build the document from plain data; ``source`` names its origin in errors.

        Raises:
            DocumentError: (the subclass's own) if the format line or any field is wrong.
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
        """The document as plain data, its format line first; fields at their default are left out."""
        return {"format": self.FORMAT, **self.model_dump(mode="json", exclude_defaults=True)}

    @classmethod
    def load(cls: type[DocumentType], path: str | os.PathLike[str]) -> DocumentType:
        """Read the document from a ``.yaml``, ``.yml`` or ``.json`` file."""
        data = read_data(path, cls.ERROR)
        with naming_lines(path):
            return cls.from_dict(data, source=str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document as YAML, or as JSON if the name ends so; whole or not at all."""
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


def check_format(found: Any, expected: str, where: str, error: type[DocumentError]) -> None:
    """Refuse a missing, foreign or future format line."""
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
    raise error(f"{where}: format: {shown(found)} is not readable here; expected '{expected}'")


def describe_validation_error(error: ValidationError, data: Any = None) -> str:
    """One line for the first thing wrong, and the count of the rest; ``data`` is what was validated."""
    problems = error.errors(include_url=False)
    # A list whose only item is wrong is also reported as too short; the item's own error says more.
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
                continue  # pydantic also names the alternative that a kind chose, which is no field
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@contextmanager
def naming_lines(path: str | os.PathLike[str], source: str | None = None) -> Iterator[None]:
    """Errors within the block that begin with ``SOURCE: FIELD`` of this file also name the line."""
    try:
        yield
    except DocumentError as error:
        line = _line_of(Path(path), str(error).removeprefix(f"{source or path}: "))
        raise error if line is None else type(error)(f"{error} (line {line})") from None


def _line_of(path: Path, text: str) -> int | None:
    """The line of the field that a text begins with, or of its parent; None if neither is found."""
    field = _FIELD.match(text)
    try:
        node = yaml.compose(read_text(path), _Loader)  # of which JSON is a part
    except Exception:  # it could be read as JSON alone
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
    """The text of a file. ``error`` is raised if it cannot be read; ``source`` names the file there."""
    source = source or str(path)
    try:
        size, most = path.stat().st_size, MOST_BYTES if path.suffix == ".json" else MOST_YAML_BYTES
        if size > most:
            raise error(f"{source}: {size} bytes; allowed: {most} at most ({MOST_BYTES} of JSON)")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        why = cause.strerror if isinstance(cause, OSError) else cause  # the error itself names the file again
        raise error(f"{source}: cannot be read: {why}") from None


def read_data(
    path: str | os.PathLike[str],
    error: type[DocumentError] = DocumentError,
    source: str | None = None,
    *,
    finite: bool = True,
) -> Any:
    """Plain data from a YAML or JSON file: None, bool, int, float, str, lists, and mappings with text for keys.

    No key occurs twice, and the limits of this module hold.

    Args:
        path: of the file.
        error: what is raised.
        source: names it in errors, in place of the path.
        finite: whether infinities and NaN are refused. Results of which only a part is read may have them.

    Raises:
        DocumentError: (``error``) the file cannot be read, or is not plain data.
    """
    path = Path(path)
    source = source or str(path)
    text = read_text(path, error, source)
    if path.suffix == ".json":
        return parse_json(text, source, error, finite=finite)
    return _parsed(lambda: yaml.load(text, _Loader), "YAML", source, error, finite)


def parse_json(text: Any, source: str, error: type[DocumentError] = DocumentError, *, finite: bool = True) -> Any:
    """Plain data, as `read_data` gives it, from JSON text that is not a file; ``source`` says where the text is.

    Raises:
        DocumentError: (``error``) it is not plain data.
    """
    if not isinstance(text, str):
        raise error(f"{source}: not valid JSON: expected text, got {type(text).__name__}")
    return _parsed(lambda: _from_json(text), "JSON", source, error, finite)


def whole_lines(path: Path, error: type[DocumentError] = DocumentError) -> Iterator[tuple[str, str]]:
    """The place and the text of each line of a file; none if there is no file.

    A last line that was cut off is left out.

    Raises:
        DocumentError: (``error``) the file cannot be read, or a line is too long or no text.
    """
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), 1):
                if len(line) > MOST_BYTES:
                    raise error(f"{path}:{number}: a line of more than {MOST_BYTES} bytes; allowed: so many at most")
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
    """A value of a type (a dataclass, a mapping of records, ...) from plain data; ``source`` says where that is.

    Raises:
        DocumentError: (``error``) the first thing wrong, by field.
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
    except Exception as cause:  # PyYAML does not catch errors of its conversions
        why = " ".join(str(cause).split()).replace('in "<unicode string>", line', "at line")
        raise error(f"{source}: not valid {language}: {shortened(why, 3 * _SHOWN)}") from None
    if (unfit := _unfit(data, finite)) is not None:
        raise error(f"{source}: {unfit}")
    return data


def _from_json(text: str) -> Any:
    # There is one such character before each value. Few of them are within texts, so the count is close enough.
    count = 1 + sum(text.count(mark) for mark in ",[{")
    if count > MOST_VALUES:
        raise ValueError(f"it has some {count} values; allowed: {MOST_VALUES} at most")
    return json.loads(text, object_pairs_hook=_mapping)


def _unfit(data: Any, finite: bool) -> str | None:
    """The first value that no document may have, by field; None if there is none."""
    if (why := _wrong(data, finite)) is not None:
        return why
    place: list[int | str] = []
    levels = [_parts(data)]  # iterators, because a document may have many values
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
    """The items of a value, by key or index."""
    if isinstance(value, dict):
        return iter(value.items())
    return enumerate(value) if isinstance(value, list) else iter(())


def _wrong(value: Any, finite: bool) -> str | None:
    """Why a value, apart from its items, may not be in a document; None if it may."""
    if isinstance(value, dict):
        wrong = next((key for key in value if not isinstance(key, str) or not _is_text(key)), None)
        return None if wrong is None else f"a key is no text: {shown(wrong)}; put it in quotes"
    if isinstance(value, str):
        return None if _is_text(value) else "half a character (a lone surrogate), which is no text"
    if value is None or isinstance(value, bool | list):
        return None
    if not isinstance(value, int | float):
        return f"it reads as a {type(value).__name__}; put it in quotes"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not finite" if finite else None
    return None if abs(value) <= LARGEST_NUMBER else f"a number beyond {LARGEST_NUMBER:g}"


def _is_text(value: str) -> bool:
    return value.isascii() or not _SURROGATE.search(value)


def shown(value: Any) -> str:
    """A wrong value, as errors show it."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python refuses to write very long numbers
        return f"a number of {value.bit_length()} bits"


def shortened(text: str, most: int = _SHOWN) -> str:
    """The beginning of a long text."""
    return text if len(text) <= most else f"{text[:most]}..."


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which PyYAML would keep the last, and documents that become large in memory."""

    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise ValueError(f"it has more than {MOST_NODES} values; JSON may have more")
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if node.tag in _NUMBERS and len(node.value) > MOST_DIGITS:
            raise ValueError(f"a number of {len(node.value)} digits (line {node.start_mark.line + 1})")
        return node

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and (count := _expanded(node, {})) > MOST_VALUES:
            raise ValueError(f"its aliases stand for {count} values; allowed: {MOST_VALUES} at most")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked before merge keys (<<) are resolved, because merged keys may be overridden.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise ValueError(f"key '{key.value}' is given twice (line {key.start_mark.line + 1})")
                seen.add((key.tag, key.value))
        return node


def _expanded(node: yaml.Node, known: dict[int, int | None]) -> int:
    """The number of values of a node, each alias written out.

    Args:
        node: with all below it.
        known: results by identity of nodes; None while a node is being counted.
    """
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise ValueError(f"an alias stands for a part of itself (line {node.start_mark.line + 1})")
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
    """Write plain data as YAML, or as JSON if the name ends so."""
    write_text(path, json.dumps(data, indent=2) + "\n" if Path(path).suffix == ".json" else as_yaml(data))


def as_yaml(data: Any) -> str:
    """Plain data as YAML."""
    text: str = yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None)
    return text


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a temporary file and rename it into place, so that readers see the whole file or the old one."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """As `write_text`, for a file that is not text."""
    path = Path(path)
    # Not by tempfile: only the owner may read its files, whatever the umask.
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
    """System errors within the block become errors about the file.

    Raises:
        UnwritableError: in place of an ``OSError``.
    """
    try:
        yield
    except UnwritableError:
        raise
    except OSError as cause:
        raise UnwritableError(f"{os.fspath(path)}: cannot be written: {cause.strerror or cause}") from None


def identity(directory: Path) -> str:
    """A unique name of this directory, which it keeps. A directory at the same path of another machine has another."""
    file = directory / ".identity"
    if not file.exists():
        write_text(file, f"{directory.absolute()} {secrets.token_hex(4)}\n")
    return file.read_text(encoding="utf-8").strip()


@contextmanager
def held(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold a lock file within the block; the lock ends with this process, however that ends.

    ``refusal`` is raised if another process holds the file.

    Raises:
        UnwritableError: the file cannot be made.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # systems differ in the kind
            raise refusal from None
        yield


def append_lines(path: str | os.PathLike[str], lines: str) -> None:
    """Append whole lines to a file, which is made if there is none.

    They follow the last whole line: a part of a line that a killed process left is dropped. Processes that share a file
    need a lock of their own.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.truncate(_end_of_lines(file))
            file.write(lines.encode())


def _end_of_lines(file: IO[bytes]) -> int:
    """The position after the last whole line."""
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
    """The canonical JSON text of plain data: keys sorted, no blanks."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def digest(data: Any) -> str:
    """Twelve hexadecimal digits that name plain data."""
    return digest_text(canonical(data))


def digest_text(text: str) -> str:
    """`digest` of the data with this canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]

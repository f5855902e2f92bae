"""Records, configurations, documents and results: pydantic models that report each fault as one error."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    Strict,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from lightning_autosync.documents.descriptions import describe_validation_error
from lightning_autosync.documents.files import write_data, write_text
from lightning_autosync.documents.reading import naming_lines, read_data
from lightning_autosync.documents.text import digest, shown
from lightning_autosync.errors import DocumentError

Kind = TypeVar("Kind")
DocumentType = TypeVar("DocumentType", bound="Document")
ResultType = TypeVar("ResultType", bound="Result")
RecordType = TypeVar("RecordType", bound="Record")
ConfigurationType = TypeVar("ConfigurationType", bound="Configuration")
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
Metric = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
]
"""A number that a training that diverged does not have: NaN here, and null in a file, because JSON has no NaN."""


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
            raise DocumentError(describe_validation_error(error, data, cls)) from None


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

    Subclasses set ``FORMAT`` (name and version of the file form), ``ERROR`` (class of the errors), ``FINITE`` (whether
    files must have no infinities and NaN even in parts that are plain data), and ``SHORT_FORMS`` (fields that files may
    have in place of others).
    """

    FORMAT: ClassVar[str]
    FINITE: ClassVar[bool] = True
    SHORT_FORMS: ClassVar[tuple[str, ...]] = ()
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
            raise cls.ERROR(f"{where}: {describe_validation_error(error, kind=cls)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The document as plain data, the format line first; fields with default values are left out."""
        return {"format": self.FORMAT, **self.model_dump(mode="json", exclude_defaults=True)}

    @classmethod
    def describes(cls, data: Any) -> bool:
        """Whether plain data has the format line of this kind of document, of any version."""
        kind = cls.FORMAT.rpartition("/")[0]
        return isinstance(data, dict) and str(data.get("format")).startswith(f"{kind}/")

    @classmethod
    def is_in(cls, path: str | os.PathLike[str]) -> bool:
        """Whether a file contains this kind of document, of any version.

        Raises:
            DocumentError: the file cannot be read, or is not plain data (the class is ``ERROR``).
        """
        return cls.describes(read_data(path, cls.ERROR, finite=cls.FINITE))

    @classmethod
    def load(cls: type[DocumentType], path: str | os.PathLike[str]) -> DocumentType:
        """Read the document from a ``.yaml``, ``.yml`` or ``.json`` file.

        Raises:
            DocumentError: the file cannot be read, or its content is wrong (the class is ``ERROR``).
        """
        data = read_data(path, cls.ERROR, finite=cls.FINITE)
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

    FINITE: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if "FORMAT" in cls.__dict__:
            _RESULTS[cls.FORMAT] = cls

    def figures(self) -> dict[str, str]:
        """The most important figures of the result by name, for its row in the table of a sweep."""
        return {}

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


_RESULTS: dict[str, type[Result]] = {}
"""Results of the commands whose modules are loaded, by their format lines."""


def result_figures(directory: Path) -> dict[str, str]:
    """The figures of the result in a directory; empty if there is none, or one of another application.

    Raises:
        DocumentError: the result is damaged.
    """
    path = directory / RESULT
    if not path.is_file():
        return {}
    data = read_data(path, finite=False)
    kind = _RESULTS.get(str(data.get("format"))) if isinstance(data, dict) else None
    return {} if kind is None else kind.from_dict(data, str(path)).figures()


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


def checked(kind: type[Kind], data: Any, source: str, error: type[DocumentError] = DocumentError) -> Kind:
    """A value of a type (a dataclass, a mapping of records, ...) from plain data; ``source`` names the data's origin.

    Raises:
        DocumentError: the data is wrong; the message names the first wrong field (the class is ``error``).
    """
    try:
        return cast("Kind", _adapter(cast("Hashable", kind)).validate_python(data))
    except ValidationError as wrong:
        raise error(f"{source}: {describe_validation_error(wrong, data, kind)}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

"""Reading and writing the package's documents: clusters, workloads, plans.

A document is a frozen pydantic model with a format line (``autosync-plan/1``) and a YAML or JSON form. Every fault is
reported as one error that names the file and the field.
"""

from __future__ import annotations

from lightning_autosync.documents.descriptions import describe_validation_error
from lightning_autosync.documents.field_lines import naming_lines
from lightning_autosync.documents.fields import (
    LARGEST,
    LEAST,
    LONGEST,
    Count,
    Duration,
    Index,
    Integer,
    Metric,
    PositiveDuration,
    TimeOffset,
)
from lightning_autosync.documents.files import (
    append_lines,
    as_yaml,
    held,
    identity,
    write_bytes,
    write_data,
    write_text,
    writing,
)
from lightning_autosync.documents.labels import short_labels
from lightning_autosync.documents.limits import MOST_BYTES, MOST_NODES
from lightning_autosync.documents.reading import SUFFIXES, is_path, parse_json, read_data, read_text, whole_lines
from lightning_autosync.documents.records import (
    PLAIN,
    RESULT,
    Configuration,
    Document,
    Record,
    Result,
    check_format,
    checked,
    result_figures,
)
from lightning_autosync.documents.text import (
    bytes_text,
    canonical,
    counted,
    did_you_mean,
    digest,
    digest_text,
    seconds_text,
    shortened,
    shown,
)

__all__ = [
    "LARGEST",
    "LEAST",
    "LONGEST",
    "MOST_BYTES",
    "MOST_NODES",
    "PLAIN",
    "RESULT",
    "SUFFIXES",
    "Configuration",
    "Count",
    "Document",
    "Duration",
    "Index",
    "Integer",
    "Metric",
    "PositiveDuration",
    "Record",
    "Result",
    "TimeOffset",
    "append_lines",
    "as_yaml",
    "bytes_text",
    "canonical",
    "check_format",
    "checked",
    "counted",
    "describe_validation_error",
    "did_you_mean",
    "digest",
    "digest_text",
    "held",
    "identity",
    "is_path",
    "naming_lines",
    "parse_json",
    "read_data",
    "read_text",
    "result_figures",
    "seconds_text",
    "short_labels",
    "shortened",
    "shown",
    "whole_lines",
    "write_bytes",
    "write_data",
    "write_text",
    "writing",
]

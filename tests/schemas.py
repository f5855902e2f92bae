"""Checks of documents against the JSON schemas of their kinds."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema

from lightning_autosync.documents import Document


def check_schema(kind: type[Document], data: Any) -> None:
    """As ``jsonschema.validate``, but the schema is made and checked once, which takes longer than most documents.

    Raises:
        jsonschema.ValidationError: the schema of the kind refuses the data.
    """
    if (error := jsonschema.exceptions.best_match(_validator(kind).iter_errors(data))) is not None:
        raise error


@cache
def _validator(kind: type[Document]) -> Any:
    schema = kind.json_schema()
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)

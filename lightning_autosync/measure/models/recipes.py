"""Every kind of model that a bench knows."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter

from lightning_autosync.measure.models.imported import Imported
from lightning_autosync.measure.models.models import Digits, Flat, Layers, Model, Paced, Recommender


def _kind_of_target(value: Any) -> Any:
    """What says what to import need not say its kind, so that configs made for Hydra's ``instantiate`` serve here."""
    return {"kind": "imported", **value} if isinstance(value, dict) and "_target_" in value else value


AnyModel = Annotated[
    Layers | Recommender | Flat | Digits | Paced | Imported,
    Field(discriminator="kind"),
    BeforeValidator(_kind_of_target),
]
_MODEL: TypeAdapter[Model] = TypeAdapter(AnyModel)


def model_of(data: dict[str, Any]) -> Model:
    """The model that plain data, as of ``model_dump``, describes."""
    return _MODEL.validate_python(data)

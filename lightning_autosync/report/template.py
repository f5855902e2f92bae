"""Pages from templates: text is escaped, pictures are put in as they are."""

from __future__ import annotations

from typing import Any


def render(name: str, **values: Any) -> str:
    """The page that the template ``name`` makes of ``values``; one that it misses is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("lightning_autosync.report"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)

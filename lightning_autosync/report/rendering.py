"""Rendering of reports: pages from templates, and texts of quantities."""

from __future__ import annotations

from typing import Any


def render(name: str, **values: Any) -> str:
    """Render the template ``name`` with ``values``. Text is escaped; a missing value is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("lightning_autosync.report"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)


def milliseconds(seconds: float) -> str:
    """``12.3 ms``, with two decimals below 10 ms and one below 100 ms."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def rate_text(rate: float) -> str:
    """A rate in bytes/s as text, for example ``400 Mbit/s``."""
    bits = 8 * rate
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"

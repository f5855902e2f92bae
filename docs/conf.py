"""Configuration of Sphinx for the site. ``make docs`` builds it into ``build/docs``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from reference import write_pages  # noqa: E402 - modules beside this file
from site_links import GENERATED, ROOT, relinked  # noqa: E402

from lightning_autosync import __version__  # noqa: E402

project = "lightning-autosync"
author = "the lightning-autosync developers"
project_copyright = f"2026, {author}"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_static"]
default_role = "py:obj"
highlight_language = "none"
maximum_signature_line_length = 88
suppress_warnings = ["ref.python"]  # ``bytes`` in a signature is Python's, though classes have fields of that name

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # docstrings of Lightning, torch and pydantic are not this package's
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

linkcheck_timeout = 20
linkcheck_retries = 2


def setup(app: Any) -> None:
    """Write the generated pages, and lead links to files of the repository to the pages that show them."""
    app.connect("builder-inited", lambda _: write_pages(HERE / GENERATED))
    app.connect("source-read", _relink)


def _relink(app: Any, name: str, source: list[str]) -> None:
    if not name.startswith(f"{GENERATED}/"):
        source[0] = relinked(source[0], ROOT / "docs", f"{name}.md")

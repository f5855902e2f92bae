"""Links of Markdown files in the repository, turned into links between pages of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = "generated"
"""Folder of the pages in ``docs/``."""
BESIDE = {
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "examples/datasets/emulated/README.md": "dataset",
}
"""Files of the repository that are pages of the site, with the names of their pages."""

_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def relinked(text: str, folder: Path, page: str) -> str:
    """Markdown of a file of the repository as a page of the site, with links to the site's pages.

    Args:
        text: the Markdown; its links are relative to ``folder``.
        folder: folder of the file.
        page: path of the page in ``docs/``.
    """
    parts = _FENCE.split(text)
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda link: _relinked(link, folder, page), part)
        for part in parts
    )


def _relinked(link: re.Match[str], folder: Path, page: str) -> str:
    """A link in Markdown; only its text if it leads to a folder that is no page."""
    words, target = link.groups()
    path, _, anchor = target.partition("#")
    if not path or ":" in path:
        return link[0]
    there = (folder / path).resolve().relative_to(ROOT)
    found = _page_of(there)
    if found is None and (ROOT / there).is_dir():
        return words
    found, _, own = (found or f"../{there}").partition("#")
    anchor = anchor or own
    return f"[{words}]({os.path.relpath(found, Path(page).parent)}{'#' if anchor else ''}{anchor})"


def _page_of(path: Path) -> str | None:
    """The page of the site that shows a file or folder of the repository; None if there is none."""
    match path.parts:
        case ("README.md",) | ("docs",):
            return "index.md"
        case ("docs", *rest):
            return "/".join(rest)
        case _ if path.as_posix() in BESIDE:
            return f"{GENERATED}/{BESIDE[path.as_posix()]}.md"
        case ("conf", group):
            return f"{GENERATED}/options/{group}.md"
        case ("conf", group, name):
            return f"{GENERATED}/options/{group}.md#{slug(f'{group}={Path(name).stem}')}"
        case ("examples",):
            return f"{GENERATED}/examples.md"
        case ("examples", name) if name.endswith(".py"):
            return f"{GENERATED}/examples.md#{slug(name)}"
    return None


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

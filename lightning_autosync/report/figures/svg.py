"""A figure as an SVG element inside a page: its colours are the page's, its text is text, its marks have tooltips."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from markupsafe import Markup

from lightning_autosync.report.figures.style import VARIABLES, report_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}href"
PIXELS = 104
"""Of a page for each inch of a figure."""
_MARKS = ("use", "path")
_FONT = re.compile(r"(font(?:-family)?: *(?:[^;']*?px)?)[^;]*'[^;]*")


@dataclass(frozen=True)
class Picture:
    """A figure for a page.

    Attributes:
        name: unique on the page; ids inside begin with it.
        figure: of matplotlib.
        description: what it shows, for those who do not see it.
        tooltips: by the ``gid`` of a collection of marks, a line for each of its marks.
    """

    name: str
    figure: Figure
    description: str
    tooltips: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def svg(self) -> Markup:
        """The figure as one ``<svg>`` element, for pages that define the colours of `style.VARIABLES`."""
        root = _drawn(self.figure, self.name)
        for mark_group, lines in self.tooltips.items():
            _add_tooltips(root, mark_group, lines)
        _tidy(root, self.name)
        _describe(root, self.name, self.description, self.figure.get_figwidth())
        ElementTree.register_namespace("", _SVG[1:-1])
        return Markup(ElementTree.tostring(root, encoding="unicode"))


def _drawn(figure: Figure, name: str) -> ElementTree.Element:
    from matplotlib import rc_context

    text = StringIO()
    with report_style(), rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return ElementTree.fromstring(text.getvalue())


def _add_tooltips(root: ElementTree.Element, mark_group: str, lines: Sequence[str]) -> None:
    """SVG's own tooltips: a ``<title>`` inside each mark.

    Raises:
        ValueError: there are not as many marks as lines.
    """
    group = next((element for element in root.iter(f"{_SVG}g") if element.get("id") == mark_group), None)
    # A collection's shared shape is a path inside <defs>, and no mark.
    shared = {id(child) for element in root.iter(f"{_SVG}defs") for child in element.iter()}
    found = [] if group is None else list(group.iter())
    marks = [one for one in found if one.tag in [_SVG + tag for tag in _MARKS] and id(one) not in shared]
    if len(marks) != len(lines):
        raise ValueError(f"tooltips: {len(lines)} lines for {len(marks)} marks of '{mark_group}'")
    for mark, line in zip(marks, lines, strict=True):
        ElementTree.SubElement(mark, f"{_SVG}title").text = line


def _tidy(root: ElementTree.Element, name: str) -> None:
    """Take out what a page does not need, give colours and fonts to the page, and make ids unique on it."""
    for metadata in root.findall(f"{_SVG}metadata"):
        root.remove(metadata)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    for element in root.iter():
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.attrib['id']}")
        if element.get(_XLINK, "").startswith("#"):
            element.set("href", f"#{name}-{element.attrib.pop(_XLINK)[1:]}")
        for attribute, value in element.attrib.items():
            if attribute in ("style", "fill", "stroke", "clip-path"):
                element.set(attribute, _of_page(value, name))


def _of_page(value: str, name: str) -> str:
    for colour, variable in VARIABLES.items():
        value = value.replace(colour, f"var({variable})")
    return _FONT.sub(r"\1 var(--sans)", value).replace("url(#", f"url(#{name}-")


def _describe(root: ElementTree.Element, name: str, description: str, inches: float) -> None:
    element = ElementTree.Element(f"{_SVG}desc", {"id": f"{name}-description"})
    element.text = description
    root.insert(0, element)
    # As wide as its page allows, but with text no larger than in other figures.
    root.set("style", f"max-width: {PIXELS * inches:.0f}px")
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-description")

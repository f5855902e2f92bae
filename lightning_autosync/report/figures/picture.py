"""Pictures of reports: their look, and their export as SVG elements with real text and with tooltips for marks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from xml.etree import ElementTree

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Arguments = ParamSpec("Arguments")
Drawn = TypeVar("Drawn")

INK, MUTED, GRID, PAPER = "#1b1f26", "#667080", "#d9dde3", "#fefefe"
BLUE, ORANGE, GREEN, PURPLE = "#2463a6", "#c05a12", "#2f7d4f", "#7c4ea3"
RED, TEAL, OCHRE, GREY = "#b4344b", "#0e7a85", "#8b6b06", "#7d8590"
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAPER: "--paper",
    BLUE: "--blue",
    ORANGE: "--orange",
    GREEN: "--green",
    PURPLE: "--purple",
    RED: "--red",
    TEAL: "--teal",
    OCHRE: "--ochre",
    GREY: "--grey",
}
"""CSS custom property of the page for each colour of a figure, so that pages can be light or dark."""
SERIES = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, OCHRE, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "p", "h")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.5), (6, 2, 1, 2), (3, 1), (8, 3), (2, 3), (9, 2, 2, 2))
WIDTH = 9.6
"""Inches of a figure as wide as the page's text; a page shows about 100 pixels per inch."""
_PIXELS = 104
"""Pixels of a page for each inch of a figure."""
_LINE = 0.19
"""Height of a line of text in inches."""
_PARAMETERS: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "font.size": 10,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of variables may contain dollar signs
}
_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_MARKS = (f"{_SVG}use", f"{_SVG}path")
_FONT = re.compile(r"(font(?:-family)?: *(?:[^;']*?px)?)[^;]*'[^;]*")


def report_style() -> AbstractContextManager[None]:
    """Give new figures within the block the look of reports."""
    from matplotlib import rc_context

    return rc_context(_PARAMETERS)


def styled(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    """Decorate a function that makes a figure, so that the figure has the look of reports."""

    @wraps(draw)
    def with_style(*arguments: Arguments.args, **options: Arguments.kwargs) -> Drawn:
        with report_style():
            return draw(*arguments, **options)

    return with_style


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure of this size in inches, with automatic layout."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_ends(axes: Axes, lines: Sequence[tuple[str, float, str]]) -> None:
    """Write labels (text, y value, colour) to the right of the axes, each at its value; overlapping ones move apart.

    Call it when the limits of the axes are final.
    """
    gap = _LINE / (axes.bbox.height / axes.figure.dpi)
    places = spread([_height(axes, value) for _, value, _ in lines], gap)
    look: dict[str, Any] = {"xytext": (6, 0), "xycoords": "axes fraction", "textcoords": "offset points"}
    look |= {"va": "center", "fontsize": 9, "annotation_clip": False}
    for (text, _, color), place in zip(lines, places, strict=True):
        axes.annotate(text, (1.0, place), color=color, **look)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places, moved so that neighbours are at least ``gap`` apart and none is above 1."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    made = list(places)
    for before, after in pairwise(order):
        made[after] = max(made[after], made[before] + gap)
    limit = 1.0
    for index in reversed(order):
        made[index] = min(made[index], limit)
        limit = made[index] - gap
    return made


def _height(axes: Axes, value: float) -> float:
    """The position of a value on the y axis, from 0 to 1."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        low, high, value = math.log(low), math.log(high), math.log(value)
    return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True)
class Picture:
    """A figure for a page.

    Attributes:
        name: name, unique on the page; prefix of all ids in the SVG.
        figure: matplotlib figure.
        description: text alternative for readers who cannot see the picture.
        tooltips: texts for the marks of a collection, by the collection's ``gid``.
    """

    name: str
    figure: Figure
    description: str
    tooltips: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def svg(self) -> Markup:
        """The figure as one ``<svg>`` element, for pages that define the colours of `VARIABLES`."""
        root = self._drawn()
        for mark_group, lines in self.tooltips.items():
            _add_tooltips(root, mark_group, lines)
        _adapt_to_page(root, self.name)
        self._describe(root)
        ElementTree.register_namespace("", _SVG[1:-1])
        return Markup(ElementTree.tostring(root, encoding="unicode"))

    def _drawn(self) -> ElementTree.Element:
        from matplotlib import rc_context

        text = StringIO()
        with report_style(), rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(text, format="svg", metadata={"Date": None})
        return ElementTree.fromstring(text.getvalue())

    def _describe(self, root: ElementTree.Element) -> None:
        element = ElementTree.Element(f"{_SVG}desc", {"id": f"{self.name}-description"})
        element.text = self.description
        root.insert(0, element)
        # The figure scales with the page, but its text must not become larger than in other figures.
        root.set("style", f"max-width: {_PIXELS * self.figure.get_figwidth():.0f}px")
        root.set("role", "img")
        root.set("aria-labelledby", f"{self.name}-description")


def _add_tooltips(root: ElementTree.Element, mark_group: str, lines: Sequence[str]) -> None:
    """Add SVG tooltips: a ``<title>`` inside each mark.

    Raises:
        ValueError: the numbers of marks and lines differ.
    """
    group = next((element for element in root.iter(f"{_SVG}g") if element.get("id") == mark_group), None)
    # Matplotlib defines the shape of a collection once, as a path inside <defs>; that path is not a mark.
    shared = {id(child) for element in root.iter(f"{_SVG}defs") for child in element.iter()}
    found = [] if group is None else list(group.iter())
    marks = [one for one in found if one.tag in _MARKS and id(one) not in shared]
    if len(marks) != len(lines):
        raise ValueError(f"tooltips: {len(lines)} lines for {len(marks)} marks of '{mark_group}'")
    for mark, line in zip(marks, lines, strict=True):
        ElementTree.SubElement(mark, f"{_SVG}title").text = line


def _adapt_to_page(root: ElementTree.Element, name: str) -> None:
    """Remove redundant attributes, use the page's colours and fonts, and make ids unique on the page."""
    for metadata in root.findall(f"{_SVG}metadata"):
        root.remove(metadata)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    for element in root.iter():
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.attrib['id']}")
        if element.get(_XLINK, "").startswith("#"):
            element.set("href", f"#{name}-{element.attrib.pop(_XLINK)[1:]}")
        for attribute in ("style", "fill", "stroke", "clip-path"):
            if (value := element.get(attribute)) is not None:
                for colour, variable in VARIABLES.items():
                    value = value.replace(colour, f"var({variable})")
                element.set(attribute, _FONT.sub(r"\1 var(--sans)", value).replace("url(#", f"url(#{name}-"))

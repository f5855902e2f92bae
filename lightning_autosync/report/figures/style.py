"""How pictures in reports look: one palette for light and dark pages, markers and hatches beside every colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
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
"""The page's custom property for each colour that figures are drawn with."""

SERIES = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, OCHRE, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "p", "h")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.5), (6, 2, 1, 2), (3, 1), (8, 3), (2, 3), (9, 2, 2, 2))
WIDTH = 9.6
"""Inches of a figure as wide as the page's text; it is shown at about 100 pixels an inch."""

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
    "text.parse_math": False,  # names of variables may hold dollars
}


@contextmanager
def report_style() -> Iterator[None]:
    """Within the block new figures look like those of a report."""
    from matplotlib import rc_context

    with rc_context(_PARAMETERS):
        yield


def styled(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    """Decorates a function that makes a figure."""

    @wraps(draw)
    def with_style(*arguments: Arguments.args, **options: Arguments.kwargs) -> Drawn:
        with report_style():
            return draw(*arguments, **options)

    return with_style


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure of that many inches, laid out by itself."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure

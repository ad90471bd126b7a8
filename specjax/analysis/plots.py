"""Small figures on a white page: every function returns its own figure and touches no global state.

matplotlib comes with the extra `plots` and is imported only when something is drawn; without a display
it works all the same, for figures are made without pyplot.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specjax.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (5.6, 3.6)  # inches
DOTS_PER_INCH = 110
RANKING_WIDTH, INCHES_PER_BAR = 800 / DOTS_PER_INCH, 0.22
DARK, PALE = "#1f77b4", "#aec7e8"


class Series(NamedTuple):
    """Points to draw, with the half-width of each one's interval if there is one."""

    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    errors: Sequence[float] | np.ndarray | None = None


def lines(series: Mapping[str, Series], *, x_label: str, y_label: str, title: str = "") -> Figure:
    """A line for every named series, with error bars where it has errors."""
    figure, axes = blank(x_label, y_label, title)
    for name, points in series.items():
        axes.errorbar(points.x, points.y, points.errors, label=name, marker=".", capsize=2)
    axes.legend(frameon=False)
    return figure


def scatter(series: Mapping[str, Series], *, x_label: str, y_label: str, title: str = "") -> Figure:
    """Unconnected points for every named series, with error bars where it has errors."""
    figure, axes = blank(x_label, y_label, title)
    for name, points in series.items():
        axes.errorbar(points.x, points.y, points.errors, label=name, fmt=".", capsize=2)
    axes.legend(frameon=False)
    return figure


def histogram(
    closed_form: Sequence[float] | np.ndarray,
    measured: Sequence[float] | np.ndarray,
    *,
    first: int,
    x_label: str,
    title: str = "",
) -> Figure:
    """Two bars, expected and measured share, for each of the whole numbers from `first` on.

    Raises ConfigError where one list is longer than the other.
    """
    if len(closed_form) != len(measured):
        raise ConfigError(
            f"{len(closed_form)} expected shares and {len(measured)} measured ones: give equally many"
        )
    figure, axes = blank(x_label, "share", title)
    places = np.arange(first, first + len(measured))
    axes.bar(places - 0.2, closed_form, width=0.38, label="closed form")
    axes.bar(places + 0.2, measured, width=0.38, label="measured")
    axes.set_xticks(places)
    axes.legend(frameon=False)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the name ends in."""
    # Without the version of matplotlib in it, the same figure gives the same file.
    metadata = {"Software": None} if path.suffix == ".png" else None
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)


def blank(x_label: str, y_label: str, title: str) -> tuple[Figure, Axes]:
    """An empty figure and its axes; ConfigError without matplotlib."""
    figure = _empty()
    axes = figure.add_subplot()
    _dress(axes, x_label, y_label, title)
    return figure, axes


def _empty() -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'specjax[plots]'") from error
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _dress(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def heat_map(
    cells: Sequence[Sequence[float]] | np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    x_label: str,
    y_label: str,
    title: str = "",
) -> Figure:
    """`cells` [R, C] as colours with their numbers, the first row at the bottom; NaN is left blank.

    Raises ConfigError where the labels are not one for each row and column.
    """
    cells = np.asarray(cells, float)
    if cells.shape != (len(rows), len(columns)):
        raise ConfigError(
            f"{len(rows)} and {len(columns)} labels for cells of the shape {cells.shape}: give each row and "
            "column one"
        )
    figure, axes = blank(x_label, y_label, title)
    axes.grid(False)
    image = axes.imshow(np.ma.masked_invalid(cells), origin="lower", aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for (row, column), value in np.ndenumerate(cells):
        if not np.isnan(value):
            colour = "white" if value <= middle else "black"  # low cells are dark
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
    figure.colorbar(image)
    return figure


def shares(values: Mapping[str, float], *, x_label: str, title: str = "") -> Figure:
    """A bar for every named share, the first one at the top."""
    figure, axes = blank(x_label, "", title)
    axes.barh(list(values), list(values.values()))
    axes.invert_yaxis()
    return figure


class Bar(NamedTuple):
    """A measured value, the bounds of its interval if there is one, and what a ranking writes behind it."""

    value: float
    interval: Sequence[float] | None = None
    note: str = ""


def bars(
    series: Mapping[str, Mapping[str, Bar]], *, y_label: str, title: str = "", reference: float | None = None
) -> Figure:
    """For every name along the x axis a bar of each series, with its interval, and a line at `reference`."""
    figure, axes = blank("", y_label, title)
    names = list(dict.fromkeys(name for own in series.values() for name in own))
    width = 0.8 / max(1, len(series))
    for number, (label, own) in enumerate(series.items()):
        places = [names.index(name) + (number - (len(series) - 1) / 2) * width for name in own]
        values = [bar.value for bar in own.values()]
        axes.bar(places, values, width=0.95 * width, label=label)
        for place, bar in zip(places, own.values(), strict=True):
            if bar.interval is not None:
                low, high = bar.interval
                axes.vlines(place, low, high, color="black", linewidth=1)
    if reference is not None:
        axes.axhline(reference, color="0.4", linewidth=1)
    axes.set_xticks(range(len(names)), names)
    if len(names) > 4:
        axes.tick_params("x", labelrotation=30)
    axes.legend(frameon=False)
    return figure


def ranking(panels: Mapping[str, Mapping[str, Bar]], *, x_label: str, reference: float) -> Figure:
    """Panels side by side, by title: bars that lie, the longest on top, with their intervals and notes.

    A bar whose interval lies above `reference`, where there is a line, is dark, any other pale.
    """
    figure = _empty()
    most = max(map(len, panels.values()))
    figure.set_size_inches(RANKING_WIDTH, 1.2 + most * INCHES_PER_BAR)
    places = figure.subplots(1, len(panels), sharex=True, squeeze=False)[0]
    for axes, (title, own) in zip(places, panels.items(), strict=True):
        _dress(axes, "", "", title="")
        axes.set_title(title, fontsize="small", loc="right")  # above the names too, where it is long
        axes.grid(axis="y", visible=False)
        names = sorted(own, key=lambda name: own[name].value, reverse=True)
        for place, bar in enumerate(own[name] for name in names):
            low, high = (bar.value, bar.value) if bar.interval is None else bar.interval
            axes.barh(place, bar.value, color=DARK if low > reference else PALE)
            axes.hlines(place, low, high, color="black", linewidth=1)
            axes.annotate(bar.note, (high, place), (4, 0), textcoords="offset points", va="center")
        axes.axvline(reference, color="0.4", linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(most - 0.5, -0.5)
        axes.margins(x=0.2)  # room for the notes
    figure.supxlabel(x_label, fontsize="medium")
    return figure


def svg(figure: Figure) -> str:
    """The figure as an SVG document, the same every time."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "specjax", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def png(figure: Figure) -> bytes:
    """The figure as a PNG of at most 64 colours, which is a third as large and looks the same."""
    from PIL import Image  # comes with matplotlib

    whole, small = io.BytesIO(), io.BytesIO()
    figure.savefig(whole, format="png", dpi=DOTS_PER_INCH)
    with Image.open(whole) as image:
        image.convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()

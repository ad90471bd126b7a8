"""Figures are drawn without display or global state, and ask for matplotlib where it is missing."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from specjax.analysis import plots
from specjax.analysis.plots import Bar, Series
from specjax.errors import ConfigError

LABELS = {"x_label": "K", "y_label": "tokens"}


def test_lines_and_points() -> None:
    series = {"a": Series([1, 2], [3.0, 4.0]), "b": Series(np.arange(2), np.ones(2), errors=[0.1, 0.2])}
    for draw in (plots.lines, plots.scatter):
        figure = draw(series, **LABELS, title="title")
        (axes,) = figure.axes
        assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("K", "tokens", "title")
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_histogram() -> None:
    figure = plots.histogram([0.4, 0.6], [0.41, 0.59], first=1, x_label="tokens")
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [0.4, 0.6, 0.41, 0.59]
    with pytest.raises(ConfigError, match="equally many"):
        plots.histogram([0.4, 0.6], [1.0], first=1, x_label="tokens")


def test_ranking_sorts_its_panels_and_compares_them() -> None:
    first = {"slow": Bar(0.5, (0.4, 0.6)), "fast": Bar(2.0, (1.8, 2.5), "3.1"), "even": Bar(1.1, (0.9, 1.3))}
    panels = {"T = 0": first, "T = 1": {"fast": Bar(1.2, note="1.4")}}
    left, right = plots.ranking(panels, x_label="speed-up", reference=1.0).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["fast", "even", "slow"]
    assert [bar.get_width() for bar in left.patches] == [2.0, 1.1, 0.5]
    dark, doubtful, slow = (bar.get_facecolor() for bar in left.patches)
    assert dark != doubtful == slow
    notes = [[(note.get_text(), note.xy) for note in axes.texts] for axes in (left, right)]
    assert notes[0][0] == ("3.1", (2.5, 0)) and notes[1] == [("1.4", (1.2, 0))]
    # Bars are as long and as thick in one panel as in the other.
    assert left.get_xlim() == right.get_xlim() and left.get_ylim() == right.get_ylim()
    assert left.get_xlim()[0] == 0 and left.get_xlim()[1] > 2.5


def test_files_are_small_and_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plots.save(plots.lines({"a": Series([1, 2], [3.0, 4.0])}, **LABELS), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").stat().st_size < 60_000
    with Image.open(tmp_path / "a.png") as large:
        first, second = (
            plots.png(plots.lines({"a": Series([1, 2], [3.0, 4.0])}, **LABELS)) for _ in range(2)
        )
        small = Image.open(io.BytesIO(first)).convert("RGB")
        assert first == second and len(first) < 0.6 * (tmp_path / "a.png").stat().st_size
        difference = np.asarray(large.convert("RGB"), int) - np.asarray(small, int)
    assert small.size == large.size and abs(difference).mean() < 1
    # No figure is registered with pyplot, nor pyplot imported by drawing.
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'specjax\[plots\]'"):
        plots.lines({}, **LABELS)

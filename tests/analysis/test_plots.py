"""Figures are drawn without display or global state, and ask for matplotlib where it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from specjax.analysis import plots
from specjax.analysis.plots import Series
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


def test_files_are_small_and_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plots.save(plots.lines({"a": Series([1, 2], [3.0, 4.0])}, **LABELS), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").stat().st_size < 60_000
    # No figure is registered with pyplot, nor pyplot imported by drawing.
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'specjax\[plots\]'"):
        plots.lines({}, **LABELS)

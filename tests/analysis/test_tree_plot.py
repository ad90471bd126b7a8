"""Pictures of trees: every node and edge is there, and nodes stand above their children."""

from __future__ import annotations

import pytest

from specjax.analysis import plots, tree_plot
from specjax.errors import ConfigError

PARENTS = [-1, 0, 0, 0, 1, 1, 4]


def test_layout_puts_nodes_amid_their_children_and_none_on_another() -> None:
    places = tree_plot.layout(PARENTS)
    assert [depth for _, depth in places] == [0, 1, 1, 1, 2, 2, 3]
    assert [across for across, _ in places] == [1.75, 0.5, 2, 3, 0, 1, 0]
    assert len(set(places)) == len(PARENTS)


def test_every_node_is_labelled_and_every_edge_drawn(tmp_path) -> None:
    figure = tree_plot.tree(PARENTS, title="tree")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == [str(node) for node in range(7)]
    assert len(axes.lines) == 6 and axes.get_title() == "tree"
    weights = [1.0, 0.5, 0.2, 0.0, 0.3, 0.1, 0.3]
    figure = tree_plot.tree(PARENTS, weights, weights=weights)
    assert [text.get_text() for text in figure.axes[0].texts][:2] == ["1.00", "0.50"]
    plots.save(figure, tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size < 60_000


def test_the_root_alone() -> None:
    assert len(tree_plot.tree([-1]).axes[0].texts) == 1


@pytest.mark.parametrize(
    ("parents", "labels", "message"),
    [
        ([-1, 0], [1], "1 labels and 2 nodes"),
        ([0, 0], None, "node 0 has the parent 0"),
        ([-1, 2, 0], None, "node 1 has the parent 2"),
        ([-1, -1], None, "node 1 has the parent -1"),
        ([], None, "has no nodes"),
    ],
)
def test_bad_trees(parents: list[int], labels: list[int] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tree_plot.tree(parents, labels)

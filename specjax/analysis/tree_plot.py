"""A picture of a tree: the root on top, every node above its children."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specjax.analysis import plots
from specjax.errors import ConfigError
from specjax.trees.topology import children_of
from specjax.types import ROOT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCHES_PER_LEAF = 0.34
INCHES_PER_LEVEL = 0.75

Place = tuple[float, int]  # across, in leaves, and depth


def tree(
    parents: Sequence[int],
    labels: Sequence[object] | None = None,
    *,
    weights: Sequence[float] | None = None,
    title: str = "",
) -> Figure:
    """The tree of `parents` (node 0 the root), nodes labelled in their order or numbered.

    A node is the darker the larger its weight, a number from 0 to 1 such as its acceptance. Floats are
    written with two digits. Raises ConfigError where lists differ in length or parents make no tree.
    """
    for name, values in {"labels": labels, "weights": weights}.items():
        if values is not None and len(values) != len(parents):
            raise ConfigError(f"{len(values)} {name} and {len(parents)} nodes: give one for every node")
    places = layout(parents)
    figure, axes = plots.blank("", "", title)
    num_leaves = max(across for across, _ in places) + 1
    num_levels = max(depth for _, depth in places) + 1
    figure.set_size_inches(
        max(plots.SIZE[0], num_leaves * INCHES_PER_LEAF),
        max(plots.SIZE[1] / 2, num_levels * INCHES_PER_LEVEL),
    )
    axes.set_axis_off()
    axes.set_ylim(num_levels - 0.5, -0.5)
    for (across, depth), parent in zip(places[1:], parents[1:], strict=True):
        axes.plot((places[parent][0], across), (depth - 1, depth), color="0.7", linewidth=1, zorder=1)
    for node, (across, depth) in enumerate(places):
        weight = 0.0 if weights is None else weights[node]
        box = {
            "boxstyle": "round",
            "facecolor": (1 - 0.55 * weight, 1 - 0.3 * weight, 1.0),
            "edgecolor": "0.5",
        }
        label = _text(node if labels is None else labels[node])
        axes.text(across, depth, label, ha="center", va="center", fontsize=7, bbox=box)
    axes.set_xlim(-0.5, num_leaves - 0.5)
    return figure


def layout(parents: Sequence[int]) -> list[Place]:
    """Leaves side by side in the order of a walk through the tree, every other node amid its children."""
    children = children_of(parents)
    depths = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        depths[node] = depths[parent] + 1
    across = [0.0] * len(parents)
    pending, num_leaves = [ROOT], 0
    while pending:
        node = pending.pop()
        pending += reversed(children[node])
        if not children[node]:
            across[node], num_leaves = float(num_leaves), num_leaves + 1
    for node in reversed(range(len(parents))):
        if children[node]:
            across[node] = (across[children[node][0]] + across[children[node][-1]]) / 2
    return list(zip(across, depths, strict=True))


def _text(label: object) -> str:
    return f"{label:.2f}" if isinstance(label, float) else str(label)

"""One page about a run that needs no network: tables, figures, and texts whose tokens tell how they came.

Its looks and its behaviour are the files in `page/`. Whoever has JavaScript switched off sees everything but
the trees.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jinja2

from specjax.analysis.tree_plot import layout
from specjax.types import NO_PARENT, NO_TOKEN, ROOT

ACCEPTED, RESAMPLED, BONUS, PLAIN = "accepted", "resampled", "bonus", "plain"
REFUSED, PENDING = "refused", "pending"  # nodes that are no token of the text, or one from before
KINDS = {
    ACCEPTED: "drafted and accepted",
    RESAMPLED: "drawn by the target after it had refused a draft",
    BONUS: "drawn by the target after all drafts on its path had been accepted",
    PLAIN: "drawn by the target where nothing was drafted",
}
_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥"}


class Pass(NamedTuple):
    """What `specjax.decode.Trace` says of one row in one round, as plain numbers.

    `num_accepted` and `num_emitted` are those of its `info`, without what was cut off at an end.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    path: Sequence[int]
    next_token: int
    num_accepted: int
    num_emitted: int

    @property
    def emitted(self) -> list[int]:
        """The tokens that the pass added to the text."""
        drafted = [self.tokens[node] for node in self.path[1 : self.num_accepted + 1]]
        return [*drafted, self.next_token][: self.num_emitted]


class Node(NamedTuple):
    """A node of a drawn tree: its token's text, what became of it, and its place, across and in depth."""

    text: str
    kind: str
    parent: int
    across: float
    depth: int


class Step(NamedTuple):
    """One pass as it is shown: its tree, the token that followed being its last node, and a sentence."""

    nodes: list[Node]
    caption: str


class Token(NamedTuple):
    """A token of a text: what it says, how it came, and the step and the node that it came from."""

    text: str
    kind: str
    step: int
    node: int


class Text(NamedTuple):
    """What a method wrote for a prompt; `remark` is what must be known about it, or empty."""

    title: str
    prompt: str
    tokens: list[Token]
    steps: list[Step]
    remark: str = ""


class Table(Protocol):
    """`specjax.eval.tables.Table`, whose room is out of reach from here."""

    @property
    def title(self) -> str: ...
    @property
    def columns(self) -> Sequence[str]: ...
    @property
    def rows(self) -> Sequence[Sequence[str]]: ...


class Picture(NamedTuple):
    """A figure as a data URI, and what it shows, for those who do not see it."""

    source: str
    alt: str


class Page(NamedTuple):
    """All that a page shows, from top to bottom; `about` names facts of the run."""

    title: str
    about: Mapping[str, str]
    tables: Sequence[Table]
    notes: Sequence[str]
    pictures: Sequence[Picture]
    texts: Sequence[Text]


def explain(passes: Iterable[Pass], text_of: Callable[[int], str]) -> tuple[list[Token], list[Step]]:
    """The tokens of a text in their order, and the steps that they came from."""
    tokens: list[Token] = []
    steps: list[Step] = []
    for number, done in enumerate(passes):
        nodes, emitted = _tree(done, text_of)
        tokens += [Token(nodes[node].text, nodes[node].kind, number, node) for node in emitted]
        steps.append(Step(nodes, _caption(number, nodes, emitted)))
    return tokens, steps


def count(texts: Iterable[Text]) -> dict[str, int]:
    """How many tokens of the texts came in each way."""
    found = Counter(token.kind for text in texts for token in text.tokens)
    return {kind: found[kind] for kind in KINDS}


def visible(text: str) -> str:
    """`text` with signs for what would not be seen: spaces, ends of lines, controls, or nothing at all."""
    shown = (
        _SIGNS.get(character) or (character if character.isprintable() else f"\\u{ord(character):04x}")
        for character in text
    )
    return "".join(shown) or "∅"


def picture(content: bytes, kind: str, alt: str) -> Picture:
    """The bytes of an image of that MIME type, such as image/png."""
    return Picture(f"data:{kind};base64,{base64.b64encode(content).decode()}", alt)


def render(page: Page) -> str:
    """The page as HTML; whatever comes from a run is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("specjax.analysis", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html")
    return template.render(
        **page._asdict(), kinds=KINDS, count=count, visible=visible, drawn=_drawn(page.texts)
    )


def _tree(done: Pass, text_of: Callable[[int], str]) -> tuple[list[Node], list[int]]:
    """The nodes that hold a token, with the one that followed, and those among them that were emitted."""
    place = {NO_PARENT: NO_PARENT}  # node -> its number among those that are shown
    for node, (token, parent) in enumerate(zip(done.tokens, done.parents, strict=True)):
        if node == ROOT or (token != NO_TOKEN and parent in place):
            place[node] = len(place) - 1
    shown = [node for node in place if node != NO_PARENT]
    path = [place[node] for node in done.path[: done.num_accepted + 1]]
    texts = [text_of(done.tokens[node]) for node in shown]
    parents = [place[done.parents[node]] for node in shown]
    kinds = [PENDING, *[REFUSED] * (len(shown) - 1)]
    emitted = path[1:]
    for node in emitted:
        kinds[node] = ACCEPTED
    if done.num_emitted > done.num_accepted:  # otherwise the text ended before the target's own token
        kind = PLAIN if len(shown) == 1 else RESAMPLED if path[-1] in parents else BONUS
        texts, parents, kinds = [*texts, text_of(done.next_token)], [*parents, path[-1]], [*kinds, kind]
        emitted = [*emitted, len(texts) - 1]
    nodes = [
        Node(text, kind, parent, across, depth)
        for text, kind, parent, (across, depth) in zip(texts, kinds, parents, layout(parents), strict=True)
    ]
    return nodes, emitted


def _caption(number: int, nodes: Sequence[Node], emitted: Sequence[int]) -> str:
    """What happened, also for those who do not see the tree."""
    kinds = Counter(node.kind for node in nodes)
    num_drafts = kinds[ACCEPTED] + kinds[REFUSED]
    accepted = [f"“{visible(node.text)}”" for node in nodes if node.kind == ACCEPTED]
    said = f"Pass {number + 1} after “{visible(nodes[ROOT].text)}”: "
    said += f"{num_drafts} drafted, {len(accepted)} accepted" if num_drafts else "nothing drafted"
    said += f" ({', '.join(accepted)})" if accepted else ""
    last = nodes[emitted[-1]] if emitted else None
    if last is None or last.kind == ACCEPTED:
        return f"{said}; there the text ends."
    return f"{said}, then “{visible(last.text)}” ({last.kind})."


def _drawn(texts: Sequence[Text]) -> list[list[dict[str, Any]]]:
    """The trees of all steps of all texts, for the page's script."""
    return [
        [
            {
                "caption": step.caption,
                "nodes": [node._replace(text=visible(node.text))._asdict() for node in step.nodes],
            }
            for step in text.steps
        ]
        for text in texts
    ]

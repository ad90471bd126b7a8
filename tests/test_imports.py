"""Imports point down only: every room of the package may reach the rooms named beside it, and no others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "specjax"

# Room -> the rooms it may import. Bottom first: a room may name only rooms above it in this table, so
# there are no cycles. A room is a module or a folder under specjax/, and the longest name that fits a
# module is its room. A room may import itself, and anyone may import `errors`.
ROOMS = {
    "errors": "",
    "storage": "",
    "types": "",
    "trees": "types",
    "kernels": "types storage",
    "sharding": "types",
    "cache": "types",
    "sampling": "types",
    "proposals": "trees sampling types",
    "growth": "proposals trees sampling cache types",
    "prefill": "trees cache types",
    "models": "kernels cache sharding types",
    "training.losses": "",
    "training.units": "types",
    "training.foresight": "training.losses types",
    "training.copying": "models types",
    "draft_vocab": "models types",
    "state_drafting": "growth proposals prefill models trees cache types",
    "step": "trees sampling cache types",
    "drafters": "step state_drafting draft_vocab training.losses training.foresight training.units"
    " training.copying models prefill growth proposals trees sampling cache types",
    "verify": "trees sampling types",
    "testing": "proposals trees sampling cache types",
    "decode": "step prefill sampling cache types",
    "modules": "drafters verify types",
    "config": "modules sampling types",
    "data.chat_template": "",
    "data.tokenizer": "data.chat_template",
    "data.gguf_tokenizer": "data.tokenizer",
    "checkpoints": "storage data.tokenizer data.gguf_tokenizer draft_vocab models types",
    "data": "storage data.tokenizer decode step verify sampling cache types",
    "eval": "storage config modules draft_vocab decode testing models step trees sampling types",
    "training": "training.losses training.units checkpoints data eval sharding decode step prefill sampling"
    " types",
    "analysis": "trees types",
    "paper_tables": "analysis eval",
    "zoo": "",
    "targets": "checkpoints data.tokenizer models types",
    "build_learned": "targets zoo draft_vocab proposals config modules training checkpoints models types",
    "build": "build_learned targets config modules data data.tokenizer draft_vocab step models types",
    "sweeps": "build targets config modules analysis eval storage step types",
    "tasks": "sweeps build build_learned config modules analysis eval training training.losses training.units"
    " sharding checkpoints data data.tokenizer draft_vocab proposals models decode step sampling types",
    "tables": "paper_tables eval",
    "run": "tasks storage config modules eval",
    "data.generate": "run",
    "data.prepare": "run",
    "train": "run sharding",
    "sweep": "run",
    "report": "tasks build config modules analysis eval storage data data.tokenizer decode step types",
    "advice": "tasks build targets zoo config modules analysis eval checkpoints data storage trees",
    "advise": "advice tasks storage eval",
    # specjax/__init__.py, which offers the public names of everything but the command lines
    "__init__": "build config eval checkpoints data data.tokenizer decode step drafters verify models trees"
    " sampling cache types",
}

Import = tuple[int, str]  # line, module under specjax


def room_of(module: str) -> str | None:
    """Return the room that `module` (dotted, without "specjax.") belongs to, or None."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in ROOMS), None)


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Yield what `source`, a module of the dotted `package`, imports from specjax."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # level 1 is the package itself, each further one its parent
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            found = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            if name == "specjax" or name.startswith("specjax."):
                yield node.lineno, name.removeprefix("specjax").removeprefix(".") or "__init__"


def offences(source: str, file: Path) -> list[str]:
    """Return one "file:line: reason" for each import of `file` (relative to specjax/) that points up."""
    module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    room = room_of(module)
    if room is None:
        return [f"specjax/{file}:1: in no room of the table in tests/test_imports.py"]
    allowed = {room, "errors", *ROOMS[room].split()}
    return [
        f"specjax/{file}:{line}: {room} may not import specjax.{imported} ({room_of(imported) or 'no room'})"
        for line, imported in imports_of(source, ".".join(["specjax", *file.parent.parts]))
        if room_of(imported) not in allowed
    ]


def test_no_import_points_up() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    found = [o for f in files for o in offences(f.read_text(encoding="utf-8"), f.relative_to(PACKAGE))]
    assert not found, "\n" + "\n".join(found)


def test_table_is_ordered_from_the_bottom_up() -> None:
    seen: set[str] = set()
    for room, allowed in ROOMS.items():
        assert seen.issuperset(allowed.split()), f"{room} names a room at or below it in the table"
        seen.add(room)


@pytest.mark.parametrize(
    ("file", "source", "line"),
    [
        ("verify/x.py", "import jax\nimport specjax.models.llama", 2),
        ("verify/x.py", "from specjax.models.llama import Llama", 1),
        ("verify/x.py", "from specjax import decode", 1),
        ("verify/x.py", "from ..models import llama", 1),
        ("verify/x.py", "def late():\n    from specjax import step", 2),
        ("checkpoints/x.py", "from specjax.data import prompts", 1),
        ("types.py", "from . import cache", 1),
        ("decode.py", "from specjax import generate", 1),
        ("attic/x.py", "", 1),
        ("attic.py", "", 1),
    ],
)
def test_offender_is_caught_at_its_line(file: str, source: str, line: int) -> None:
    (offence,) = offences(source, Path(file))
    assert offence.startswith(f"specjax/{file}:{line}:")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("verify/x.py", "import numpy\nfrom specjax.types import ROOT\nfrom ..trees import topology"),
        ("verify/x.py", "from .rejection import verify\nfrom specjax.errors import ConfigError"),
        ("checkpoints/x.py", "from specjax.data.tokenizer import Tokenizer"),
        ("__init__.py", "from specjax.decode import generate\nfrom .types import Draft"),
    ],
)
def test_imports_that_point_down_pass(file: str, source: str) -> None:
    assert offences(source, Path(file)) == []

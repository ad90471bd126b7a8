"""Results of one's own, as the tables set them beside published figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import ConfigError
from specjax.eval.compare import PLAIN
from specjax.eval.metrics import Metrics
from specjax.eval.results import SUMMARY
from specjax.eval.tables import Table, interval
from specjax.paper_tables._published import Figure, Source

# What the papers call our drafters; one that they do not know keeps its module's name.
NAMES = {
    "draft_model": "small LM",
    "ngram": "prompt lookup",
    "lookahead": "Lookahead",
    "medusa": "Medusa",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
}
# The tables' names of Spec-Bench's tasks, some of which are drawn from sets that have tables of their own.
SPEC_BENCH_NAMES = {
    "mt_bench": ("MT-bench",),
    "translation": ("translation",),
    "summarization": ("summarization", "CNN/DM"),
    "qa": ("QA",),
    "math_reasoning": ("mathematics", "GSM8K"),
    "rag": ("RAG",),
}
OVERALL = "overall"  # all of Spec-Bench's prompts
NOTE = (
    "Ours: speed-up / tokens per pass, and the speed-up's 95 % interval where there is one. It is not the "
    "same machine or model as the published column's: compare how methods rank, not the figures."
)
RECALLED = "(m) marks a figure that was recalled, not read; - is a missing one."


class Cell(NamedTuple):
    """What a method did on a dataset."""

    speedup: float
    tokens_per_pass: float
    interval: Sequence[float] | None
    lossless: bool

    def __str__(self) -> str:
        parts = [f"{self.speedup:.2f}x / {self.tokens_per_pass:.2f}"]
        parts += [interval(self.interval)] if self.interval is not None else []
        parts += [] if self.lossless else ["LOSSY"]
        return "\n".join(parts)


Row = tuple[str, str]  # what the papers call a method, and which of several that is, or ""
Column = tuple[str, str]  # our target and our device
Cells = dict[tuple[Row, Column, str], Cell]  # by dataset


class Run(NamedTuple):
    """One speculative method of one setting: its metrics by dataset, `name` being what the run calls it."""

    folder: Path
    name: str
    method: str
    drafter: Mapping[str, Any]
    temperature: float
    column: Column
    datasets: Mapping[str, Metrics]
    lossless: bool

    def metrics(self, dataset: str) -> Metrics | None:
        """Those of a dataset by the name that a table has for it."""
        return self.datasets.get(_key(dataset))

    def cell(self, dataset: str) -> Cell | None:
        """What a table shows of a dataset."""
        if (metrics := self.metrics(dataset)) is None:
            return None
        speedup = metrics["speedup"]
        return Cell(speedup["value"], metrics["tokens_per_step"], speedup["interval"], self.lossless)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The methods of each folder's summary; ConfigError where it has none of compare or evaluate."""
    return [run for folder in folders for run in _read(folder)]


def method_name(drafter: Mapping[str, Any]) -> str:
    """What the papers call a drafter of a config; EAGLE's head with dynamic trees is EAGLE-2."""
    name = drafter["name"].rpartition(".")[2]
    if name == "eagle" and drafter.get("num_nodes"):
        return "EAGLE-2"
    return NAMES.get(name, name)


def our_cells(runs: Sequence[Run], datasets: Sequence[str]) -> Cells:
    """The runs' cells; where several runs of a method meet, each has its own row, named after the run.

    Raises ConfigError where not even the name tells two runs apart.
    """
    met: dict[tuple[str, Column, str], set[str]] = {}
    for run in runs:
        for dataset in datasets:
            if run.cell(dataset) is not None:
                met.setdefault((run.method, run.column, dataset), set()).add(run.name)
    several = {method for (method, _, _), names in met.items() if len(names) > 1}
    cells: Cells = {}
    for run in runs:
        row = (run.method, run.name if run.method in several else "")
        for dataset in datasets:
            if (cell := run.cell(dataset)) is None:
                continue
            if (row, run.column, dataset) in cells:
                raise ConfigError(
                    f"{run.folder} holds {run.name} on {dataset} a second time: name each result once, "
                    "with one length of outputs"
                )
            cells[row, run.column, dataset] = cell
    return cells


def check_useful(runs: Sequence[Run], useful: Sequence[Run], needs: str) -> None:
    """Raise ConfigError where there are runs and not one of them has what a table `needs`."""
    if runs and not useful:
        folders = ", ".join(dict.fromkeys(str(run.folder) for run in runs))
        raise ConfigError(f"nothing in {folders} belongs into this table: it needs {needs}")


def side_by_side(
    title: str,
    source: Source,
    datasets: Sequence[str],
    published: Mapping[str, Sequence[Figure | str]],
    cells: Cells,
) -> Table:
    """A row for each method; for each dataset the published column, then ours wherever there is anything."""
    header, places = ["method"], []
    for place, dataset in enumerate(datasets):
        header.append(f"{dataset}\n{source.target}\n{source.device}")
        ours = [column for column in columns_of(cells) if any(key[1:] == (column, dataset) for key in cells)]
        header += [our_header(column, dataset) for column in ours]
        places.append((place, dataset, ours))
    rows = []
    for method in dict.fromkeys([*published, *(row[0] for row, _, _ in cells)]):
        for row in dict.fromkeys(row for row, _, _ in cells if row[0] == method) or [(method, "")]:
            line = [": ".join(filter(None, row))]
            for place, dataset, ours in places:
                line.append(str(published[method][place]) if method in published else "-")
                line += [str(cells.get((row, column, dataset), "-")) for column in ours]
            rows.append(tuple(line))
    return Table(title, tuple(header), rows)


def columns_of(cells: Cells) -> list[Column]:
    """Our targets and devices, each once."""
    return list(dict.fromkeys(column for _, column, _ in cells))


def our_header(column: Column, what: str) -> str:
    """The header of a column of ours."""
    target, device = column
    return f"{what}\nours: {target}\n{device}"


def _read(folder: Path) -> list[Run]:
    path = folder / SUMMARY
    try:
        return _runs(folder, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}): name the workdir of a finished run"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no summary of the tasks compare or evaluate ({error!r}): run it again"
        ) from error


def _runs(folder: Path, summary: Mapping[str, Any]) -> list[Run]:
    """A comparison is one setting of one method, whose name is its folder's; an evaluation has `sections`."""
    config = summary["config"]
    device = summary["environment"]["device_kind"]
    runs = []
    for section in summary.get("sections", [{**config, **summary}]):
        batch = section["batch_size"]
        column = (config["target"], device if batch == 1 else f"{device}, batch {batch}")
        datasets = _datasets(section)
        for name, metrics in section["methods"].items():
            if name == PLAIN:
                continue
            drafter = config["methods"][name]["drafter"] if "sections" in summary else config["drafter"]
            runs.append(
                Run(
                    folder=folder,
                    name=name if "sections" in summary else folder.name,
                    method=method_name(drafter),
                    drafter=drafter,
                    temperature=section["temperature"],
                    column=column,
                    datasets={dataset: methods[name] for dataset, methods in datasets.items()},
                    lossless=metrics["lossless"],
                )
            )
    return runs


def _datasets(section: Mapping[str, Any]) -> dict[str, Mapping[str, Metrics]]:
    """By the names that tables have, what each method did; the packaged prompts are in no paper."""
    prompts = section["prompts"]
    if prompts == "default":
        return {}
    # An evaluation puts the set's name before a task's.
    tasks = {task.removeprefix(f"{prompts}/"): methods for task, methods in section["tasks"].items()}
    if prompts != "spec_bench":
        # A set is named after its file, and may have tasks of its own, as MT-bench has.
        found = {_key(task): methods for task, methods in tasks.items()}
        return found | {_key(Path(prompts).stem): section["methods"]}
    found = {
        _key(name): methods for task, methods in tasks.items() for name in SPEC_BENCH_NAMES.get(task, ())
    }
    return found | ({OVERALL: section["methods"]} if tasks.keys() >= SPEC_BENCH_NAMES.keys() else {})


def _key(dataset: str) -> str:
    """A dataset's name without what people write differently: CNN/DM, cnn_dm."""
    return "".join(character for character in dataset.lower() if character.isalnum())

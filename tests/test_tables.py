"""The papers' tables: computed cells to the printed digit, and results of one's own beside published ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from specjax import tables
from specjax.errors import ConfigError
from specjax.eval.tables import Report, Table, to_csv, to_latex, to_markdown
from specjax.paper_tables import _published, leviathan
from specjax.paper_tables._runs import method_name, read_runs

TARGET, DEVICE = "models/tiny", "cpu"
SPEC_BENCH_TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def rows_of(name: str, *folders: Path, table: int = 0) -> dict[str, tuple[str, ...]]:
    """The cells of a table by the first of each row."""
    found: Report = tables.find_table(name).report(read_runs(folders))
    return {row[0]: tuple(row[1:]) for row in found.tables[table].rows}


def tokens(acceptance: float, length: int) -> float:
    """The closed form as the papers write it."""
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


# --- Computed tables -------------------------------------------------------------------------------------


def test_expected_tokens() -> None:
    lengths = (1, 2, 3, 4, 5, 6, 7, 8, 10, 16)
    rows = rows_of("expected_tokens")
    acceptances = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    assert rows == {f"{a:.2f}": tuple(f"{tokens(a, k):.2f}" for k in lengths) for a in acceptances}
    assert (rows["0.80"][3], rows["0.75"][4]) == ("3.36", "3.29")  # as the founding articles print


def test_optimal_draft_length() -> None:
    def best(acceptance: float, cost: float) -> str:
        factors = {k: tokens(acceptance, k) / (k * cost + 1) for k in range(1, 200)}
        length = max(factors, key=lambda k: factors[k])
        return f"{length}: {factors[length]:.2f}x"

    costs = (0.01, 0.02, 0.05, 0.1, 0.25)
    acceptances = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
    expected = {f"{a:.2f}": tuple(best(a, cost) for cost in costs) for a in acceptances}
    assert rows_of("optimal_draft_length") == expected
    assert rows_of("optimal_draft_length", table=1) == {"speed-up": ("3.36x", "3.02x", "2.59x", "1.81x")}


@pytest.mark.parametrize(("table", "share"), [(0, 0.0), (1, 0.1)])
def test_operations(table: int, share: float) -> None:
    lengths = (1, 2, 3, 4, 5, 7, 10)
    assert rows_of("operations", table=table) == {
        f"{a:.2f}": tuple(f"{(k * share + k + 1) / tokens(a, k):.2f}" for k in lengths)
        for a in (0.5, 0.6, 0.7, 0.8, 0.9)
    }


def test_leviathan_table_1_is_computed_to_the_printed_digit() -> None:
    rows = tables.find_table("leviathan").report([]).tables[0].rows
    assert rows == [
        ("0.6", "2", "1.53x", "1.53x", "1.96x", "1.96x"),
        ("0.7", "3", "1.58x", "1.58x", "2.53x", "2.53x"),
        ("0.8", "2", "1.23x", "1.23x", "2.44x", "2.44x"),
        ("0.8", "5", "1.63x", "1.63x", "3.69x", "3.69x"),
        ("0.9", "2", "1.11x", "1.11x", "2.71x", "2.71x"),
        ("0.9", "10", "1.60x", "1.60x", "6.86x", "6.86x"),
    ]


def test_leviathan_table_4_is_what_some_unrounded_acceptance_and_cost_give() -> None:
    rows = tables.find_table("leviathan").report([]).tables[1].rows
    assert rows[0] == ("EnDe, T=0", "T5-small 77M", "7", "0.75", "0.02", "3.16x", "3.02-3.30", "3.2x", "3.4x")
    assert rows[5][-4:] == ("1.93x", "1.90-1.97", "2.0x", "1.4x")  # not the rounded inputs' digit

    def fits(row: _published.Measured, printed: float) -> bool:
        low, high = leviathan.possible(row)
        return low - 0.05 <= printed <= high + 0.05

    figures = [float(row.expected) for row in _published.LEVIATHAN_TABLE4]
    assert all(map(fits, _published.LEVIATHAN_TABLE4, figures))
    # What was measured is another matter, and so is a row's neighbour.
    assert not all(map(fits, _published.LEVIATHAN_TABLE4, figures[1:] + figures[:1]))


def test_chen() -> None:
    assert rows_of("chen") == {
        "XSum, nucleus": ("14.1", "7.52", "1.92x", "1.88x", "2.83", "0.71"),
        "XSum, greedy": ("14.1", "7.00", "2.01x", "2.01x", "3.04", "0.75"),
        "HumanEval, nucleus": ("14.1", "5.73", "2.46x", "2.46x", "3.72", "0.85"),
    }


def test_medusa_models() -> None:
    assert rows_of("medusa_ablation", table=1) == {
        "Vicuna-7B": ("3.47", "1.22", "2.83x", "2.84x"),
        "Zephyr-7B": ("3.14", "1.18", "2.66x", "2.66x"),
        "Vicuna-13B": ("3.51", "1.23", "2.83x", "2.85x"),
        "Vicuna-33B": ("3.01", "1.27", "2.35x", "2.37x"),
    }


# --- Published figures -----------------------------------------------------------------------------------


def means_agree(figures: tuple[_published.Figure, ...]) -> bool:
    """Whether the last figure is the mean of the others, all rounded to two decimals."""
    *own, mean = [(f.speedup or 0.0, f.tokens_per_pass or 0.0) for f in figures]
    return all(abs(sum(v) / len(v) - m) < 0.0101 for v, m in zip(zip(*own, strict=True), mean, strict=True))


def test_published_means_are_those_of_their_rows() -> None:
    rows = {
        (*place, method): row
        for place, methods in _published.EAGLE3_TABLE1.items()
        for method, row in methods.items()
    }
    apart = [place for place, row in rows.items() if not means_agree(row)]
    assert apart == [("Llama-3.1-8B", 1, "HASS"), ("Llama-3.1-8B", 1, "EAGLE-3")]  # the paper's own
    first = rows["Vicuna-13B", 0, "small LM"]
    slipped = first[0]._replace(tokens_per_pass=2.72)
    assert not means_agree((slipped, *first[1:]))


@pytest.mark.parametrize(
    ("text", "shown"),
    [("1.93/2.27", "1.93x / 2.27"), ("2.71", "2.71x"), ("2.71m", "2.71x (m)"), ("-", "-")],
)
def test_figures(text: str, shown: str) -> None:
    assert str(*_published.figures(text)) == shown


def test_published_figures_alone() -> None:
    whole = rows_of("eagle3_table1")
    assert list(whole) == [
        *("small LM", "prompt lookup", "Medusa", "Lookahead", "Hydra", "EAGLE", "EAGLE-2", "EAGLE-3")
    ]
    best = ("5.58x / 6.65", "6.47x / 7.54", "5.32x / 6.29", "5.16x / 6.17", "5.01x / 6.47", "5.51x / 6.62")
    assert whole["EAGLE-3"] == best
    assert rows_of("eagle3_table1", table=2)["EAGLE-2"][0] == "3.80x / 4.40"
    leader = ("2.56x", "1.78x", "2.09x", "2.07x", "2.66x", "1.86x", "2.19x / 4.35")
    assert rows_of("spec_bench")["EAGLE-2"] == leader
    assert rows_of("spec_bench", table=1)["EAGLE-2"] == ("2.19x / 4.35", "2.36x / 4.34")
    assert [*rows_of("medusa_ablation").values()] == [("~1.5x",), ("~1.9x",), ("~2.2x",), ("~2.8x",)]
    first = tables.find_table("leviathan_table2").report([]).tables[0].rows[0]
    assert first == ("EnDe, T=0", "T5-small 77M", "7", "0.75", "3.4x")


# --- Results of one's own --------------------------------------------------------------------------------


def metrics(speedup: float, interval: list[float] | None = None, lossless: bool = True) -> dict[str, Any]:
    gain = {"value": speedup, "interval": interval}
    return {"speedup": gain, "tokens_per_step": 2 * speedup, "acceptance": 0.5, "lossless": lossless}


def write(folder: Path, summary: dict[str, Any]) -> Path:
    folder.mkdir()
    summary["environment"] = {"device_kind": DEVICE}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def comparison(
    folder: Path, drafter: dict[str, Any], tasks: dict[str, dict[str, Any]], **config: Any
) -> Path:
    """A workdir as the task "compare" leaves it: on each task, and over all of them, a speed-up."""
    setting = {"target": TARGET, "prompts": "spec_bench", "temperature": 0.0, "batch_size": 1, **config}
    plain = metrics(1.0)
    return write(
        folder,
        {
            "config": {"drafter": drafter, **setting},
            "methods": {"plain": plain, "mine": metrics(1.5, [1.4, 1.6], config.get("lossless", True))},
            "tasks": {task: {"plain": plain, "mine": own} for task, own in tasks.items()},
        },
    )


NGRAM, EAGLE = {"name": "ngram", "num_nodes": None}, {"name": "eagle", "num_nodes": None}
ALL_TASKS = {task: metrics(1.1 + place / 10) for place, task in enumerate(SPEC_BENCH_TASKS)}


def test_ours_beside_spec_bench(tmp_path: Path) -> None:
    whole = comparison(tmp_path / "whole", NGRAM, ALL_TASKS)
    part = comparison(tmp_path / "part", EAGLE, {"qa": metrics(0.9, [0.8, 1.0])}, lossless=False)
    report = tables.find_table("spec_bench").report(read_runs([whole, part]))
    header = report.tables[0].columns
    assert header[:3] == ("method", "MT-bench\nVicuna-7B\nRTX 3090", "MT-bench\nours: models/tiny\ncpu")
    assert "same machine or model" in report.notes[0].replace("the ", "")
    rows = {row[0]: row[1:] for row in report.tables[0].rows}
    assert rows["prompt lookup"] == (
        *("1.64x", "1.10x / 2.20", "1.15x", "1.20x / 2.40", "2.46x", "1.30x / 2.60", "1.28x", "1.40x / 2.80"),
        *("1.72x", "1.50x / 3.00", "1.71x", "1.60x / 3.20", "1.64x / 1.73", "1.50x / 3.00\n1.40-1.60"),
    )
    assert rows["EAGLE"] == (
        *("2.31x", "-", "1.72x", "-", "2.00x", "-", "1.91x", "0.90x / 1.80\n0.80-1.00\nLOSSY"),
        *("2.38x", "-", "1.75x", "-", "2.03x / 3.57", "-"),
    )


def test_methods_unknown_to_a_paper_and_several_of_one(tmp_path: Path) -> None:
    folders = [
        comparison(tmp_path / name, drafter, {"qa": metrics(speedup)})
        for name, drafter, speedup in (
            ("chain", EAGLE, 1.0),
            ("longer", EAGLE, 1.2),
            ("mine", {"name": "my.suffix"}, 1.3),
        )
    ]
    rows = rows_of("spec_bench", *folders)
    assert "EAGLE" not in rows
    published = ("2.31x", "1.72x", "2.00x", "1.91x")
    assert rows["EAGLE: chain"][:5] == (*published, "1.00x / 2.00")
    assert rows["EAGLE: longer"][:5] == (*published, "1.20x / 2.40")
    assert rows["suffix"] == ("-", "-", "-", "-", "1.30x / 2.60", "-", "-", "-")
    with pytest.raises(ConfigError, match="chain on QA a second time"):
        rows_of("spec_bench", folders[0], folders[0])


def test_ours_beside_eagle3(tmp_path: Path) -> None:
    sets = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
    drafter = {"name": "eagle", "num_nodes": 32}

    def section(temperature: float, place: int, batch_size: int = 1) -> dict[str, Any]:
        methods = {"plain": metrics(1.0), "tree": metrics(1.0 + place / 10 + temperature)}
        own = {"prompts": sets[place], "temperature": temperature, "batch_size": batch_size}
        return {**own, "methods": methods, "tasks": {sets[place]: methods}}

    folder = write(
        tmp_path / "evaluation",
        {
            "config": {"target": TARGET, "methods": {"tree": {"drafter": drafter}}},
            "sections": [*(section(0.0, place) for place in range(5)), section(1.0, 1), section(0.0, 1, 4)],
        },
    )
    row = rows_of("eagle3_table1", folder)["EAGLE-2"]
    assert row == (
        *("4.26x / 4.83", "1.00x / 2.00", "4.96x / 5.41", "1.10x / 2.20", "1.10x / 2.20"),
        *("4.22x / 4.79", "1.20x / 2.40", "4.25x / 4.89", "1.30x / 2.60", "3.40x / 4.21", "1.40x / 2.80"),
        *("4.22x / 4.83", "1.20x / 2.40"),
    )
    report = tables.find_table("eagle3_table1").report(read_runs([folder]))
    assert report.tables[0].columns[5] == "HumanEval\nours: models/tiny\ncpu, batch 4"
    # At temperature 1 a single set: no mean.
    assert rows_of("eagle3_table1", folder, table=2)["EAGLE-2"][1:3] == ("4.22x / 4.89", "2.10x / 4.20")
    assert "ours" not in report.tables[2].columns[-1]


def test_ours_beside_medusa_and_leviathan(tmp_path: Path) -> None:
    chat = {"mt_bench": metrics(1.2)}
    trees: dict[str, dict[str, Any]] = {
        "chain": {"branching": []},
        "full": {"branching": [3, 3]},
        "paths": {"branching": [], "paths": [[0], [1]]},
        "dynamic": {"branching": [3, 3], "num_nodes": 9},
    }
    heads = [comparison(tmp_path / n, {"name": "medusa", **tree}, chat) for n, tree in trees.items()]
    assert rows_of("medusa_ablation", *heads) == {
        "Medusa-1 heads, no tree": ("~1.5x", "1.20x / 2.40"),
        "with a full tree": ("~1.9x", "1.20x / 2.40"),
        "with an optimised tree": ("~2.2x", "1.20x / 2.40"),
        "with Medusa-2 training": ("~2.8x", "-"),
        "with a dynamic tree": ("-", "1.20x / 2.40"),
    }
    small = {"name": "draft_model", "source": "tiny", "draft_length": 4}
    folder = comparison(tmp_path / "small", small, {"summarization": metrics(1.3, [1.2, 1.4])})
    rows = tables.find_table("leviathan_table2").report(read_runs([folder])).tables[0].rows
    assert rows[9:11] == [
        ("CNN/DM, T=0", "ours: tiny", "4", "0.50", "-", "1.30x / 2.60\n1.20-1.40"),
        ("CNN/DM, T=1", "T5-small 77M", "5", "0.53", "2.3x", "-"),
    ]


@pytest.mark.parametrize(
    ("name", "config", "tasks"),
    [
        ("spec_bench", {"temperature": 1.0}, ALL_TASKS),
        ("spec_bench", {"prompts": "default"}, ALL_TASKS),  # our own prompts of the same name
        ("eagle3_table1", {"temperature": 0.5}, ALL_TASKS),
        ("eagle3_table1", {}, {"translation": metrics(1.0)}),
        ("medusa_ablation", {}, ALL_TASKS),
        ("leviathan_table2", {}, ALL_TASKS),
    ],
)
def test_results_that_do_not_belong_are_refused(
    tmp_path: Path, name: str, config: dict[str, Any], tasks: dict[str, dict[str, Any]]
) -> None:
    with pytest.raises(ConfigError, match="belongs into this table: it needs"):
        rows_of(name, comparison(tmp_path / "run", NGRAM, tasks, **config))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"config": {"task": "exactness"}, "methods": {}}'])
def test_what_is_no_summary_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match="is no summary of the tasks"):
        read_runs([tmp_path])


def test_a_set_is_named_after_its_file_whatever_tasks_it_has(tmp_path: Path) -> None:
    writing = {"writing": metrics(1.2)}
    folder = comparison(tmp_path / "run", NGRAM, writing, prompts="data/mt_bench.jsonl")
    (run,) = read_runs([folder])
    assert [str(run.cell(name)) for name in ("MT-bench", "writing", "GSM8K")] == [
        *("1.50x / 3.00\n1.40-1.60", "1.20x / 2.40", "None")
    ]


def test_names_of_methods() -> None:
    names = [{"name": "eagle"}, {"name": "eagle", "num_nodes": 60}, {"name": "eagle3", "num_nodes": 60}]
    assert list(map(method_name, names)) == ["EAGLE", "EAGLE-2", "EAGLE-3"]


# --- Formats and the command -----------------------------------------------------------------------------

SAMPLE = Table("50% of a_b", ("name", "speed-up\npublished"), [("x & y, ~z", "1.0x\n{2}"), ("a", "-")])


def test_latex() -> None:
    assert to_latex(SAMPLE) == (
        "\\begin{table}\n\\caption{50\\% of a\\_b}\n\\begin{tabular}{lr}\n\\toprule\n"
        "name & speed-up published \\\\\n\\midrule\n"
        "x \\& y, \\textasciitilde{}z & 1.0x \\{2\\} \\\\\na & - \\\\\n\\bottomrule\n"
        "\\end{tabular}\n\\end{table}\n"
    )


def test_csv_and_markdown() -> None:
    title, *lines = to_csv(SAMPLE).splitlines()
    assert title == "# 50% of a_b"
    cells = [["name", "speed-up published"], ["x & y, ~z", "1.0x {2}"], ["a", "-"]]
    assert list(csv.reader(lines)) == cells
    assert to_markdown(SAMPLE).splitlines()[2:] == [
        "| name | speed-up published |",
        "| :--- | ---: |",
        "| x & y, ~z | 1.0x {2} |",
        "| a | - |",
    ]


def test_list_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == tables.table_names()
    assert "spec_bench" in tables.table_names() and not any(n.startswith("_") for n in tables.table_names())
    assert all(line.endswith(").") for line in lines)  # each names its source


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("text", "HumanEval, nucleus"),
        ("md", "| HumanEval, nucleus | 14.1 | 5.73 | 2.46x | 2.46x | 3.72 | 0.85 |"),
        ("latex", "HumanEval, nucleus & 14.1 & 5.73 & 2.46x & 2.46x & 3.72 & 0.85 \\\\"),
        ("csv", '"HumanEval, nucleus",14.1,5.73,2.46x,2.46x,3.72,0.85'),
    ],
)
def test_formats(capsys: pytest.CaptureFixture[str], form: str, line: str) -> None:
    assert tables.main(["--table=chen", f"--format={form}"]) == 0
    printed = capsys.readouterr().out
    assert line in printed and "arXiv 2302.01318" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--table is missing: --list"),
        (["--table=chem"], "did you mean 'chen'?"),
        (["--table=_runs"], "there is no table '_runs'"),
        (["--table=chen", "--format=pdf"], "choose one of text, md, latex, csv"),
        (["--table=chen", "--results=runs/x"], "is computed: leave --results out"),
        (["--table=spec_bench", "--results=/nowhere"], "cannot be read"),
        (["--tabel=chen"], "--help lists the flags"),
        (["chen"], "'chen' is no flag"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert tables.main(arguments) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("specjax: error:") and message in error and error.count("\n") == 1

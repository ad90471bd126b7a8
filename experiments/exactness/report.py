"""Tables and plots of `worked_examples.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specjax.analysis import plots
from specjax.analysis.plots import Series

Results = dict[str, Any]
PUBLISHED_GAINS = ("3.36", "3.02", "2.59", "1.81")


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def p_value(value: float) -> str:
    """Two digits; what a float cannot hold is no certainty."""
    return f"{value:.2g}" if value > 1e-300 else "< 1e-300"


def tables(results: Results) -> str:
    """Every table of the report."""
    law, blocks, lengths = results["output_law"], results["kept_blocks"], results["draft_lengths"]
    by_position = [
        [
            rule,
            str(position + 1),
            f"{here['chi_square']:.1f}",
            p_value(here["p_value"]),
            f"{here['kl']:.5f}",
            f"{early['tv']:.4f}",
            f"{early['tv_expected_of_exact_draws']:.4f}",
        ]
        for rule in ("rejection", "unverified")
        for position, (here, early) in enumerate(
            zip(law[rule]["all_rows"], law[rule]["first_10000_rows"], strict=True)
        )
    ]
    long_rows = [
        [
            rule,
            str(seed),
            f"{run['chi_square']:.0f}",
            str(run["degrees_of_freedom"]),
            p_value(run["p_value"]),
            f"{run['kl']:.4f}",
        ]
        for rule in ("rejection", "unverified")
        for seed, run in enumerate(law["long_texts"][rule])
    ]
    block_rows = [
        [
            blur,
            f"{b['tv']:.4f}",
            f"{b['kept_closed_form']:.4f}",
            f"{b['kept_measured']:.4f} ± {b['standard_error']:.4f}",
            f"{b['passes_per_1000_tokens']:.1f}",
            f"{b['published']['tv']:.4f}",
            f"{b['published']['kept']:.4f}",
            f"{b['published']['measured']:.4f}",
        ]
        for blur, b in blocks.items()
    ]
    best_rows = [
        [verify_cost, cost, *(f"{c['draft_length']} ({c['factor']:.2f}x)" for c in by_acceptance.values())]
        for verify_cost, by_cost in lengths["optimal"].items()
        for cost, by_acceptance in by_cost.items()
    ]
    acceptance_rows = [
        [
            name,
            f"{r['kl']:.4f}",
            f"{r['closed_form']:.4f}",
            f"{r['measured']:.4f}",
            f"{r['low']:.4f} to {r['high']:.4f}",
        ]
        for name, drafts in results["acceptance"].items()
        for r in drafts
    ]
    gains = lengths["gain_of_3.6292_kept_with_4_drafts"]
    printed = [
        ["tokens a pass at α = 0.8, K = 4", "3.36", f"{lengths['tokens_at_0.8_and_4']:.4f}"],
        ["tokens a pass at α = 0.75, K = 5", "3.29", f"{lengths['tokens_at_0.75_and_5']:.4f}"],
        *(
            [f"gain of 3.6292 kept of 4 drafts at c = {cost}", published, f"{gain:.4f}"]
            for (cost, gain), published in zip(gains.items(), PUBLISHED_GAINS, strict=True)
        ),
    ]
    best_columns = ["verification", "c", *(f"α = {a}" for a in lengths["expected_tokens"])]
    by_position_columns = ["rule", "position", "chi-square", "p", "KL", "TV at 10 000", "of exact draws"]
    block_columns = ["blur", "TV", "kept, closed form", "kept, measured", "passes per 1000 tokens"]
    block_columns += ["published TV", "published closed form", "published measured"]
    parts = {
        "Output law": table(by_position_columns, by_position),
        f"Texts of {law['long_texts']['tokens']} tokens": table(
            ["rule", "seed", "chi-square", "degrees of freedom", "p", "KL"], long_rows
        ),
        "Tokens kept of a block of 4": table(block_columns, block_rows),
        "Printed figures": table(["figure", "published", "closed form"], printed),
        "Best number of drafts": table(best_columns, best_rows),
        "Acceptance": table(["draft", "KL(draft, target)", "1 - TV", "measured", "95 %"], acceptance_rows),
    }
    return "\n".join(f"## {name}\n\n{text}" for name, text in parts.items())


def draw(results: Results, folder: Path) -> None:
    """Write every plot."""
    lengths = results["draft_lengths"]["expected_tokens"]
    curves = {f"α = {a}": Series(range(1, len(y) + 1), y) for a, y in lengths.items()}
    figure = plots.lines(curves, x_label="drafts a pass, K", y_label="expected tokens a pass")
    plots.save(figure, folder / "expected_tokens.png")

    for blur, block in results["kept_blocks"].items():
        figure = plots.histogram(
            block["lengths_closed_form"],
            block["lengths_measured"],
            first=1,
            x_label="tokens kept of a block of 4, no bonus",
            title=f"blur {blur}",
        )
        plots.save(figure, folder / f"block_lengths_{blur}.png")

    def measured(drafts: list[Results]) -> Series:
        errors = np.array([[r["measured"] - r["low"], r["high"] - r["measured"]] for r in drafts]).T
        return Series([r["kl"] for r in drafts], [r["measured"] for r in drafts], errors)

    labels = {"x_label": "KL(draft, target), nats", "y_label": "acceptance of a draft"}
    families = results["acceptance"]
    mixed = families["mixed with noise"]
    closed = Series([r["kl"] for r in mixed], [r["closed_form"] for r in mixed])
    curves = {"closed form, 1 - TV": closed, "measured, 95 %": measured(mixed)}
    plots.save(plots.lines(curves, **labels), folder / "acceptance_over_kl.png")
    points = {name: measured(drafts) for name, drafts in families.items()}
    plots.save(plots.scatter(points, **labels), folder / "acceptance_by_family.png")

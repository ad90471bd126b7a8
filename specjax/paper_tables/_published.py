"""Every published figure that the tables show, each with its source.

Speed-ups are over plain decoding on the same machine, tokens per pass count the bonus token. In the texts
below a figure is "speed-up/tokens per pass" or a speed-up alone; "-" is none, and a trailing "m" marks a
figure that was recalled, not read.
"""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """What a paper reports of a method on a task."""

    speedup: float | None
    tokens_per_pass: float | None
    recalled: bool

    def __str__(self) -> str:
        parts = [f"{self.speedup:.2f}x"] if self.speedup is not None else []
        parts += [f"{self.tokens_per_pass:.2f}"] if self.tokens_per_pass is not None else []
        return " / ".join(parts) + (" (m)" if self.recalled else "") if parts else "-"


class Source(NamedTuple):
    """Where figures come from, and what they were measured on."""

    paper: str
    target: str
    device: str


def figures(text: str) -> tuple[Figure, ...]:
    """The figures of a row, as the module's docstring describes them."""
    return tuple(map(_figure, text.split()))


def _figure(text: str) -> Figure:
    if text == "-":
        return Figure(None, None, False)
    speedup, _, tokens = text.removesuffix("m").partition("/")
    return Figure(float(speedup), float(tokens) if tokens else None, text.endswith("m"))


# --- Leviathan et al., arXiv 2211.17192 ------------------------------------------------------------------


class Tradeoff(NamedTuple):
    """A row of table 1, where drafts cost nothing."""

    acceptance: float
    draft_length: int
    operations: str
    speed: str


class Measured(NamedTuple):
    """A row of tables 2 and 4: `expected` by the formula with c unrounded, `measured` on the machine."""

    task: str
    draft: str
    temperature: int
    draft_length: int
    acceptance: float
    draft_cost: float
    expected: str
    measured: str


LEVIATHAN = Source("arXiv 2211.17192", "T5-XXL 11B", "TPU-v4")
LEVIATHAN_TABLE1 = (
    Tradeoff(0.6, 2, "1.53", "1.96"),
    Tradeoff(0.7, 3, "1.58", "2.53"),
    Tradeoff(0.8, 2, "1.23", "2.44"),
    Tradeoff(0.8, 5, "1.63", "3.69"),
    Tradeoff(0.9, 2, "1.11", "2.71"),
    Tradeoff(0.9, 10, "1.60", "6.86"),
)
SMALL, BASE, LARGE = "T5-small 77M", "T5-base 250M", "T5-large 800M"
LEVIATHAN_TABLE4 = (
    Measured("EnDe", SMALL, 0, 7, 0.75, 0.02, "3.2", "3.4"),
    Measured("EnDe", BASE, 0, 7, 0.80, 0.04, "3.3", "2.8"),
    Measured("EnDe", LARGE, 0, 7, 0.82, 0.11, "2.5", "1.7"),
    Measured("EnDe", SMALL, 1, 7, 0.62, 0.02, "2.3", "2.6"),
    Measured("EnDe", BASE, 1, 5, 0.68, 0.04, "2.4", "2.4"),
    Measured("EnDe", LARGE, 1, 3, 0.71, 0.11, "2.0", "1.4"),
    Measured("CNN/DM", SMALL, 0, 5, 0.65, 0.02, "2.4", "3.1"),
    Measured("CNN/DM", BASE, 0, 5, 0.73, 0.04, "2.6", "3.0"),
    Measured("CNN/DM", LARGE, 0, 3, 0.74, 0.11, "2.0", "2.2"),
    Measured("CNN/DM", SMALL, 1, 5, 0.53, 0.02, "1.9", "2.3"),
    Measured("CNN/DM", BASE, 1, 3, 0.55, 0.04, "1.8", "2.2"),
    Measured("CNN/DM", LARGE, 1, 3, 0.56, 0.11, "1.6", "1.7"),
)

# --- Chen et al., arXiv 2302.01318, table 1 --------------------------------------------------------------


class TokenTime(NamedTuple):
    """Milliseconds a token with speculation, and the printed speed-up."""

    benchmark: str
    milliseconds: float
    speedup: str


CHEN = Source("arXiv 2302.01318, table 1", "Chinchilla 70B, draft 4B", "16 TPU-v4")
CHEN_DRAFT_LENGTH = 4
CHEN_TARGET_MS, CHEN_DRAFT_MS = 14.1, 1.8  # a token
CHEN_TABLE1 = (
    TokenTime("XSum, nucleus", 7.52, "1.92"),
    TokenTime("XSum, greedy", 7.00, "2.01"),
    TokenTime("HumanEval, nucleus", 5.73, "2.46"),
)

# --- Li et al., EAGLE-3, arXiv 2503.01840, table 1 -------------------------------------------------------

EAGLE3_DATASETS = ("MT-bench", "HumanEval", "GSM8K", "Alpaca", "CNN/DM")
# The text says RTX 3090 for targets below 70B, a later version's caption A100.
EAGLE3 = {
    target: Source("arXiv 2503.01840, table 1", target, "RTX 3090 or A100")
    for target in ("Vicuna-13B", "Llama-3.1-8B")
}
# Target and temperature -> method -> the datasets in their order, then the mean. Two printed means are not
# their rows': HASS's and EAGLE-3's speed-up for Llama-3.1-8B at temperature 1, which would be 2.88 and 3.48.
EAGLE3_TABLE1 = {
    ("Vicuna-13B", 0): {
        "small LM": figures("1.93/2.27 2.23/2.57 1.77/2.01 1.76/2.03 1.93/2.33 1.92/2.24"),
        "prompt lookup": figures("1.58/1.63 1.85/1.93 1.68/1.73 1.16/1.19 2.42/2.50 1.74/1.80"),
        "Medusa": figures("2.07/2.59 2.50/2.78 2.23/2.64 2.08/2.45 1.71/2.09 2.12/2.51"),
        "Lookahead": figures("1.65/1.69 1.71/1.75 1.81/1.90 1.46/1.51 1.46/1.50 1.62/1.67"),
        "Hydra": figures("2.88/3.65 3.28/3.87 2.93/3.66 2.86/3.53 2.05/2.81 2.80/3.50"),
        "EAGLE": figures("3.07/3.98 3.58/4.39 3.08/3.97 3.03/3.95 2.49/3.52 3.05/3.96"),
        "EAGLE-2": figures("4.26/4.83 4.96/5.41 4.22/4.79 4.25/4.89 3.40/4.21 4.22/4.83"),
        "EAGLE-3": figures("5.58/6.65 6.47/7.54 5.32/6.29 5.16/6.17 5.01/6.47 5.51/6.62"),
    },
    ("Llama-3.1-8B", 0): {
        "EAGLE-2": figures("3.16/4.05 3.66/4.71 3.39/4.24 3.28/4.12 2.65/3.45 3.23/4.11"),
        "HASS": figures("3.55/4.41 3.78/4.85 3.45/4.47 3.57/4.55 2.77/3.55 3.42/4.37"),
        "EAGLE-3": figures("4.40/6.13 4.85/6.74 4.48/6.23 4.82/6.70 3.65/5.34 4.44/6.23"),
    },
    ("Vicuna-13B", 1): {
        "small LM": figures("1.62/1.84 1.72/1.97 1.46/1.73 1.52/1.78 1.66/1.89 1.60/1.84"),
        "EAGLE": figures("2.32/3.20 2.65/3.63 2.57/3.60 2.45/3.57 2.23/3.26 2.44/3.45"),
        "EAGLE-2": figures("3.80/4.40 4.22/4.89 3.77/4.41 3.78/4.37 3.25/3.97 3.76/4.41"),
        "EAGLE-3": figures("4.57/5.42 5.15/6.22 4.71/5.58 4.49/5.39 4.33/5.72 4.65/5.67"),
    },
    ("Llama-3.1-8B", 1): {
        "EAGLE-2": figures("2.44/3.16 3.39/4.39 2.86/3.74 2.83/3.65 2.44/3.14 2.80/3.62"),
        "HASS": figures("2.58/3.31 3.48/4.50 2.87/3.77 3.04/3.98 2.42/3.11 2.89/3.73"),
        "EAGLE-3": figures("3.07/4.24 4.13/5.82 3.32/4.59 3.90/5.56 2.99/4.39 3.45/4.92"),
    },
}

# --- Spec-Bench, arXiv 2401.07851: the leaderboard of github.com/hemingkx/Spec-Bench ---------------------

SPEC_BENCH_TASKS = ("MT-bench", "translation", "summarization", "QA", "mathematics", "RAG")
SPEC_BENCH = Source("Spec-Bench's leaderboard (arXiv 2401.07851)", "Vicuna-7B", "RTX 3090")
# The tasks in their order, then all together.
SPEC_BENCH_3090 = {
    "EAGLE-2": figures("2.56 1.78 2.09 2.07 2.66 1.86 2.19/4.35"),
    "EAGLE": figures("2.31 1.72 2.00 1.91 2.38 1.75 2.03/3.57"),
    "Hydra": figures("2.18 1.79 1.66 1.85 2.28 1.62 1.91/3.26"),
    "small LM": figures("1.94 1.37 1.96 1.86 1.81 1.83 1.79/2.28"),
    "prompt lookup": figures("1.64 1.15 2.46 1.28 1.72 1.71 1.64/1.73"),
    "Medusa": figures("1.61 1.39 1.28 1.40 1.64 1.25 1.44/2.32"),
    "Token Recycling": figures("1.42 1.29 1.43 1.30 1.59 1.36 1.40/2.73"),
    "REST": figures("1.44 1.15 1.17 1.35 1.30 1.26 1.28/1.63"),
    "Lookahead": figures("1.17 1.00 1.11 1.06 1.32 1.06 1.13/1.64"),
}
# The same methods on another device, all tasks together.
SPEC_BENCH_A100 = {
    "EAGLE-2": figures("2.36/4.34"),
    "EAGLE": figures("2.10/3.58"),
    "Hydra": figures("2.07/3.26"),
    "small LM": figures("1.52/2.28"),
    "prompt lookup": figures("1.66/1.75"),
    "Medusa": figures("1.71/2.31"),
    "Token Recycling": figures("2.22/2.73"),
    "REST": figures("1.48/1.82"),
    "Lookahead": figures("1.34/1.64"),
}

# --- Cai et al., Medusa, arXiv 2401.10774 ----------------------------------------------------------------


class MedusaModel(NamedTuple):
    """A column of table 1: tokens per pass, what a pass costs in plain ones, and the speed-up."""

    model: str
    acceleration_rate: float
    overhead: float
    speedup: str


MEDUSA = Source("arXiv 2401.10774, tables 1 and 3", "Vicuna-7B", "A100 (m)")
MEDUSA_TABLE1 = (
    MedusaModel("Vicuna-7B", 3.47, 1.22, "2.83"),
    MedusaModel("Zephyr-7B", 3.14, 1.18, "2.66"),
    MedusaModel("Vicuna-13B", 3.51, 1.23, "2.83"),
    MedusaModel("Vicuna-33B", 3.01, 1.27, "2.35"),
)
# What is added, one on top of the other, and the speed-up, on MT-bench; the paper gives it as "about".
MEDUSA_TABLE3 = (
    ("Medusa-1 heads, no tree", "~1.5x"),
    ("with a full tree", "~1.9x"),
    ("with an optimised tree", "~2.2x"),
    ("with Medusa-2 training", "~2.8x"),
)
